"""Computes the calls of UNets on one card: replays what is ready for a call, or finds out what serves it."""
from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ..core.call import UNetCall
from ..core.device import Candidates
from ..core.policy import Answer, Host, Served
from ..core.precision import AttentionOverflows, flags_for, our_modes
from ..core.refusal import Refusal
from ..core.settings import SAGE, Settings
from ..core.table import State
from .backend_choice import BackendChoice
from .call_stats import GRAPH, PLAIN
from .fallback import FallbackChain
from .managed_unet import ManagedUNet
from .patched_route import WITHIN_FUNCTION
from .services import Services
from .session import Session
from .stepping import Stepping
from .verify import prove

log = logging.getLogger("onediff")


class CardRoute:
    """Serves calls where their latents are."""

    def __init__(self, services: Services, stepping: Stepping) -> None:
        self._services, self._stepping = services, stepping
        self.attention_overflows = AttentionOverflows(services.tuning_cache)
        self.choice, self.fallback = BackendChoice(services), FallbackChain(services)

    def answer(
        self, managed: ManagedUNet, settings: Settings, call: UNetCall, host: Host,
        times_host: bool = True, is_counted: bool = True, was_looked_at: bool = False,
    ) -> Answer:
        """The output of a call, with the step policies around it that are on for each card. times_host: host makes this
        call and no more. is_counted: otherwise it is a part of a call that is counted as a whole. was_looked_at:
        whether replay was asked for this call: a change that it has found must be found out about, and not be replayed.

        Raises Refusal where the host must run it, torch.cuda.OutOfMemoryError, and what the host raises.
        """
        compute = OneCard(self, managed, settings, times_host, may_replay=not was_looked_at)
        return self._stepping.around(compute, False, managed, settings, is_counted=is_counted)(call, host)

    def serve(
        self, managed: ManagedUNet, settings: Settings, call: UNetCall, host: Host | None, times_host: bool = True,
    ) -> Served:
        """As answer, with everything found out, and by no policy. host: None: what is cold does not serve."""
        services, device = self._services, call.latent.device
        with services.computing(device):
            if services.is_between_graphs:
                raise Refusal(WITHIN_FUNCTION)
            candidates = self.choice.begin(managed, settings, call)
            served = self._compute(managed, settings, candidates, call)
        entry, is_noise = served.entry, services.waits_for_compile
        if entry.state is State.COLD or not (entry.verdict.of_image or is_noise or entry.key.is_cached_pass):
            if host is None:
                raise Refusal("it was not checked yet")
            # Outside our modes: the host's forward must run exactly as the host would run it.
            yardstick = managed.bound.host_traits.yardstick(host)
            prove(
                entry, served.output, services.history, host, yardstick, is_noise,
                () if call.patches is None else call.patches.functions(), times_host,
                services.devices.named(entry.key.backend).traits.errors.get(entry.key.dtype, 0.0),
            )
        else:
            if served.route == PLAIN:
                with services.computing(device), our_modes(device, entry.key.precision):
                    self.fallback.make_ready(managed, settings, served)
        managed.served_last = True
        self._note_session(managed, settings, call, served)
        return served

    def check(self, managed: ManagedUNet, call: UNetCall, served: Served) -> None:
        """See Compute.check."""
        device, upcast = call.latent.device, served.call.upcast_attention
        with self._services.computing(device), our_modes(device, served.entry.key.precision):
            self.fallback.check(managed, replace(call, upcast_attention=upcast), served)

    def _note_session(self, managed: ManagedUNet, settings: Settings, call: UNetCall, served: Served) -> None:
        """Let later calls of this sampling go by replay, unless something is decided anew at each of them: which layers
        are in eight bits, what some devices compile."""
        key, device = served.entry.key, call.latent.device
        looks_again = self._services.devices.named(key.backend).traits.decides_anew or (
            settings.low_bit not in ("off", SAGE) and not managed.low_bit_is_decided(key.lossy)
        )
        if served.route != GRAPH or looks_again or self._services.waits_for_compile or call.patches is not None:
            return
        session = managed.session
        if session is None or not session.holds(settings, device):
            session = managed.session = Session(self._services, managed, settings, device)
        session.note(call, served.entry, served.reason)

    def _compute(self, managed: ManagedUNet, settings: Settings, candidates: Candidates, call: UNetCall) -> Served:
        """The output of a call by one of these backends.

        The first output of a shape that overflows is computed again with attention in float32; so is every other of
        this network from then on.
        """
        weights, dtype = managed.bound.identity(), managed.bound.binding.dtype
        device, by_host = call.latent.device, call.upcast_attention
        overflows = self.attention_overflows.seen(weights, dtype)
        while True:
            upcast = by_host or overflows
            if upcast != call.upcast_attention:
                call = replace(call, upcast_attention=upcast)
            flags = flags_for(settings, dtype, device, call.upcast_attention)
            with our_modes(device, flags):
                served = self.fallback.serve(
                    managed, settings, candidates, call, self._services.call_stats.notice, flags
                )
            if served.entry.state is not State.COLD or call.upcast_attention:
                break
            if bool(torch.isfinite(served.output).all()):
                break
            overflows = True
        news = overflows and not self.attention_overflows.seen(weights, dtype)
        if news and bool(torch.isfinite(served.output).all()):
            self.attention_overflows.note(weights, dtype)
            log.warning("This model's attention overflows in %s: it is computed in float32 from now on.", dtype)
        return served


class OneCard:
    """The calls of one UNet by CardRoute, as core.policy.Compute."""

    def __init__(
        self, route: CardRoute, managed: ManagedUNet, settings: Settings, times_host: bool, may_replay: bool
    ) -> None:
        self._route, self._managed, self._settings = route, managed, settings
        self._times_host, self._may_replay = times_host, may_replay

    def __call__(self, call: UNetCall, host: Host | None) -> Answer:
        session = self._managed.session if self._may_replay else None
        replayed = None if session is None else session.replay(call, self._settings, call.latent.device)
        if replayed is not None:
            return Answer(replayed.output, replayed)
        times_host = self._times_host and host is not None
        served = self._route.serve(self._managed, self._settings, call, host, times_host)
        return Answer(served.output, served)

    def check(self, call: UNetCall, served: Served) -> None:
        self._route.check(self._managed, call, served)
