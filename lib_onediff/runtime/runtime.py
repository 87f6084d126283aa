"""The one Runtime object: hosts hand networks over to it, announce samplings, and send it every call."""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.attempt import Attempt, Outcome, as_host, attempted
from ..core.call import Call
from ..core.device import Device
from ..core.family import Family
from ..core.guard import first_line
from ..core.image import UNET
from ..core.policy import Answer, Compute, Guidance, Host, Served, StepPolicy
from ..core.refusal import Refusal
from ..core.sampling import UNANNOUNCED, WARM_UP_TIMES, Sampling
from ..core.settings import ONE_GPU, Settings
from ..core.table import Entry, Stopwatch
from ..core.weak_dictionary import WeakDictionary
from ..steps.registry import step_policies
from ..store.history import History
from ..weights.scan import HostTraits
from .cache import Cache
from .card_route import CardRoute, OneCard
from .full_gpu import FullGpu
from .network import Network
from .plan import replayed
from .services import SWITCHED_OFF, TRAINING, Services
from .stepping import Stepping
from .two_gpus import TwoGpusRoute
from .vae.route import DecoderRoute

log = logging.getLogger("onediff")
# The reason, for users, of a call of a network that was not adopted.
NOT_HANDED_OVER = "OneDiff is not switched on for this model"
# The reason, for users, of a call with a fault of ours. It stays if the host raises too, because then the inputs were
# wrong; if the host answers, Guard.give_up's sentence replaces it.
NOT_UNDERSTOOD = (
    "OneDiff failed in this step ({}), so it runs without OneDiff: if it fails again (no image), an extension or a "
    "script gives the model wrong inputs"
)
# Bytes beside the weights that a step of the largest UNet takes in the host's forward, if the host does not split it.
HOST_NEEDS = 1 << 30


class Runtime:
    """Routes the calls of every network that a host has handed over (adopt). Every method may be called from any
    thread.

    services: the shared objects. Some of them, and some of their methods, are attributes of the runtime too.
    stepping, two_gpus, by_card: the parts of a call's route, in this order.
    full_gpu: frees memory after a call has run out of it, and refuses calls for which there is none yet.
    cache: the methods for pages and the API.
    vae: the route of decodes.
    webui: the adapter of the WebUI that OneDiff runs in (a hosts.contract.WebUI), kept here to survive a reload of
        scripts; None without a WebUI.
    patches: the replaced methods of diffusers' classes (hosts.hooks.TablePatch), by class and method name.
    """

    def __init__(
        self, policies: Iterable[StepPolicy] | None = None, devices: Iterable[Device] | None = None,
        families: Iterable[Family] | None = None,
    ) -> None:
        """policies: the step policies, the outermost first. devices: the backends, the fastest first, the reference
        last. families: the families of networks that may be served. Each is None for the registry's."""
        services = Services(devices, families)
        self.services = services
        self.guard = services.guard
        self.table = services.table
        self.tuning_cache = services.tuning_cache
        self.devices = services.devices
        self.call_stats = services.call_stats
        self.generations = services.generations
        self.pressure = services.pressure
        self.warming_up = services.generations.warming_up
        self.computing = services.computing
        self.release_memory = services.release_memory
        self.stepping = Stepping(services, step_policies() if policies is None else policies, self.sampling_of)
        self.by_card = CardRoute(services, self.stepping)
        self.two_gpus = TwoGpusRoute(services, self.stepping, self.by_card, self.release)
        self.full_gpu = FullGpu(services)
        self.vae = DecoderRoute(services)
        cache = Cache(services, self.stepping, self.vae, self.two_gpus)
        self.cache = cache
        # Methods of Cache, for pages and the API.
        self.rows = cache.rows
        self.totals = cache.totals
        self.pin = cache.pin
        self.open_cache = cache.open_cache
        self.keep_history = cache.keep_history
        self.purge = cache.purge
        self.purge_disk = cache.purge_disk
        self.webui: Any = None
        self.patches: dict[tuple[type, str], Any] = {}
        # The sampling in progress, if it may use any network, such as a refiner.
        self._sampling: Sampling | None = None
        # Names for users of the networks whose calls the host has computed.
        self._names: WeakDictionary[nn.Module, str | None] = WeakDictionary()
        # Networks that were handed over and keep their own forward, with the reason as a sentence.
        self._left_alone: WeakDictionary[nn.Module, str] = WeakDictionary()
        # The last settings, if _becomes_plain returned True for them; otherwise None.
        self._plain: Settings | None = None

    @property
    def history(self) -> History:
        """The history on the disk."""
        return self.services.history

    @property
    def settings(self) -> Settings:
        """The settings of a call that belongs to no generation and whose network has no settings of its own."""
        return self.services.settings

    def configure(self, settings: Settings) -> None:
        """Set the runtime's settings, which apply from the next call on. If the settings use no second GPU, or OneDiff
        is off in them, all networks' copies on a second GPU are freed."""
        self.services.settings = settings
        for network in self.services.networks.values():
            # Other settings may need less memory.
            network.no_room.clear()
        if settings.second_gpu == ONE_GPU or not settings.enabled:
            self.two_gpus.forget_all()

    # --- networks -------------------------------------------------------------------------------------------------

    def adopt(self, unet: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()) -> None:  # noqa: B008
        """Serve a network from now on, or replace the settings of a served one. The network itself is not changed
        before its first call. settings: the settings for this network; None: the runtime's apply. host_traits: ignored
        if the network is served already."""
        services = self.services
        with services.lock:
            known = services.networks.get(unet)
            if known is None:
                services.networks[unet] = Network(unet, settings, host_traits, families=services.families)
            else:
                known.settings = settings
                known.no_room_for_low_bit = False
                known.no_room.clear()
        if known is None:
            services.devices.prepare_early(unet, settings or self.settings)

    def leave_alone(self, network: nn.Module, sentence: str) -> None:
        """Log a sentence for users, and show it in the status as long as the network lives: why OneDiff leaves the
        network, or its whole pipeline, to its own forward. sentence: "" removes the network's sentence. This changes
        only what is shown: release() stops serving."""
        if sentence:
            self._left_alone[network] = sentence
            log.warning("OneDiff: %s.", sentence)
        else:
            self._left_alone.pop(network, None)

    def status(self) -> dict[str, Any]:
        """The status of the last image, as plain values: Cache.status, and under "left_alone" the sorted sentences of
        leave_alone(), each once."""
        return {**self.cache.status(), "left_alone": sorted(set(self._left_alone.values()))}

    def release(self, unet: nn.Module) -> None:
        """Stop serving a network, and restore it: its parameters are ordinary ones again, with the same values. All of
        our memory for the network is freed, and failures of its shapes are forgotten. Does nothing for a network that
        is not served."""
        services = self.services
        with services.lock:
            network = services.networks.get(unet)
            if network is None:
                return
            if not network.bound.is_copy:
                for entry in self.table.entries():
                    entry.forget_failures(network.weights)
            network.plans.clear()
            self.two_gpus.forget(unet)
            services.networks.pop(unet, None)
            network.drop_runners()
            network.bound.release()
            services.graphs.note_lost()

    def release_all(self) -> None:
        """Stop serving all networks and decoders, and restore them."""
        for unet in self.services.networks:
            self.release(unet)
        self.vae.release_all()

    def model_name(self, unet: nn.Module | None) -> str | None:
        """A network's model name for users ("SD1"), also of a network that is not served; None if no family knows the
        network, and if unet is None. Does not wait for a call in progress."""
        network = None if unet is None else self.services.networks.get(unet)
        if network is not None:
            # Before its first call, it has no layout.
            bound = attempted(lambda: str(network.bound.layout.model_name))
            if bound.is_ours:
                return bound.given()
        return None if unet is None else attempted(lambda: str(self.services.families.read(unet).model_name)).answer

    def _known_name(self, unet: nn.Module) -> str | None:
        """The result of model_name, remembered, because it is read for every call that the host computes."""
        if unet not in self._names:
            self._names[unet] = self.model_name(unet)
        return self._names[unet]

    # --- samplings ------------------------------------------------------------------------------------------------

    def sampling_of(self, network: Network) -> Sampling:
        """A network's sampling in progress: the one announced for this network alone, else the one announced for all
        networks. If none was announced, a Sampling whose why_not says so, in which policies are inactive. In a warm-up,
        always a Sampling with WARM_UP_TIMES."""
        if self.services.is_warm_up:
            return Sampling(times=lambda: WARM_UP_TIMES)
        return network.sampling or self._sampling or Sampling(why_not=UNANNOUNCED)

    def begin_sampling(self, unet: nn.Module, sampling: Sampling | None = None, of_all: bool = True) -> None:
        """Called by a host at the start of a sampling with a network. Drops the network's plans of the last sampling,
        and frees GPU memory for the host if it is short. sampling: None if nothing is known of its steps. of_all:
        True: the sampling may use other networks too, such as a refiner, and is in progress for every network; False:
        for unet alone, if unet is served."""
        network = self.services.networks.get(unet)
        self.call_stats.begin_image()
        if of_all:
            self._sampling = sampling or Sampling()
        elif network is not None:
            network.sampling = sampling or Sampling()
        if network is not None:
            network.begin_sampling()
            budget = (network.settings or self.settings).memory_budget
            self.pressure.before_sampling(network.architecture, budget)

    def room_lacked(self, unet: nn.Module, image_size: Hashable) -> int:
        """Bytes of GPU memory that OneDiff still needs beside the weights for a sampling at this image size. A host
        calls this before it moves the weights to the GPU for a sampling, and leaves that many bytes free.

        Known from earlier samplings at this size in which a part of the weights had to stay in main memory. 0 if there
        was none, if OneDiff is off, or if the network is not served.
        """
        services = self.services
        network = services.networks.get(unet)
        if network is None:
            return 0
        settings = network.settings or services.settings
        running = services.generations.run_settings
        if running is not None:
            settings, _ = running
        if not settings.enabled:
            return 0
        with services.lock:
            services.graphs.note_lost()
            return network.room_lacked(image_size)

    def end_sampling(self, unet: nn.Module | None = None) -> None:
        """Called by a host at the end of a sampling. The memories of step policies are dropped. unet: the only network
        whose sampling ends; nothing happens if it is not served. None: the samplings of all networks end, also a
        sampling that was announced with of_all."""
        if unet is None:
            self._sampling = None
        for one, network in self.services.networks.items():
            if unet is None or one is unet:
                network.end_sampling()

    # --- one call -------------------------------------------------------------------------------------------------

    def run(
        self, unet: nn.Module, call: Call, host: Host, host_traits: HostTraits | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """The network's output for a call, by the fastest route that agrees with the host.

        host: the host's own forward of the same call. host_traits: if given, a network that is not served yet is
        adopted here with these traits; None: such a network is left to the host. guidance: returns which rows of the
        batch are the prompt's, or raises Refusal; None if the host cannot tell.

        Raises only exceptions of the host. If OneDiff cannot serve the call, the host computes it, and status() has the
        reason.
        """
        around = sys.exc_info()[1]
        try:
            if host_traits is not None and unet not in self.services.networks:
                self.adopt(unet, host_traits=host_traits)
            network, settings = self.network_and_settings(unet)
            if settings is self._plain or self._becomes_plain(settings):
                network.step_memories.clear()
                served = replayed(self.services, network, call, settings)
                if served is not None:
                    self.note_served(served)
                    return served.output
                compute: Compute = OursOrHosts(self, unet, network, settings, is_plain=True)
            else:
                compute = OursOrHosts(self, unet, network, settings, is_plain=False)
                compute = self.stepping.around(compute, True, network, settings, guidance)
        except Exception as error:
            tried: Attempt[Any] = Attempt.of(error, around)
            work: Callable[[], Answer] = partial(
                self.by_host, unet, tried, "looking a UNet up", as_host(host), call
            )
        else:
            work = partial(compute, call, as_host(host))
        with self.guard.beside("timing a call", self.call_stats.timing(UNET, call.latent.device)):
            return self.guard.as_raised(work).output

    def note_served(self, served: Served) -> Stopwatch | None:
        """Count a call that OneDiff has served, in the log of its image. Returns the stopwatch with the times that the
        host takes for such calls; None if there is none, or if counting fails: that is logged, and nothing is
        raised."""
        try:
            return self.call_stats.note_served(served)
        except Exception as error:
            self.guard.note("counting a call", error)
            return None

    def _becomes_plain(self, settings: Settings) -> bool:
        """Whether all step policies and the second GPU are off in these settings, so that calls may go straight to
        their plans.

        If they are off, the settings are kept as `_plain`, for which run() does not call this again, and the policies'
        reasons for being inactive are cleared. Otherwise `_plain` becomes None.
        """
        if settings.second_gpu != ONE_GPU or self.stepping.any_is_on(settings):
            # So that the next call without policies clears the reasons that policies set at this one.
            self._plain = None
            return False
        self.stepping.clear_reasons()
        self._plain = settings
        return True

    def network_and_settings(self, unet: nn.Module) -> tuple[Network, Settings]:
        """A network's record, and the settings that apply to the network now: those of the generation in progress;
        outside of generations and in warm-ups the network's own; without these the runtime's. Raises Refusal if the
        network is not served, OneDiff is off, or gradients are recorded."""
        network = self.services.networks.get(unet)
        if network is None:
            raise Refusal(NOT_HANDED_OVER)
        settings = network.settings or self.services.settings
        why_off = ""
        generations = self.services.generations
        running = generations.run_settings if generations.running else None
        if running is not None:
            settings, why_off = running
        if not settings.enabled:
            raise Refusal(why_off or SWITCHED_OFF)
        if torch.is_grad_enabled():
            raise Refusal(TRAINING)
        return network, settings

    def by_host(
        self, unet: nn.Module, attempt: Attempt[Any], hook: str, host: Host, call: Call | None = None,
        tried: Entry | None = None,
    ) -> Answer:
        """The answer of the host's own forward to a call that OneDiff did not serve. The call is counted, with the
        reason.

        attempt: the failed attempt to serve the call; has the reason. If it ran out of GPU memory, OneDiff's memory is
        freed first, and the host may be asked to move weights (FullGpu.relieve). hook: what was attempted, in words for
        Guard.give_up. call: None if it could not be read. tried: the entry that was tried last; None if there was none.
        A fault of ours is logged only after the host has answered: if the host raises too, the inputs are wrong. Raises
        only exceptions of the host.
        """
        fault = attempt.fault
        network = self.services.networks.get(unet)
        reason = attempt.reason if fault is None else NOT_UNDERSTOOD.format(first_line(fault))
        if attempt.outcome is Outcome.OUT_OF_MEMORY:
            if network is None or call is None:
                self.release_memory()
            else:
                relieve = partial(self.full_gpu.relieve, network, call, tried)
                reason = self.guard.attempt("freeing GPU memory", relieve) or reason
        known = None if tried is None else tried.host
        latent = None if call is None else call.latent
        host_times = self.call_stats.note_host(reason, self._known_name(unet), latent, known)
        self._leave_as_found(unet)
        # Binding moves weights, which fragments GPU memory. So only then the host is asked to make room for itself.
        is_ours = network is not None and network.bound.has_binding
        room = partial(network.make_room, HOST_NEEDS, is_urgent=True) if network and is_ours else None
        output = self.pressure.run_host(host, room)
        if fault is not None:
            self.guard.attempt("noting a fault", partial(self._give_up, hook, fault))
        return Answer(output, host_times=host_times)

    def _give_up(self, hook: str, fault: Exception) -> None:
        """Log a fault of ours in a call that the host has answered, and show the fault as the call's reason. hook: see
        by_host."""
        self.call_stats.explain(self.guard.give_up(hook, fault))

    def unread(self, unet: nn.Module, attempt: Attempt[Any], host: Host) -> Tensor:
        """The host's output for a call whose arguments could not be turned into a Call. The call is counted, with the
        attempt's reason. attempt: the failed attempt to make the Call."""
        self.guard.attempt("counting a call", self.two_gpus.note)
        return self.by_host(unet, attempt, "the UNet's forward", host).output

    def note_host(self, reason: str, unet: nn.Module | None = None) -> None:
        """Called before the host runs a call without OneDiff: counts the call, with the reason. unet: the network that
        runs: its weights get the host's memory layout again (_leave_as_found); None if it is unknown."""
        self.call_stats.note_host(reason, None if unet is None else self._known_name(unet))
        self.two_gpus.note()
        if unet is not None:
            self._leave_as_found(unet)

    def _leave_as_found(self, unet: nn.Module) -> None:
        """Undo the channels-last layout of the convolutions' weights before the host's own forward, and drop the graphs
        that read the weights in it, so that an image that the host makes alone is bit-exact.

        Does nothing if the weights do not have that layout, for a call that an extension's function makes inside of our
        graphs (Services.is_between_graphs), and if OneDiff has served an earlier call of this sampling, or outside of
        samplings the last call (Network.has_served): if OneDiff and the host alternate, moving the weights at each call
        would cost too much. The host then convolves in channels-last order, which may round differently.
        """
        network = self.services.networks.get(unet)
        if network is None or not network.bound.channels_last or self.services.is_between_graphs:
            # The call around this one continues with graphs over the present layout.
            return
        takes_turns = network.has_served
        if not network.in_sampling:
            # Without an announced sampling, only the last call counts.
            network.has_served = False
        if not takes_turns:
            with self.computing(network.bound.binding.device):
                if network.bound.undo_channels_last():
                    network.drop_runners()


class OursOrHosts:
    """The innermost core.policy.Compute: computes a network's calls on one GPU or two, or by the host if OneDiff
    refuses or fails."""

    def __init__(
        self, runtime: Runtime, unet: nn.Module, network: Network, settings: Settings, is_plain: bool
    ) -> None:
        """is_plain: whether all step policies and the second GPU are off."""
        self._runtime = runtime
        self._unet = unet
        self._network = network
        self._settings = settings
        self._is_plain = is_plain

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The answer to a call, by OneDiff, or by the host if OneDiff refuses or fails. host must not be None, although
        core.policy.Compute allows that. Raises only exceptions of the host."""
        assert host is not None, "policies for whole batches pass the host's own forward with each call"
        host = as_host(host)
        runtime = self._runtime
        card = runtime.by_card.card(self._network, self._settings)
        made = attempted(partial(self._ours, card, call, host), host_oom_is_ours=True)
        if made.is_ours:
            runtime.full_gpu.note_served(self._network, call)
            return made.given()
        return runtime.by_host(self._unet, made, "the UNet's forward", host, call, card.tried)

    def _ours(self, card: OneCard, call: Call, host: Host) -> Answer:
        """The answer by OneDiff, on two GPUs if the settings say so and the call can be split, else on one. A call that
        OneDiff has computed is counted. card: computes on one GPU. Raises the exceptions of CardRoute.answer, and
        Refusal if such calls have run out of GPU memory (FullGpu.refuse_call)."""
        self._runtime.full_gpu.refuse_call(self._network, call)
        two_gpus = self._runtime.two_gpus
        settings = self._settings
        if settings.second_gpu != ONE_GPU:
            split = two_gpus.answer(self._network, settings, call, host)
            if split is not None:
                return split
        elif two_gpus.is_used:
            two_gpus.forget(self._unet)
            # Update the status: another network may still use both GPUs.
            two_gpus.note()
        answer = card(call, host) if self._is_plain else self._runtime.by_card.answer(card, call, host)
        if answer.served is None:
            return answer
        return answer._replace(host_times=self._runtime.note_served(answer.served))

    def check(self, call: Call, served: Served) -> None:
        """Always raises Refusal. Only policies that decide for each GPU compute cached passes, which need a check, and
        OneCard.check does the check for them."""
        raise Refusal("cached steps are checked on each GPU, not for the whole batch")


# The one runtime object of the process.
runtime = Runtime()
