"""Serves calls on one GPU: by their plan (a kept CUDA graph with everything that is known about such calls), or by
OneCard.serve_without_plan, the slow path that leads to a plan.

The slow path tries the backends, the fastest first, down to PyTorch's operators launched one by one. If a backend
fails, the reason is noted and the next backend is tried. The slow path's methods, each of which calls the next:

_serve_locked: takes the lock, and chooses the candidates.
_with_overflow_retry: repeats the call with attention in float32 after an overflow.
_first_to_serve: tries one candidate after the other.
_on_device: loads the kernels of one backend.
_replay_or_launch: replays the shape's graph, or launches our forward.
_launch: launches our forward, operator by operator.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..core.attempt import Attempt, Outcome, attempted
from ..core.call import Call
from ..core.device import Candidates, Device, KernelUse
from ..core.guard import first_line
from ..core.image import GRAPH, PLAIN
from ..core.key import LOSSLESS, Lossy, ShapeKey
from ..core.operators import Operators
from ..core.policy import Answer, Host, Served
from ..core.precision import Flags, autocast_dtype, flags_for, is_autocast_on, our_modes
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.table import Entry, State, Stopwatch
from .backend_choice import BackendChoice, Candidate, LowBitRoute, first_to_serve
from .function_calls import FunctionCalls
from .network import Network
from .patched_route import WITHIN_FUNCTION, PatchedRoute
from .plan import Plan, replayed
from .rounding import rounds_as, spread
from .services import Services
from .stepping import Stepping
from .verify import prove, why_cached_pass_differs

log = logging.getLogger("onediff")
# Bytes of GPU memory that the host is asked to free in addition to what a graph lacks, because the free memory varies
# from call to call.
ROOM_TO_SPARE = 64 << 20


class CardRoute:
    """Serves each call on one GPU: the latent's. There is one CardRoute for all networks and GPUs.

    choice: chooses the backends to try. low_bit: chooses and quantizes the layers in eight bits. patched: serves calls
        with functions of other extensions.
    """

    def __init__(self, services: Services, stepping: Stepping) -> None:
        """stepping: the step policies. answer() uses those of them that decide separately for each GPU."""
        self.services = services
        self._stepping = stepping
        self.choice = BackendChoice(services)
        self.low_bit = LowBitRoute(services)
        self.patched = PatchedRoute(services)

    def card(self, network: Network, settings: Settings, times_host: bool = True) -> OneCard:
        """A new OneCard for a network's calls under these settings. times_host: whether a comparison with the host's
        forward also measures how long the host takes for such a call. False if the host's forward computes more than
        the call, such as the rows of both GPUs."""
        return OneCard(self, network, settings, times_host)

    def answer(self, card: OneCard, call: Call, host: Host, is_counted: bool = True) -> Answer:
        """The answer to a call: by a step policy that decides for each GPU, or computed by `card`.

        host: runs the host's forward of this call, with whose output the first one at a shape is compared. is_counted:
        whether to count the call in the statistics; False for a part of a call, if the whole call is counted. Raises
        Refusal if the host must compute the call, torch.cuda.OutOfMemoryError, and HostError.
        """
        compute = self._stepping.around(card, False, card.network, card.settings, is_counted=is_counted)
        return compute(call, host)


class OneCard:
    """Computes calls of one network on one GPU under fixed settings: a core.policy.Compute. Made anew for each call of
    the host; step policies may call it several times, or not at all.

    tried: the entry that the slow path tried last, whether or not it served; None if no call came to the slow path.
    """

    def __init__(self, route: CardRoute, network: Network, settings: Settings, times_host: bool) -> None:
        """See CardRoute.card."""
        self._route = route
        self._services = route.services
        self._graphs = route.services.graphs
        self._devices = route.services.devices
        self.network = network
        self.settings = settings
        self._times_host = times_host
        self.tried: Entry | None = None

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The answer to a call: replayed by its plan, or by serve_without_plan. host: see CardRoute.answer; None if the
        host cannot compute this call. Raises what CardRoute.answer raises."""
        served = replayed(self._services, self.network, call, self.settings)
        if served is None:
            served = self.serve_without_plan(call, host)
        return Answer(served.output, served)

    def serve_without_plan(self, call: Call, host: Host | None) -> Served:
        """Serve a call that no plan serves, and take one step towards a plan for calls like it: the output of the first
        such call is compared with the host's; after the second call, a graph is captured; the third call replays the
        graph, and a plan is kept (see _may_be_planned for calls that get none).

        host: None if the host cannot compute this call: then a call that would have to be compared is refused. Raises
        what CardRoute.answer raises.
        """
        if call.patches is None:
            served = self._serve_locked(call, None)
            is_first = self._check(call, served, None, host)
        else:
            functions = FunctionCalls(call.patches, call.latent.device)
            with functions.rewound_on_failure():
                served = self._serve_locked(call, functions)
                is_first = self._check(call, served, functions, host)
        # The call has been answered: a failure below must not affect it.
        self._services.guard.attempt(
            "getting ready for later calls", lambda: self._prepare(call, served, captures=not is_first)
        )
        return served

    def _serve_locked(self, call: Call, functions: FunctionCalls | None) -> Served:
        """The output by the first backend that serves the call, computed under the runtime's lock. functions: other
        extensions' functions that the call brings; None if it brings none. Raises Refusal if no backend serves the
        call, or if an extension's function makes this call while our forward waits for the function; HostError from
        functions; and torch.cuda.OutOfMemoryError."""
        services = self._services
        with services.computing(call.latent.device):
            if services.is_between_graphs:
                raise Refusal(WITHIN_FUNCTION)
            candidates = self._route.choice.begin(self.network, self.settings, call)
            return self._with_overflow_retry(candidates, call, functions)

    def _check(self, call: Call, served: Served, functions: FunctionCalls | None, host: Host | None) -> bool:
        """Compare an output with the host's, unless an output of this shape with these weights was compared before; an
        image's output is compared although a warm-up's was. Cached passes are not compared: check() does that. Returns
        whether the output was compared now.

        functions: see _serve_locked; rewound first, because the host calls the same functions again. host: None if the
        host cannot compute this call. Raises Refusal if the output must not be used: because it differs from the
        host's, or because it would have to be compared and host is None. Raises HostError if the host fails.
        """
        services = self._services
        bound = self.network.bound
        entry = served.entry
        is_warm_up = services.is_warm_up
        # A check of noise, in a warm-up, is not enough for an image. check() proves cached passes.
        is_enough = entry.verdict.of_image or is_warm_up or entry.key.is_cached_pass
        if entry.state is not State.COLD and is_enough:
            return False
        if host is None:
            raise Refusal("OneDiff's output at this size has not been compared with the one without OneDiff yet")
        services.call_stats.note_first_use()
        if functions is not None:
            # So that they draw the same random numbers for the host.
            functions.rewind()
        key = entry.key
        allowed = self._devices.named(key.backend).allowed_error(key.dtype)
        # LoRAs in a narrow dtype round so coarsely that the measured spread would excuse real errors.
        has_spread = not bound.on_the_fly.has_narrow_loras
        # Outside of our_modes(), because the host's forward must run exactly as the host would run it.
        is_news = prove(
            entry, served.output, services.history, host, bound.exactly(host), is_warm_up,
            () if call.patches is None else call.patches.functions, self._times_host, allowed,
            partial(self._spread, key, served.call) if has_spread else None,
            bool(bound.binding.layers.rounded_inputs()),
        )
        if is_news:
            services.guard.attempt("remembering a check", lambda: services.history.keep_verdict(entry))
        return True

    def _prepare(self, call: Call, served: Served, captures: bool) -> None:
        """Prepare for later calls like this one, after this call was answered: capture their graph if this call was
        launched without one; keep a plan if it replayed a graph. captures: whether a graph may be captured; False if
        this call was compared with the host."""
        entry = served.entry
        network = self.network
        device = call.latent.device
        network.has_served = True
        # A capture calls the functions of other extensions again, which needs a way to restore their state (rewind).
        if captures and served.route == PLAIN and (call.patches is None or served.rewind is not None):
            with self._services.computing(device), our_modes(device, entry.key.precision):
                capture = partial(self._capture, entry, served.call)
                if served.rewind is None:
                    capture()
                else:
                    self._route.patched.capture(network, served, served.rewind, capture)
        if served.route == GRAPH and self._may_be_planned(call, entry.key):
            self._keep_plan(call, served)

    def _may_be_planned(self, call: Call, key: ShapeKey) -> bool:
        """Whether a plan may serve calls like this one. False for warm-ups and patched calls. With the option Low-bit
        on, True only for calls with 8-bit layers whose errors are measured; other calls try the 8-bit variants each
        time."""
        if self._services.is_warm_up or call.patches is not None:
            return False
        choice = self.network.low_bit_choice
        is_decided = bool(key.lossy.low_bit) and (choice is None or not choice.awaits)
        return is_decided or self.settings.low_bit == "off"

    def _keep_plan(self, call: Call, served: Served) -> None:
        """Keep a plan for later calls like this one in the network. Does nothing if the network has no runner for them,
        because the backend has runners of its own (Device.runner), which it gives anew for each call."""
        network = self.network
        device = call.latent.device
        runner = network.runner(served.entry.key, call.cut)
        if runner is None:
            return
        plan = Plan(
            served.entry, runner, served.reason, self.settings, autocast_dtype(device.type), device, served.epoch,
            self._services.computing(device), network.bound.part_of(call),
        )
        network.keep_plan(call.signature, plan)

    def check(self, call: Call, served: Served) -> None:
        """Check the cached pass of a step policy (DeepCache) against the full pass that was just computed. If the
        cached pass's shape was not checked before, compute the pass once, with the backend, precision and lossy
        products of the full pass, and compare the outputs of the two passes: if they are equal, the entry of the cached
        pass becomes PROVED, otherwise FAILED.

        call: the cached pass: the same call with a cut that reads the cached feature. served: the full pass. Raises
        Refusal if the cached pass's entry is FAILED, now or from before.
        """
        key = served.entry.key
        call = replace(call, upcast_attention=served.call.upcast_attention)
        if self._is_checked(call, served):
            return
        with self._services.computing(call.latent.device), our_modes(call.latent.device, key.precision):
            entry = self._entry(call, key.backend, key.lossy, key.precision)
            # The host computes a full pass in its place, so its times are those.
            entry.host = served.entry.host
            if entry.state is State.COLD:
                self._services.call_stats.note_first_use()
                cached = partial(self._launch, entry, call)
                compared = attempted(partial(why_cached_pass_differs, entry, served.output, cached))
                if compared.fault is not None:
                    what = f"the cached step failed: {first_line(compared.fault)}"
                    entry.mark_failed(what, self.network.sampling_now, is_final=False)
                    log.error("%s (%s)", entry.reason, entry.key, exc_info=compared.fault)
                elif miss := compared.given():
                    entry.mark_failed(miss)
        if entry.state is State.FAILED:
            raise Refusal(entry.reason)

    def _is_checked(self, call: Call, served: Served) -> bool:
        """Whether the cached pass has a plan whose entry is the one that check() would look up, and is READY: then
        check() has nothing to do. Finding that entry anew at each whole step takes several times as long. False also
        where this is not certain. call, served: see check()."""
        plan: Plan | None = self.network.plans.get(call.signature)
        if plan is None or plan.settings is not self.settings:
            return False
        entry = plan.entry
        whole = served.entry
        key = entry.key
        device = call.latent.device
        if plan.autocast is not (autocast_dtype(device.type) if is_autocast_on(device.type) else None):
            return False
        if key.inputs != whole.key.inputs or key.upcast_attention != whole.key.upcast_attention:
            return False
        if entry.state is not State.READY or entry.weights != whole.weights or entry.host is not whole.host:
            return False
        made_at = plan.epoch
        if not self.network.in_sampling and made_at.values != served.epoch.values:
            return False
        # The rest of a key is in the call's signature, or changes with the epoch.
        return (
            made_at.structure == served.epoch.structure and made_at.addresses == served.epoch.addresses
            and (key.backend, key.lossy, key.precision) == (whole.key.backend, whole.key.lossy, whole.key.precision)
            and key.weights == whole.key.weights
        )

    # --- one backend after the other --------------------------------------------------------------------------------

    def _with_overflow_retry(self, candidates: Candidates, call: Call, functions: FunctionCalls | None) -> Served:
        """The output of a call by the first candidate that serves it. functions: see _serve_locked. Raises what
        _first_to_serve raises.

        If the first output of a shape has NaN or infinite values, the call is computed again with attention in float32,
        and that output is returned, finite or not. If it is finite, all later calls with these weights compute
        attention in float32 from the start, also in later processes.
        """
        bound = self.network.bound
        tuned = self._services.tuning_cache
        host_upcasts = call.upcast_attention
        dtype = bound.binding.dtype
        device = call.latent.device
        name = f"attention overflows, {self.network.identity()}, {str(dtype).removeprefix('torch.')}"
        is_known = tuned.get(name) is True
        overflows = is_known
        while True:
            upcast = host_upcasts or overflows
            if upcast != call.upcast_attention:
                call = replace(call, upcast_attention=upcast)
            flags = flags_for(self.settings, dtype, device, upcast)
            with our_modes(device, flags):
                served = self._first_to_serve(candidates, call, functions, flags)
            if served.entry.state is not State.COLD or upcast or bool(torch.isfinite(served.output).all()):
                break
            overflows = True
        if overflows and not is_known and bool(torch.isfinite(served.output).all()):
            self._services.guard.attempt("remembering a model's attention", lambda: tuned.set(name, True))
            log.warning("This model's attention overflows in %s, so it is computed in float32 from now on.", dtype)
        return served

    def _first_to_serve(
        self, candidates: Candidates, call: Call, functions: FunctionCalls | None, flags: Flags
    ) -> Served:
        """The output by the first candidate that neither refuses nor fails. The 8-bit variants of the first backend are
        tried first, then each backend without 8-bit products.

        flags: torch's switches for precision, as they are set now, for the entry's key. functions: see _serve_locked.
        Raises Refusal with the last reason if none serves the call, HostError, and torch.cuda.OutOfMemoryError.
        """
        network = self.network
        ways = [(candidates.devices[0], lossy) for lossy in candidates.lossy]
        ways += [(device, LOSSLESS) for device in candidates.devices]

        def after_failure(failed: Attempt[Served]) -> None:
            if functions is not None:
                functions.rewind()
            if failed.fault is not None:
                network.bound.forget_baseline()

        return first_to_serve(
            (self._candidate(device, lossy, call, functions, flags) for device, lossy in ways), candidates.reason,
            network.sampling_now, after_failure,
        )

    def _candidate(
        self, device: Device, lossy: Lossy, call: Call, functions: FunctionCalls | None, flags: Flags
    ) -> Candidate[Served]:
        """The Candidate of this backend with these lossy products for a call. Computes nothing yet."""
        return Candidate(
            partial(self._admitted, device, call, lossy, flags), partial(self._on_device, device, call, functions)
        )

    def _entry(self, call: Call, backend: str, lossy: Lossy, flags: Flags) -> Entry:
        """The entry of a call's shape with this backend, switched to the verdict for the present weights. An entry that
        does not exist yet is made, in state COLD."""
        network = self.network
        bound = network.bound
        layout = bound.layout
        dtype = bound.binding.dtype
        key = ShapeKey.of(layout.architecture, dtype, call, backend, flags, network.weight_marks, lossy)
        entry = self._services.table.entry(key, layout.model_name)
        return entry.switch_to(network.identity(), network.sampling_now, bound.host_code.replaced)

    def _admitted(self, device: Device, call: Call, lossy: Lossy, flags: Flags) -> Entry:
        """As _entry, but raises Refusal if the backend does not compute such calls, such as patched calls with 8-bit
        products. device: the backend."""
        device.refuse_call(call, self.network.weight_marks, self.network.bound.layout)
        if call.patches is not None and lossy != LOSSLESS:
            # Between 8-bit operators, activations are quantized tensors, which functions of extensions cannot take.
            raise Refusal("Low-bit is inactive: an extension computes inside the model")
        return self._entry(call, device.name, lossy, flags)

    def _on_device(
        self, device: Device, call: Call, functions: FunctionCalls | None, entry: Entry, reason: str
    ) -> Served:
        """The output by one backend (device), which loads its kernels first. reason: as for Candidate.serve. Raises
        Refusal if the backend cannot compute the call, if the entry is FAILED, and for a cached pass that check() has
        not compared yet. Raises torch.cuda.OutOfMemoryError and HostError."""
        if entry.key.is_cached_pass and entry.state is State.COLD:
            raise Refusal("a cached step at this size has not been compared with a full one yet")
        self.tried = entry
        if entry.state is State.FAILED:
            raise Refusal(entry.reason)
        time_ms = self._services.time_ms(call) if self._services.is_warm_up else None
        device.prepare(kernel_use_of(self.network, call, entry.key.lossy), time_ms)
        return self._replay_or_launch(device, entry, call, functions, reason)

    def _replay_or_launch(
        self, device: Device, entry: Entry, call: Call, functions: FunctionCalls | None, reason: str
    ) -> Served:
        """The output by one backend (device) whose kernels are loaded: by the backend's own runner; else by a captured
        graph, unless the entry is COLD; else operator by operator. Quantizes 8-bit weights first, if the entry needs
        them. reason: as for Candidate.serve; it becomes a part of Served.reason. Raises Refusal if the next candidate
        must be tried, among others for a cached pass whose cached feature is of other weights."""
        network = self.network
        lossy = entry.key.lossy
        has_graphs = device.traits.has_graphs
        is_cold = entry.state is State.COLD
        if lossy.low_bit:
            self._route.low_bit.fit(network, lossy, call, self.settings, is_first=is_cold)
        if call.cut is not None and call.cut.reads and call.cut.values != network.bound.epoch.values:
            raise Refusal(
                "the model's weights have changed since the last full step, so DeepCache does not shorten this step"
            )
        launch = partial(self._launch, entry)
        streamed = network.streamed(lossy, self.settings)

        def with_streamed(why: str) -> str:
            return "; ".join(filter(None, (why, streamed)))

        if functions is not None:
            return self._route.patched.run(network, entry, call, functions, launch, with_streamed(reason))
        runner = device.runner(network, entry.key, call, self._services.is_warm_up)
        if runner is None and not is_cold:
            # A shape has a graph only after a launch without one, which was checked.
            runner = network.runner(entry.key, call.cut)
        if runner is not None:
            entry.state = State.READY
            output = entry.own.time(call.latent.device, partial(runner.run, call), GRAPH)
            return Served(output, entry, network.bound.refreshed, GRAPH, with_streamed(reason), call)
        # The first call of a shape chooses algorithms, and takes more time and memory than later ones: not timed.
        stopwatch = Stopwatch() if is_cold else entry.own
        work: Callable[[], Tensor] = partial(launch, call)
        if has_graphs and not is_cold:
            work = partial(self._graphs.measured, entry, work)
        output = stopwatch.time(call.latent.device, work, PLAIN)
        if has_graphs:
            not_yet = "the first step at this size" if is_cold else "its CUDA graph is made after this step"
            reason = reason or entry.no_graph or entry.waits or not_yet
        return Served(output, entry, network.bound.refreshed, PLAIN, with_streamed(reason), call)

    def _launch(self, entry: Entry, call: Call) -> Tensor:
        """The output of our forward for a call, launched operator by operator, without a graph."""
        network = self.network
        lossy = entry.key.lossy
        ops = self._devices.operators(entry.key.backend, network.has_wide_norms)
        source = network.source(lossy, call)
        return self._services.families.output(source.layout, source.weights(), ops, call)

    def _spread(self, key: ShapeKey, call: Call) -> float:
        """How far rounding moves the output of a call, as a relative error; see rounding.spread. The output is computed
        several times on the reference device, without functions of other extensions and without a cut."""
        network = self.network
        plain = replace(call, patches=None, cut=None)
        ops = self._devices.operators(self._devices.reference.name, network.has_wide_norms)

        def output(ops: Operators) -> Tensor:
            source = network.source(LOSSLESS, plain)
            return self._services.families.output(source.layout, source.weights(), ops, plain)

        with self._services.computing(key.device), our_modes(key.device, key.precision):
            rounded_as = rounds_as(key.dtype, key.device, key.precision)
            rounds_inputs = bool(network.bound.binding.layers.rounded_inputs())
            return spread(output, ops, rounded_as, key.device, rounds_inputs)

    # --- the graph ------------------------------------------------------------------------------------------------

    def _capture(self, entry: Entry, call: Call) -> None:
        """Capture the graph of a shape that was just served without one, unless the backend has no graphs or an earlier
        capture has failed. If the capture fails, nothing is raised, and Entry.no_graph has the reason, so that no other
        capture is tried. It stays "" if GPU memory ran out and the host then freed some: the next call tries again."""
        if not self._devices.named(entry.key.backend).traits.has_graphs or entry.no_graph:
            return
        captured = attempted(lambda: self._capture_now(entry, call))
        if captured.outcome is Outcome.OUT_OF_MEMORY:
            makes_room = self.network.make_room(entry.needs)
            self._graphs.free()
            # If the host made room by moving weights, the capture is repeated after the next call, over these.
            if not makes_room:
                entry.no_graph = "VRAM ran out while the CUDA graph of this size was captured: other graphs were freed"
        elif captured.error is not None:
            entry.no_graph = f"the graph could not be captured: {first_line(captured.error)}"
            log.error("%s (%s)", entry.no_graph, entry.key, exc_info=captured.error)

    def _capture_now(self, entry: Entry, call: Call) -> None:
        """Tune kernels and capture the graph. Then, if GraphCache.capture says that GPU memory is lacking, ask the host
        to free as much; if the host frees none, 8-bit weights are dropped. Captures nothing if tuning has dropped the
        8-bit weights, or if the graph does not fit (see GraphCache.capture). Raises any exception of the tuning or the
        capture."""
        if self._tune(entry.key, call):
            self._services.call_stats.note_first_use()
            # The kernels chosen now must run once outside of the capture, where they load and allocate.
            self._launch(entry, replace(call, patches=None))
        if entry.key.lossy.low_bit and self.network.low_bit is None:
            # The 8-bit weights were dropped while tuning, so the next call has another shape.
            return
        lacking = self._graphs.capture(self.network, entry, self.settings.memory_budget, call)
        if entry.state is State.READY:
            self._services.call_stats.note_first_use()
        if lacking < 0:
            self.network.note_left_over(-lacking - ROOM_TO_SPARE)
        elif lacking and not self.network.make_room(lacking + ROOM_TO_SPARE):
            self._graphs.shrink_low_bit(self.network, lacking + ROOM_TO_SPARE)

    def _tune(self, key: ShapeKey, call: Call) -> bool:
        """Measure the fastest kernels for this call, and which of its products are faster in eight bits, where that is
        unknown. Returns whether the forward must be launched once more before a capture: True if anything was measured,
        but False if 8-bit layers were measured and then refused."""
        layout = self.network.bound.layout
        low_bit = self._route.low_bit
        attentions = self._services.families.of(layout).attentions(layout, call)
        use = kernel_use_of(self.network, call, key.lossy)
        time_ms = self._services.time_ms(call)
        measured = self._devices.named(key.backend).tune(use, attentions, call, time_ms)
        if not key.lossy.low_bit or not low_bit.tune(self.network, key.lossy, call):
            return measured
        fitted = attempted(lambda: low_bit.fit(self.network, key.lossy, call, self.settings))
        if fitted.outcome is Outcome.REFUSED:
            return False
        fitted.given()
        return True


def kernel_use_of(network: Network, call: Call, lossy: Lossy = LOSSLESS) -> KernelUse:
    """The KernelUse of a call: everything that decides which kernels the call's forward needs. lossy: the 8-bit
    products that the forward may use. Call it after the network's binding was refreshed for the call."""
    layout = network.bound.layout
    latent = call.latent
    stored = network.bound.binding.layers.rounded_inputs()
    return KernelUse(layout.architecture, layout.kernel_users, latent.dtype, latent.device, lossy.low_bit, stored)
