"""Serve the decodes of a host's VAE by our forward where it can, and say why where it cannot."""
from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.attempt import Attempt, HostFunction, Outcome, attempted
from ...core.card import on_card
from ...core.precision import autocast_dtype
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...core.table import Entry
from ...core.weak_dictionary import WeakDictionary
from ...weights.binding import Binding
from ...weights.bound import BoundUNet
from ...weights.scan import HostTraits, refuse_global_hooks
from ..call_stats import HOST, SECONDS_UNTIL_TOLD_AGAIN, VAE
from ..services import SWITCHED_OFF, TRAINING, Services
from .decode import Decode, Decoded, HostDecode, is_finite, short_name
from .wider_type import NOT_FINITE, NoTypeHelps, WiderType

log = logging.getLogger("onediff")

OURS = "ours"
# The channels of an image; a latent, as an encoder makes it, has others.
COLOURS = 3


class DecoderRoute:
    """Routes the decodes of every decoder that a host has handed over."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # With settings that override the runtime's.
        self._decoders: WeakDictionary[nn.Module, tuple[BoundUNet, Settings | None]] = WeakDictionary()
        # A live preview is decoded on another thread than the image.
        self._lock = threading.RLock()
        # The last decode, and how many went by each route.
        self._route: str | None = None
        self._reason = ""
        self._entry: Entry | None = None
        self._calls: Counter[str] = Counter({OURS: 0, HOST: 0})
        self._logged: dict[str, float] = {}

    # --- what hosts say -------------------------------------------------------------------------------------------

    def adopt(
        self, decoder: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()  # noqa: B008
    ) -> None:
        """Take a decoder into care; nothing of it changes, then or later. settings override the runtime's."""
        with self._lock:
            known = self._decoders.get(decoder)
            if known is not None:
                self._decoders[decoder] = known[0], settings
                return
            self._decoders[decoder] = BoundUNet(decoder, self.read, host_traits), settings
            exact = replace(settings or self._services.settings, low_bit="off")
            self._services.devices.prepare_early(decoder, exact, self.read)

    def read(self, decoder: nn.Module) -> Any:
        """The layout of a decoder or an encoder. Raises Refusal."""
        return self._services.decoders.read(decoder)

    def release(self, decoder: nn.Module) -> None:
        """Forget a decoder; nothing of it was changed."""
        with self._lock:
            self._decoders.pop(decoder, None)

    def release_all(self) -> None:
        """Forget every decoder."""
        for decoder in self._decoders:
            self.release(decoder)

    def note_host(self, reason: str, is_decode: bool = True) -> None:
        """Take down that the host decodes a latent of which we know nothing, and why. is_decode: otherwise it may, and
        is told but not counted."""
        self._entry = None
        self._note(HOST, reason)
        self._calls[HOST] += is_decode

    def status(self) -> dict[str, Any]:
        """What became of the last decode, as plain values. Times are medians in milliseconds at its size."""
        entry = self._entry
        return {
            "route": self._route,
            "reason": self._reason,
            "backend": entry.key.backend if entry else None,
            "resolution": entry.key.resolution if entry else None,
            "decode_ms": entry.own.median_ms if entry else None,
            "host_ms": entry.host.median_ms if entry else None,
            "relative_error": entry.relative_error if entry else None,
            "calls": dict(self._calls),
        }

    # --- one decode -----------------------------------------------------------------------------------------------

    def decode(
        self, decoder: nn.Module, latent: Tensor, host: Callable[[], Tensor], upcast_attention: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """The decoder's image of a latent, (batch, channels, h, w); host() is the host's own decode of the same.
        check: raises Refusal where it has to be the host's, which its adapter knows.

        Never raises for a reason of ours: what we cannot serve, the host decodes, and status() says why. An image
        with NaN, whoever made it, is decoded again in a wider type; where that does not help, it is the host's own, so
        that the host finds what it would have found without us.
        """
        services = self._services
        before = (self._route, self._reason, self._entry)
        device = latent.device if isinstance(latent, Tensor) else torch.device("cpu")
        work = lambda: self._decode(decoder, latent, HostFunction(host), upcast_attention, check)  # noqa: E731
        try:
            with services.guard.beside("timing a decode", services.call_stats.timing(VAE, device)):
                return services.guard.as_raised(work)
        finally:
            if services.is_warm_up:
                # It belongs to no image.
                self._route, self._reason, self._entry = before

    def _decode(
        self, decoder: nn.Module, latent: Tensor, host: HostFunction, upcast_attention: bool,
        check: Callable[[], object],
    ) -> Tensor:
        asked = HostDecode(decoder, latent, host, cache(host), upcast_attention)
        self._entry = None
        tried = attempted(lambda: self._serve(asked, check), host_oom_is_ours=True)
        if not tried.is_ours:
            return self._by_host(asked, tried)
        made = tried.given()
        self._services.guard.attempt("counting a decode", lambda: self._note_ours(made, latent))
        return made.image

    def _serve(self, asked: HostDecode, check: Callable[[], object]) -> Decoded:
        check()
        self._admitted(asked)
        refuse_surroundings(asked.latent)
        return self._ours(asked).serve()

    def _admitted(self, asked: HostDecode) -> tuple[BoundUNet, Settings]:
        """The decoder, and the settings that hold now. Raises Refusal where OneDiff may not run."""
        known = self._decoders.get(asked.decoder)
        if known is None:
            # Or another thread has switched OneDiff off meanwhile.
            raise Refusal("OneDiff was not given this VAE")
        settings, why_off = self._services.generations.run_settings or (known[1] or self._services.settings, "")
        if not settings.enabled:
            raise Refusal(why_off or SWITCHED_OFF)
        return known[0], settings

    def _ours(self, asked: HostDecode) -> WiderType:
        """The decode as our forward does it. Raises Refusal where the decoder or the latent is none of ours."""
        bound, settings = self._admitted(asked)
        # Kernels that read the weights' contents are loaded on torch's current card.
        with self._lock, on_card(asked.latent.device):
            bound.reader = self._services.devices.contents_reader(asked.latent.device)
            # The host's weights are read where they lie and never re-pointed: turning one channels-last takes a
            # thousandth of a decode, and the host's own decode finds its weights as it left them.
            bound.refresh_without_binding()
            self._services.decoders.of(bound.layout).refuse_latent(bound.layout, asked.latent)
            refuse_misplaced(bound.binding, asked.latent)
            weights = bound.binding.weights()
            identity = bound.identity()
            decode = Decode(self._services, self._notice, bound.layout, weights, identity, asked, settings)
        return WiderType(decode)

    def _by_host(self, asked: HostDecode, tried: Attempt[Decoded]) -> Tensor:
        """The host's own image, or ours where that cannot be shown. tried: what became of ours.

        A fault is noted when the host has answered. Where the host raises too, its inputs are to blame.
        """
        services = self._services
        reason = tried.reason
        if tried.outcome is Outcome.OUT_OF_MEMORY:
            services.release_memory()
        if tried.fault is None:
            self._note(HOST, reason)
        image = services.pressure.run_host(asked.image)
        if tried.fault is not None:
            reason = services.guard.note("the VAE's forward", tried.fault)
            services.guard.attempt("counting a decode", partial(self._note, HOST, reason))
        may_help = not isinstance(tried.error, NoTypeHelps)
        look = lambda: self._in_place_of(image, asked, reason, may_help)  # noqa: E731
        shown: Any = services.guard.attempt("looking at the VAE's image", look, image)
        services.guard.attempt("counting a decode", lambda: self._count(HOST if shown is image else OURS, asked.latent))
        return shown

    def _in_place_of(self, image: Any, asked: HostDecode, reason: str, may_help: bool) -> Tensor:
        """The host's image where it can be shown or OneDiff may not run, and else ours if there is one."""
        is_image = isinstance(image, Tensor) and image.dim() == 4 and image.is_floating_point()
        if not is_image or torch.is_grad_enabled():
            return image
        if attempted(lambda: self._admitted(asked)).outcome is Outcome.REFUSED or is_finite(image):
            return image
        found = f"{image_or_latent(image)} is {NOT_FINITE}"
        if may_help:
            tried = attempted(lambda: self._ours(asked).repeat())
            if tried.is_ours:
                made = tried.given()
                self._note(OURS, made.reason)
                return made.image.to(image.dtype)
            if tried.outcome is Outcome.OUT_OF_MEMORY:
                self._services.release_memory()
            why = tried.reason
            if tried.fault is not None:
                why = self._services.guard.note("the VAE's forward", tried.fault)
            self._note(HOST, f"{reason}; its {found}, and ours could not take its place: {why}")
            reason = why
        log.warning("VAE: the %s, and OneDiff could not help: %s.", found, reason)
        return image

    # --- what is taken down ---------------------------------------------------------------------------------------

    def _notice(self, entry: Entry) -> None:
        self._entry = entry

    def _note_ours(self, made: Decoded, latent: Tensor) -> None:
        self._note(OURS, made.reason)
        self._count(OURS, latent)

    def _count(self, route: str, latent: Any) -> None:
        """A decode went by this route. An encode is told, but not counted."""
        encodes = isinstance(latent, Tensor) and latent.dim() == 4 and image_or_latent(latent) == "image"
        self._calls[route] += not encodes

    def _note(self, route: str, reason: str) -> None:
        """The last decode went by this route; reason: why it was not ours, or not faster."""
        self._services.call_stats.note_decode(route, reason)
        changed = (route, reason) != (self._route, self._reason)
        self._route = route
        self._reason = reason
        if changed:
            line = described(route, reason)
            now = time.monotonic()
            if now - self._logged.get(line, float("-inf")) > SECONDS_UNTIL_TOLD_AGAIN:
                log.info("%s", line)
            self._logged[line] = now


def refuse_misplaced(binding: Binding, latent: Tensor) -> None:
    """Raise Refusal for a latent of another device or dtype than the decoder's weights."""
    if latent.device != binding.device:
        raise Refusal(f"the VAE's weights are on {binding.device}, the latent is on {latent.device}")
    if latent.dtype != binding.dtype:
        raise Refusal(f"the VAE's weights are {short_name(binding.dtype)}, the latent is {short_name(latent.dtype)}")


def refuse_surroundings(latent: Tensor) -> None:
    """Raise Refusal for what surrounds a decode that our forward takes no part in."""
    if torch.is_grad_enabled():
        raise Refusal(TRAINING)
    refuse_global_hooks()
    autocast = autocast_dtype(latent.device.type)
    if autocast not in (None, latent.dtype):
        raise Refusal(f"autocast to {short_name(autocast)} is on, but the latent is {short_name(latent.dtype)}")


def image_or_latent(tensor: Tensor) -> str:
    """Whether (batch, channels, h, w) is an image or a latent, which has other channels than colours."""
    return "image" if tensor.shape[1] == COLOURS else "latent"


def described(route: str | None, reason: str) -> str:
    """The route of a decode in one line for people; empty before the first."""
    if route is None:
        return ""
    if route == OURS:
        return "VAE: accelerated" + (f" ({reason})" if reason else "")
    return "VAE: the WebUI's own" + (f", because {reason}" if reason else "")
