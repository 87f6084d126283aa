"""Serves a call by the best backend that can: what fails is taken down with its reason, and the next one is tried."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..core.call import UNetCall
from ..core.device import Candidates, Device, Network, NotYet
from ..core.guard import first_line
from ..core.key import EXACT, Lossy, ShapeKey
from ..core.policy import Served
from ..core.precision import Flags
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.table import Entry, State, Stopwatch
from ..weights.bound import BoundUNet
from .call_stats import GRAPH, PLAIN
from .low_bit_route import LowBitRoute
from .managed_unet import ManagedUNet
from .patched_route import PatchedRoute
from .services import Services
from .verify import blame, judge_cached_pass

log = logging.getLogger("onediff")


class FallbackChain:
    """The backends of a device, from the best down to PyTorch's operators launched one by one."""

    def __init__(self, services: Services) -> None:
        self._services, self._table, self._graphs = services, services.table, services.graphs
        self._devices, self._families = services.devices, services.families
        self._low_bit, self._patched = LowBitRoute(services), PatchedRoute(services)

    def serve(
        self, managed: ManagedUNet, settings: Settings, candidates: Candidates, call: UNetCall,
        notice: Callable[[Entry], None], flags: Flags = (),
    ) -> Served:
        """The output by the first backend that does not fail. notice: told of every entry that is tried. flags: torch's
        switches of precision, as they stand; the entry's key holds them.

        Raises Refusal with the reason where none serves the call, and torch.cuda.OutOfMemoryError.
        """
        reason = candidates.reason
        lossy_first = ((candidates.devices[0], lossy) for lossy in candidates.lossy)
        for device, lossy in (*lossy_first, *((device, EXACT) for device in candidates.devices)):
            entry = None
            try:
                device.refuse_call(call)
                refuse_lossy(call, device, lossy)
                entry = self._entry(managed, call, device.name, lossy, flags)
                if entry.key.is_cached_pass and entry.state is State.COLD:
                    raise Refusal("it was not checked beside a whole step yet")
                notice(entry)
                if entry.state is State.FAILED:
                    raise Refusal(entry.reason)
                if not lossy.only:
                    self._graphs.restore(managed)
                waits = self._services.waits_for_compile
                device.prepare(network_of(managed, call, lossy), waits, measures=waits)
                return self._run(managed, settings, device, entry, call, reason)
            except (torch.cuda.OutOfMemoryError, NotYet):
                raise
            except Refusal as refusal:
                reason = str(refusal)
            except Exception as error:
                if entry is None:
                    raise
                reason = blame(
                    entry, f"our forward failed: {first_line(error)}", sampling_now(managed.bound), is_final=False
                )
                managed.bound.bind_anew()
                log.exception("%s (%s)", entry.reason, entry.key)
        raise Refusal(reason)

    def check(self, managed: ManagedUNet, call: UNetCall, served: Served) -> None:
        """See Compute.check: of the backend that has served. To be called in its precision."""
        entry = self._like(managed, served.entry, call)
        if entry.state is State.COLD:
            try:
                miss = judge_cached_pass(entry, served.output, lambda: self._plainly(managed, entry, call))
                if miss is not None:
                    blame(entry, miss)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                blame(entry, f"DeepCache's cached pass failed: {first_line(error)}")
                log.exception("%s (%s)", entry.reason, entry.key)
        if entry.state is State.FAILED:
            raise Refusal(entry.reason)

    def make_ready(self, managed: ManagedUNet, settings: Settings, result: Served) -> None:
        """Capture the graph of a shape that was just served without one; the call itself has been answered.

        Raises nothing: what stands in the way is noted in the entry.
        """
        entry = result.entry
        if result.route != PLAIN or entry.state is State.COLD:
            return
        if result.rewind is not None:
            capture = lambda: self._capture(managed, settings, entry, result.call)  # noqa: E731
            self._patched.capture(managed, result, result.rewind, capture)
            return
        self._capture(managed, settings, entry, result.call)

    def _capture(
        self, managed: ManagedUNet, settings: Settings, entry: Entry, call: UNetCall
    ) -> None:
        if not self._devices.named(entry.key.backend).traits.has_graphs or entry.no_graph:
            return
        try:
            if self._tune(managed, settings, entry.key, call):
                # Something else was chosen: let it do its first work outside the capture.
                self._plainly(managed, entry, replace(call, patches=None))
            if entry.key.lossy.low_bit and managed.low_bit is None:
                # By what was measured now, the next call goes another way.
                return
            self._graphs.capture(managed, entry, settings.memory_budget, call)
        except torch.cuda.OutOfMemoryError:
            self._graphs.free()
            entry.no_graph = "out of GPU memory while its graph was captured: the other graphs were freed"
        except Exception as error:
            entry.no_graph = f"the graph could not be captured: {first_line(error)}"
            log.exception("%s (%s)", entry.no_graph, entry.key)

    def _tune(self, managed: ManagedUNet, settings: Settings, key: ShapeKey, call: UNetCall) -> bool:
        """Measure what is the fastest for this call, where that is not known; whether it was so."""
        layout = managed.bound.layout
        attentions = self._families.of(layout).attentions(layout, call)
        measured, lossy = self._devices.named(key.backend).tune(attentions, call), key.lossy
        if not lossy.low_bit or not self._low_bit.tune(managed, lossy, call):
            return measured
        try:
            self._low_bit.fit(managed, lossy, call, settings.low_bit_budget)
        except Refusal:
            return False
        return True

    def _like(self, managed: ManagedUNet, entry: Entry, call: UNetCall) -> Entry:
        """The entry of another call that is computed as this one's."""
        key = entry.key
        return self._entry(managed, call, key.backend, key.lossy, key.precision)

    def _entry(self, managed: ManagedUNet, call: UNetCall, backend: str, lossy: Lossy, flags: Flags) -> Entry:
        bound = managed.bound
        key = ShapeKey.of(bound.architecture, bound.binding.dtype, call, backend, flags, managed.kinds, lossy)
        return self._table.entry(key, bound.layout.model_name).of_weights(bound.identity(), sampling_now(bound))

    def _run(
        self, managed: ManagedUNet, settings: Settings, device: Device, entry: Entry, call: UNetCall, reason: str
    ) -> Served:
        """The output. reason: why the candidate before was not good. Raises Refusal where the next one is to be tried.
        """
        lossy, has_graphs = entry.key.lossy, device.traits.has_graphs
        if lossy.low_bit:
            if entry.state is State.COLD:
                # Before the first use is checked, so that what is checked is what will run.
                self._low_bit.tune(managed, lossy, call)
            self._low_bit.fit(managed, lossy, call, settings.low_bit_budget)
        if call.cut is not None and call.cut.reads and call.cut.edition != managed.bound.edition:
            raise Refusal("the weights have changed since the last whole step")
        if call.patches is not None:
            plainly = lambda: self._plainly(managed, entry, call)  # noqa: E731
            return self._patched.run(managed, entry, call, call.patches, plainly, reason)
        runner = device.runner(managed, entry.key, call, self._services.waits_for_compile)
        if runner is None and entry.state is not State.COLD:
            # What a graph replays was launched and judged before.
            runner = managed.runner(entry.key, call.cut)
        if runner is not None:
            entry.state = State.READY
            output = entry.own.time(call.latent.device, lambda: runner.run(call), GRAPH)
            return Served(output, entry, managed.bound.edition, GRAPH, reason, call)
        stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
        plainly = lambda: self._plainly(managed, entry, call)  # noqa: E731
        # A first call of all chooses algorithms, and takes more memory for that than any later one.
        measures = has_graphs and entry.state is not State.COLD
        output = stopwatch.time(
            call.latent.device, lambda: self._graphs.measured(entry, plainly) if measures else plainly(), PLAIN
        )
        if has_graphs:
            reason = reason or entry.no_graph or entry.waits or (
                "first call at this shape" if entry.state is State.COLD else "its graph is captured after this step"
            )
        return Served(output, entry, managed.bound.edition, PLAIN, reason, call)

    def _plainly(self, managed: ManagedUNet, entry: Entry, call: UNetCall) -> Tensor:
        lossy = entry.key.lossy
        ops = self._devices.operators(entry.key.backend, managed.has_wide_norms, lossy.attention)
        binding = managed.binding_for(lossy)
        return self._families.output(binding.layout, binding.weights(), ops, call)


def refuse_lossy(call: UNetCall, device: Device, lossy: Lossy) -> None:
    """Raise Refusal for what is not computed this way."""
    if call.patches is not None and lossy != EXACT:
        # Its operators hand each other more than tensors.
        raise Refusal(f"the backend {device.name}, {lossy} runs no functions of other extensions")
    if lossy.attention and call.upcast_attention:
        raise Refusal(f"{lossy.attention} is not for attention in float32")


def sampling_now(bound: BoundUNet) -> int | None:
    """The number of the sampling in progress; None outside of any."""
    return bound.samplings if bound.in_sampling else None


def network_of(managed: ManagedUNet, call: UNetCall, lossy: Lossy = EXACT) -> Network:
    bound, latent = managed.bound, call.latent
    return Network(bound.architecture, bound.layout.kernel_users, latent.dtype, latent.device, lossy.low_bit)
