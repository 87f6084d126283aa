"""The one runtime object: what hosts hand over and say, and the route of each call of a UNet."""
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
from .call_stats import UNET
from .card_route import CardRoute, OneCard
from .network import Network
from .plan import replayed
from .services import SWITCHED_OFF, TRAINING, Services
from .stepping import Stepping
from .two_gpus import TwoGpusRoute
from .vae.route import DecoderRoute

log = logging.getLogger("onediff")
NOT_HANDED_OVER = "OneDiff was not given this UNet"
# As long as the host has not answered either.
NOT_UNDERSTOOD = "the inputs of this call were not understood: {}"
# Bytes that a step of the largest UNet takes beside its weights, where the host cuts nothing.
HOST_NEEDS = 1 << 30


class Runtime:
    """Routes the calls of every UNet that a host has handed over. Every method may be called from any thread.

    cache: what users ask of what is ready. vae: the route of decodes. webui: the adapter of the WebUI that we run in
    (a hosts.contract.WebUI): it must outlive a reload of the scripts. patches: the replaced methods of diffusers'
    classes (hosts.hooks.TablePatch), by class and name.
    """

    def __init__(
        self, policies: Iterable[StepPolicy] | None = None, devices: Iterable[Device] | None = None,
        families: Iterable[Family] | None = None,
    ) -> None:
        """policies: which may cut steps short, outermost first. devices: the fastest first, the reference last.
        families: of the networks that are served. By default, those of the registries."""
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
        self.vae = DecoderRoute(services)
        cache = Cache(services, self.stepping, self.vae, self.two_gpus)
        self.cache = cache
        # For pages and the API; see Cache. rows: those of the table of shapes.
        self.rows = cache.rows
        self.totals = cache.totals
        self.pin = cache.pin
        self.open_cache = cache.open_cache
        self.keep_history = cache.keep_history
        self.purge = cache.purge
        self.purge_disk = cache.purge_disk
        self.webui: Any = None
        self.patches: dict[tuple[type, str], Any] = {}
        # What the host says of the sampling in progress, whichever UNets it may use for that.
        self._sampling: Sampling | None = None
        # The names, for the table's rows, of the UNets that the host has computed.
        self._names: WeakDictionary[nn.Module, str | None] = WeakDictionary()
        # Sentences about what was handed over and stays as it is: no hook is there to count its calls.
        self._left_alone: WeakDictionary[nn.Module, str] = WeakDictionary()
        # The settings that _becomes_plain has returned True for; None since it has returned False.
        self._plain: Settings | None = None

    @property
    def history(self) -> History:
        """What outlives the process."""
        return self.services.history

    @property
    def settings(self) -> Settings:
        """Those of calls that no generation and no UNet's own settings decide."""
        return self.services.settings

    def configure(self, settings: Settings) -> None:
        """Use these settings from the next UNet call on."""
        self.services.settings = settings
        if settings.second_gpu == ONE_GPU or not settings.enabled:
            self.two_gpus.forget_all()

    # --- UNets in care --------------------------------------------------------------------------------------------

    def adopt(self, unet: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()) -> None:  # noqa: B008
        """Take a UNet into care; nothing of it changes before its first call. settings override the runtime's own."""
        services = self.services
        with services.lock:
            known = services.networks.get(unet)
            if known is None:
                services.networks[unet] = Network(unet, settings, host_traits, families=services.families)
            else:
                known.settings = settings
                known.no_room_for_low_bit = False
        if known is None:
            services.devices.prepare_early(unet, settings or self.settings)

    def leave_alone(self, network: nn.Module, sentence: str) -> None:
        """Note why a network, or all of its pipeline, keeps its own forward. The sentence is part of the status as long
        as the network lives; "" takes it back."""
        if sentence:
            self._left_alone[network] = sentence
            log.warning("OneDiff: %s.", sentence)
        else:
            self._left_alone.pop(network, None)

    def status(self) -> dict[str, Any]:
        """How the last image was made, as plain values; see Cache.status. left_alone: sentences about networks that
        were handed over and keep their own forward."""
        return {**self.cache.status(), "left_alone": sorted(set(self._left_alone.values()))}

    def release(self, unet: nn.Module) -> None:
        """Give a UNet back as it was: ordinary parameters with the same values, and no memory of ours."""
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
        """Give every UNet and every decoder back."""
        for unet in self.services.networks:
            self.release(unet)
        self.vae.release_all()

    def model_name(self, unet: nn.Module | None) -> str | None:
        """What the rows call a UNet ("SD1"); None for what is none that we know. Waits for no call that is being made.
        """
        network = None if unet is None else self.services.networks.get(unet)
        if network is not None:
            # One that has not been called yet has none.
            bound = attempted(lambda: str(network.bound.layout.model_name))
            if bound.is_ours:
                return bound.given()
        return None if unet is None else attempted(lambda: str(self.services.families.read(unet).model_name)).answer

    def _known_name(self, unet: nn.Module) -> str | None:
        """As model_name, read once: the host may compute every call of this UNet."""
        if unet not in self._names:
            self._names[unet] = self.model_name(unet)
        return self._names[unet]

    # --- samplings ------------------------------------------------------------------------------------------------

    def sampling_of(self, network: Network) -> Sampling:
        """The sampling in progress; one whose steps are all whole where nobody has announced any."""
        if self.services.is_warm_up:
            # A call that makes a shape ready belongs to no image.
            return Sampling(times=lambda: WARM_UP_TIMES)
        return network.sampling or self._sampling or Sampling(why_not=UNANNOUNCED)

    def begin_sampling(self, unet: nn.Module, sampling: Sampling | None = None, of_all: bool = True) -> None:
        """A host announces a sampling. sampling: what it says of it. of_all: it may use other UNets for it too, as a
        refiner."""
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
        """The bytes of GPU memory that a network's steps have lacked in earlier samplings at this image size, where a
        part of the weights had to stay in main memory. A host asks before it brings the weights for a sampling."""
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
        """A host says that the sampling of a UNet, or of all that it uses, is over: nothing of it counts for later
        calls."""
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
        """The UNet's output for a call, by the fastest exact route; host() is the host's own forward of the same call.
        host_traits: of the host that hands over a UNet with its calls; None where it must have been handed over.
        guidance: says which rows are the prompt's, or why that is not known; None where nobody can say.

        Never raises for a reason of ours: what we cannot serve, the host serves, and status() says why.
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
                self.by_host, unet, tried, "looking a UNet up", as_host(host), call.latent
            )
        else:
            work = partial(compute, call, as_host(host))
        with self.guard.beside("timing a call", self.call_stats.timing(UNET, call.latent.device)):
            return self.guard.as_raised(work).output

    def note_served(self, served: Served) -> Stopwatch | None:
        """Count a call, which has its answer whatever fails here. Returns the host's times that count for it."""
        try:
            return self.call_stats.note_served(served)
        except Exception as error:
            self.guard.note("counting a call", error)
            return None

    def _becomes_plain(self, settings: Settings) -> bool:
        """Take over settings that differ from the last call's. Returns whether they switch every step policy and the
        second GPU off, so that calls may go straight to their plans; that holds as long as this Settings object does.
        If so, the reasons why policies were inactive are cleared."""
        if settings.second_gpu != ONE_GPU or self.stepping.any_is_on(settings):
            # The next call without policies has to clear the reasons that policies give at this one.
            self._plain = None
            return False
        self.stepping.clear_reasons()
        self._plain = settings
        return True

    def network_and_settings(self, unet: nn.Module) -> tuple[Network, Settings]:
        """What is kept for a UNet, and the settings that hold now. Raises Refusal where the host must run the call."""
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
        self, unet: nn.Module, attempt: Attempt[Any], hook: str, host: Host, latent: Tensor | None = None,
        tried: Entry | None = None,
    ) -> Answer:
        """The host's own answer to a call that we did not serve, counted with the reason that attempt gives. Where our
        memory ran out, it is freed before. hook: what we were doing; see Guard.note. latent: of the call, where it was
        read. tried: the entry at which ours was tried last; None where it was at none.

        A fault is noted when the host has answered. Where the host raises too, its inputs are to blame.
        """
        fault = attempt.fault
        if attempt.outcome is Outcome.OUT_OF_MEMORY:
            self.release_memory()
        told = attempt.reason if fault is None else NOT_UNDERSTOOD.format(first_line(fault))
        known = None if tried is None else tried.host
        host_times = self.call_stats.note_host(told, self._known_name(unet), latent, known)
        self._leave_as_found(unet)
        network = self.services.networks.get(unet)
        # Where weights were bound, our layout has left memory in pieces that the host would have in one.
        is_ours = network is not None and network.bound.has_binding
        room = partial(network.make_room, HOST_NEEDS, is_urgent=True) if network and is_ours else None
        output = self.pressure.run_host(host, room)
        if fault is not None:
            self.guard.attempt("noting a fault", partial(self._give_up, hook, fault))
        return Answer(output, host_times=host_times)

    def _give_up(self, hook: str, fault: Exception) -> None:
        self.call_stats.explain(self.guard.give_up(hook, fault))

    def unread(self, unet: nn.Module, attempt: Attempt[Any], host: Host) -> Tensor:
        """Run the host's forward of a call that could not be read."""
        self.guard.attempt("counting a call", self.two_gpus.note)
        return self.by_host(unet, attempt, "the UNet's forward", host).output

    def note_host(self, reason: str, unet: nn.Module | None = None) -> None:
        """Count a call that the host runs without having asked us, with the reason, and lay the weights out as the host
        had them (_leave_as_found). unet: the one that the host runs."""
        self.call_stats.note_host(reason, None if unet is None else self._known_name(unet))
        self.two_gpus.note()
        if unet is not None:
            self._leave_as_found(unet)

    def _leave_as_found(self, unet: nn.Module) -> None:
        """Before the host's own forward: undo the channels-last layout of the convolutions' weights, and drop the
        graphs that were captured over it, so that an image that the host makes alone is the host's own to the bit.

        Not where we have served an earlier call of this sampling (without an announced sampling: the call before).
        Where we and the host alternate, moving the weights at each call would cost too much; the host then convolves in
        channels-last order, which some processors round in another way.
        """
        network = self.services.networks.get(unet)
        if network is None or not network.bound.channels_last or self.services.is_between_graphs:
            # Between graphs, the call around this one goes on with the weights where they are.
            return
        takes_turns = network.served_last
        if not network.in_sampling:
            # Where no sampling was announced, only the call before counts.
            network.served_last = False
        if not takes_turns:
            with self.computing(network.bound.binding.device):
                if network.bound.undo_channels_last():
                    network.drop_runners()


class OursOrHosts:
    """Computes a UNet's calls, by one card or two; by the host where OneDiff refuses. It is a core.policy.Compute."""

    def __init__(
        self, runtime: Runtime, unet: nn.Module, network: Network, settings: Settings, is_plain: bool
    ) -> None:
        """is_plain: these settings switch every step policy and the second GPU off."""
        self._runtime = runtime
        self._unet = unet
        self._network = network
        self._settings = settings
        self._is_plain = is_plain

    def __call__(self, call: Call, host: Host | None) -> Answer:
        assert host is not None, "a policy for whole batches has the host's own forward of each call"
        host = as_host(host)
        card = self._runtime.by_card.card(self._network, self._settings)
        made = attempted(partial(self._ours, card, call, host), host_oom_is_ours=True)
        if made.is_ours:
            return made.given()
        runtime = self._runtime
        return runtime.by_host(self._unet, made, "the UNet's forward", host, call.latent, card.tried)

    def _ours(self, card: OneCard, call: Call, host: Host) -> Answer:
        """Raises what CardRoute.answer raises."""
        two_gpus = self._runtime.two_gpus
        settings = self._settings
        if settings.second_gpu != ONE_GPU:
            split = two_gpus.answer(self._network, settings, call, host)
            if split is not None:
                return split
        elif two_gpus.is_used:
            two_gpus.forget(self._unet)
            # Another network may be computed on both.
            two_gpus.note()
        answer = card(call, host) if self._is_plain else self._runtime.by_card.answer(card, call, host)
        if answer.served is None:
            return answer
        return answer._replace(host_times=self._runtime.note_served(answer.served))

    def check(self, call: Call, served: Served) -> None:
        raise Refusal("policies for whole batches compare nothing")


# The one runtime object of the process.
runtime = Runtime()
