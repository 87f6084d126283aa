"""The UNet's route: takes a call, replays what is ready for it, or finds out who serves it, and says why."""
from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import AUTO, ONEFLOW, WITH_LOW_BIT, Candidates
from ..engines.managed_unet import ManagedUNet
from ..guard import HostFunction
from ..model.call import UNetCall
from ..model.deepcache.cache_run import StepPlan
from ..model.deepcache.options import DeepCacheOptions
from ..model.layout import UnsupportedUNet
from ..model.patches import HostTraits
from ..ops.precision import AttentionOverflows, Flags, flags_for, our_modes, upcasts_attention
from ..options.settings import ONE_GPU, Settings
from ..shapes.key import ShapeKey
from ..shapes.table import Entry, State
from ..weak_dictionary import WeakDictionary
from ..weights.watch import no_object
from .call_stats import GRAPH, HOST, PLAIN, CallResult
from .fallback import FallbackChain
from .forecast import ForecastRoute
from .guidance import Guidance, GuidanceRoute
from .managed_unets import NOT_HANDED_OVER, ManagedUNets
from .patched_route import WITHIN_FUNCTION
from .services import OUT_OF_MEMORY, SWITCHED_OFF, TRAINING
from .session import Session
from .two_gpus import TwoGpusRoute
from .vae.route import DecoderRoute
from .verify import prove

log = logging.getLogger("onediff")

HostForward = Callable[[], Tensor]
PATCHES_REST = "DeepCache rests: other extensions compute within the UNet"


class Accelerator(ManagedUNets):
    """Routes the calls of every UNet that a host has handed over."""

    def __init__(self) -> None:
        super().__init__()
        self._last_unet: Callable[[], nn.Module | None] = no_object
        self.attention_overflows = AttentionOverflows(self.tuning_cache)
        self._sessions: WeakDictionary[nn.Module, Session] = WeakDictionary()
        self._guidance = GuidanceRoute(self.guard, self.call_stats)
        self._forecast = ForecastRoute(self.guard, self.call_stats)
        self.two_gpus = TwoGpusRoute(self.guard, self.call_stats, self)
        self._fallback = FallbackChain(self.table, self._graphs, self.operators, lambda: self.waits_for_compile)
        self.vae = DecoderRoute(self)
        # The adapter of the WebUI that we run in (a hosts.contract.WebUI): it must outlive a reload of the scripts.
        self.webui: Any = None

    # --- what hosts say -------------------------------------------------------------------------------------------

    def release(self, unet: nn.Module) -> None:
        with self._lock:
            managed = self._managed.get(unet)
            if managed is not None:
                for entry in self.table.entries():
                    entry.forget_failures(managed.bound.last_identity)
            self._sessions.pop(unet, None)
            for route in (self.two_gpus, self._guidance, self._forecast):
                route.forget(unet)
            super().release(unet)

    def release_all(self) -> None:
        """Give every UNet and every decoder back."""
        for unet in self._managed:
            self.release(unet)
        self.vae.release_all()

    def configure(self, settings: Settings) -> None:
        super().configure(settings)
        if settings.second_gpu == ONE_GPU or not settings.enabled:
            self.two_gpus.forget_all()

    # --- one call -------------------------------------------------------------------------------------------------

    def run(
        self, unet: nn.Module, call: UNetCall, host: HostForward, host_traits: HostTraits | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """The UNet's output for a call, by the fastest exact route; host() is the host's own forward of the same call.
        host_traits: of the host that hands over a UNet with its calls; None where it must have been handed over.
        guidance: says which rows are the prompt's, or why that is not known; None where nobody can say.

        Never raises for a reason of ours: what we cannot serve, the host serves, and status() says why.
        """
        known = self._known(unet, host_traits)
        if self._last_unet() is not unet:
            self._last_unet = weakref.ref(unet)
            if self.generations.innermost is None and self._sampling is None:
                # Nobody says which calls make an image: another UNet's make none with these.
                self.call_stats.show()
        if isinstance(known, str) or (known[1].guidance_end >= 1.0 and known[1].forecast_interval <= 1):
            return self._run(unet, call, host, known)
        # A call that makes a shape ready belongs to no image.
        if self.waits_for_compile:
            return self._run(unet, call, host, known)
        return self._run_by_step(unet, call, host, known, guidance)

    def _run_by_step(
        self, unet: nn.Module, call: UNetCall, host: HostForward, known: tuple[ManagedUNet, Settings],
        guidance: Guidance | None,
    ) -> Tensor:
        """As run, for samplings whose steps are not all computed whole: guidance end, output forecast."""
        managed, settings = known
        sampling = self.sampling_of(managed)

        def compute(call: UNetCall, host: HostForward) -> Tensor:
            if settings.forecast_interval <= 1:
                return self._run(unet, call, host, known)
            return self._forecast.run(
                unet, settings.forecast_interval, sampling, call, lambda: self._run(unet, call, host, known),
                managed.bound.edition_now,
            )

        if settings.guidance_end >= 1.0:
            return compute(call, host)
        return self._guidance.run(unet, settings.guidance_end, sampling, call, host, guidance, compute)

    def managed_and_settings(self, unet: nn.Module) -> tuple[ManagedUNet, Settings] | str:
        """What is kept for a UNet, and the settings that hold now; or why the host must run the call."""
        managed = self._managed.get(unet)
        if managed is None:
            return NOT_HANDED_OVER
        settings, why_off = self.run_settings or (managed.settings or self.settings, "")
        if not settings.enabled:
            return why_off or SWITCHED_OFF
        if torch.is_grad_enabled():
            return TRAINING
        return managed, settings

    def _known(self, unet: nn.Module, host_traits: HostTraits | None) -> tuple[ManagedUNet, Settings] | str:
        """As managed_and_settings, for a UNet that its host may hand over only now. Never raises."""
        try:
            if host_traits is not None and unet not in self._managed:
                self.adopt(unet, host_traits=host_traits)
            return self.managed_and_settings(unet)
        except Exception as error:
            return self.guard.give_up("looking a UNet up", error)

    def _run(
        self, unet: nn.Module, call: UNetCall, host: HostForward, known: tuple[ManagedUNet, Settings] | str
    ) -> Tensor:
        try:
            if not isinstance(known, str) and known[1].second_gpu != ONE_GPU:
                host = HostFunction(host)
                output = self.two_gpus.run(unet, call, host, known)
                if output is not None:
                    return output
            replayed = self.replay(unet, call, known)
            if replayed is not None:
                self.call_stats.note_replay(replayed.entry, replayed.reason)
                return replayed.output
            self.call_stats.begin()
            host = HostFunction(host)
            result = known if isinstance(known, str) else self.serve(unet, call, host)
        except UnsupportedUNet as refusal:
            result = str(refusal)
        except torch.cuda.OutOfMemoryError:
            result = OUT_OF_MEMORY
        except Exception as error:
            if id(error) == getattr(host, "raised", None):
                raise
            result = self.guard.give_up("the UNet's forward", error)
        if isinstance(result, CallResult):
            self.call_stats.note(result.route, result.reason)
            return result.output
        # Only now is everything gone that our forward had computed before it failed.
        if result is OUT_OF_MEMORY:
            self.free_graphs()
        return self._decline(unet, result, host)

    def serve(
        self, unet: nn.Module, call: UNetCall, host: HostForward, times_host: bool = True
    ) -> CallResult | str:
        """The output, or why the host must run the call. times_host: host makes this call and no more."""
        with self.computing(call.latent.device):
            known = self.managed_and_settings(unet)
            if isinstance(known, str):
                return known
            managed, settings = known
            if settings.second_gpu == ONE_GPU and self.two_gpus.in_use:
                self.two_gpus.forget(unet)
            if self._fallback.patched.is_between_graphs:
                return WITHIN_FUNCTION
            candidates = self._fallback.begin(managed, settings, call)
            result = self._compute(managed, settings, candidates, call) if candidates.backends else candidates.reason
        if isinstance(result, str):
            return result
        entry = result.entry
        is_noise = self.waits_for_compile
        if entry.state is State.COLD or not (entry.verdict.of_image or is_noise or entry.key.is_cached_pass):
            # Outside our modes: the host's forward must run exactly as the host would run it.
            yardstick = managed.bound.host_traits.yardstick(host)
            refusal = prove(
                entry, result.output, settings.verify, self.history, host, yardstick, is_noise,
                () if call.patches is None else call.patches.functions(), times_host,
            )
            if refusal is not None:
                return refusal
        else:
            with self._lock:
                self._fallback.note(managed, settings, result)
            if result.route == PLAIN:
                with self.computing(call.latent.device), our_modes(call.latent.device, result.entry.key.precision):
                    self._fallback.make_ready(managed, settings, result)
        managed.served_last = True
        self._note_session(unet, managed, settings, call, result)
        return result

    def replay(
        self, unet: nn.Module, call: UNetCall, known: tuple[ManagedUNet, Settings] | str,
        device: torch.device | None = None,
    ) -> CallResult | None:
        """The output of a call like an earlier one of its sampling; None where something has to be found out first.
        device: where it is computed, if not where the latent is."""
        session = self._sessions.get(unet)
        if session is None or isinstance(known, str) or call.patches is not None or torch.is_grad_enabled():
            return None
        device = device or call.latent.device
        with self._lock, self._order.after_the_last(device):
            if self._fallback.patched.is_between_graphs or getattr(self._waiting, "is_on", False):
                return None
            if self._sessions.get(unet) is not session:
                # Given back since.
                return None
            return session.replay(call, known[1], device)

    def _note_session(
        self, unet: nn.Module, managed: ManagedUNet, settings: Settings, call: UNetCall, result: CallResult
    ) -> None:
        """Let later calls of this sampling go by replay, unless something is decided anew at each of them: the step of
        DeepCache, which layers are in eight bits, OneFlow's compiling, the choice of a backend."""
        backend, device = result.entry.key.backend, call.latent.device
        decides = backend == ONEFLOW or result.plan is not None or settings.deepcache_interval > 1
        looks_again = decides or (
            settings.low_bit != "off" and not (backend in WITH_LOW_BIT and managed.low_bit_is_decided(backend))
            or settings.backend == AUTO and self.operators.auto.is_choosing(backend, device)
        )
        if result.route != GRAPH or looks_again or self.waits_for_compile or call.patches is not None:
            return
        session = self._sessions.get(unet)
        if session is None or not session.holds(settings, device):
            session = self._sessions[unet] = Session(managed, settings, device)
        session.note(call, result.entry, result.reason)

    def _compute(
        self, managed: ManagedUNet, settings: Settings, candidates: Candidates, call: UNetCall
    ) -> CallResult | str:
        """The output of a call, or why none of these backends serves it.

        The first output of a shape that overflows is computed again with attention in float32, where the choice is
        auto; so is every other of this network from then on.
        """
        weights, dtype = managed.bound.identity(), managed.bound.binding.dtype
        device, by_host = call.latent.device, call.upcast_attention
        overflows = self.attention_overflows.seen(weights, dtype)
        while True:
            upcast = upcasts_attention(settings, by_host, overflows)
            if upcast != call.upcast_attention:
                call = replace(call, upcast_attention=upcast)
            flags = flags_for(settings, dtype, device, call.upcast_attention)
            with our_modes(device, flags):
                plan = self._step_plan(managed, settings, call, flags)
                result = self._fallback.serve(managed, settings, candidates, call, self._notice, flags, plan)
            if isinstance(result, str):
                return result
            rests = call.patches is not None and settings.deepcache_interval > 1
            why_full = PATCHES_REST if rests else managed.cache_run.reason or managed.cache_run.failure
            why_reused = "" if result.plan is None else result.plan.why_reused
            self.call_stats.note_pass(result.entry.key.part, why_full, why_reused)
            untried = not call.upcast_attention and upcasts_attention(settings, by_host, True)
            if result.entry.state is not State.COLD or not untried or bool(torch.isfinite(result.output).all()):
                break
            overflows = True
        news = overflows and not self.attention_overflows.seen(weights, dtype)
        if news and bool(torch.isfinite(result.output).all()):
            self.attention_overflows.note(weights, dtype)
            log.warning("This model's attention overflows in %s: it is computed in float32 from now on.", dtype)
        return result

    def _step_plan(self, managed: ManagedUNet, settings: Settings, call: UNetCall, flags: Flags) -> StepPlan | None:
        """What DeepCache says of a call."""
        sampling = self.sampling_of(managed)
        choice, bound = DeepCacheOptions.of(settings, sampling.second_pass), managed.bound
        if choice.interval <= 1:
            managed.cache_run.rest(managed.held_features)
            return None
        if call.patches is not None:
            return None
        return managed.cache_run.plan(
            choice, sampling, bound.layout, call,
            ShapeKey.of(bound.architecture, bound.binding.dtype, call, precision=flags, marks=managed.kinds),
            managed.held_features,
        )

    def _decline(self, unet: nn.Module, reason: str, host: HostForward) -> Tensor:
        """Run the host's forward, with the reason for the user."""
        self.call_stats.note(HOST, reason)
        self._leave_as_found(unet)
        return self.pressure.run_host(host)

    def note_host(self, reason: str, unet: nn.Module | None = None) -> None:
        """Take down that a host runs a call of which we know nothing, and why. unet: the one that it runs."""
        self.call_stats.begin()
        self.call_stats.note(HOST, reason)
        if unet is not None:
            self._leave_as_found(unet)

    def _leave_as_found(self, unet: nn.Module) -> None:
        """A sampling that begins with the host's own forward finds the weights laid out as the host had them, and so
        makes the host's own image to the bit. One that takes turns with us does not move them at every turn: there the
        host convolves the same numbers in channels-last order, which some processors round in another way."""
        managed = self._managed.get(unet)
        if self._fallback.patched.is_between_graphs:
            # The call around this one goes on with the weights where they are.
            return
        # Where there is too little memory, it is the host that runs out of it.
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            self.restore(unet)
        if managed is not None and managed.bound.channels_last and not managed.takes_turns():
            with self.computing(managed.bound.binding.device):
                if managed.bound.undo_channels_last():
                    managed.drop_runners()

    def _notice(self, entry: Entry) -> None:
        self.call_stats.model, self.call_stats.entry, self.call_stats.backend = entry.model, entry, entry.key.backend
