"""Serves the decodes and encodes of a host's VAE by our forward, or by the host's forward, with a reason."""
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
from ...core.image import HOST, VAE
from ...core.precision import autocast_dtype
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...core.table import Entry
from ...core.weak_dictionary import WeakDictionary
from ...weights.binding import Binding
from ...weights.bound import BoundNetwork
from ...weights.scan import HostTraits, refuse_global_hooks
from ..call_stats import SECONDS_UNTIL_LOGGED_AGAIN
from ..services import SWITCHED_OFF, TRAINING, Services
from .decode import Decode, Decoded, HostDecode, is_finite, short_name
from .wider_type import BROKEN, NoTypeHelps, WiderType

log = logging.getLogger("onediff")

# The route of a decode by our forward; the other one is core.image.HOST.
OURS = "ours"
# The channels of an image. No latent has three.
COLOURS = 3


class DecoderRoute:
    """Routes the calls of every VAE decoder and encoder that a host has handed over (adopt). "Decoder" means a decoder
    or an encoder here, and "decode" a decode or an encode, if nothing else is said."""

    def __init__(self, services: Services) -> None:
        self._services = services
        # Each with the settings that override the runtime's.
        self._decoders: WeakDictionary[nn.Module, tuple[BoundNetwork, Settings | None]] = WeakDictionary()
        # A live preview is decoded in another thread than the image.
        self._lock = threading.RLock()
        # The last decode, and the number of decodes by route.
        self._route: str | None = None
        self._reason = ""
        self._entry: Entry | None = None
        self._calls: Counter[str] = Counter({OURS: 0, HOST: 0})
        self._logged: dict[str, float] = {}

    # --- the host's calls -----------------------------------------------------------------------------------------

    def adopt(
        self, decoder: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()  # noqa: B008
    ) -> None:
        """Serve a decoder from now on, or replace the settings of a served one. The module is never changed. settings:
        the settings for this module; None: the runtime's apply. host_traits: ignored if the module is served
        already."""
        with self._lock:
            known = self._decoders.get(decoder)
            if known is not None:
                self._decoders[decoder] = known[0], settings
                return
            self._decoders[decoder] = BoundNetwork(decoder, self.read, host_traits), settings
            exact = replace(settings or self._services.settings, low_bit="off")
            self._services.devices.prepare_early(decoder, exact, self.read)

    def read(self, decoder: nn.Module) -> Any:
        """The layout of a decoder or an encoder. Raises Refusal if no family reads its modules."""
        return self._services.decoders.read(decoder)

    def release(self, decoder: nn.Module) -> None:
        """Stop serving a decoder; an unknown one is ignored. Its module was never changed, so nothing is restored."""
        with self._lock:
            self._decoders.pop(decoder, None)

    def release_all(self) -> None:
        """Stop serving all decoders."""
        for decoder in self._decoders:
            self.release(decoder)

    def note_host(self, reason: str, is_decode: bool = True) -> None:
        """Show in the status that the host decodes a latent without OneDiff, and why. is_decode: False if it is not
        known whether the host decodes: then the reason is shown, and no decode is counted."""
        self._entry = None
        self._note(HOST, reason)
        self._calls[HOST] += is_decode

    def status(self) -> dict[str, Any]:
        """The last decode or encode, as plain values: "route" (OURS or HOST; None before the first), "reason", and of
        the entry that was tried last "backend", "resolution", "decode_ms", "host_ms" (medians) and "relative_error";
        each of these is None if unknown. "calls" counts decodes by route, without encodes."""
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
        """The decoder's image of a latent, (batch, channels, h, w); for an encoder, the output for an image.

        host: the host's own decode of the same latent. check: called first; raises Refusal if the host must decode, for
        a reason that the host's adapter finds. upcast_attention: whether attention scores are computed in float32.

        Raises only exceptions of the host. If OneDiff cannot serve the decode, the host decodes, and status() has the
        reason. If an image, OneDiff's or the host's, has NaN or infinite values, the latent is decoded again by OneDiff
        in a wider dtype. If that does not help, the host's own image is returned, so that the host handles it as it
        would without OneDiff. A warm-up's decode does not change the route, reason and times in status().
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
                # A warm-up's decode belongs to no image.
                self._route, self._reason, self._entry = before

    def _decode(
        self, decoder: nn.Module, latent: Tensor, host: HostFunction, upcast_attention: bool,
        check: Callable[[], object],
    ) -> Tensor:
        """See decode, which in addition counts the time for the image. Raises HostError for exceptions of the host."""
        host_decode = HostDecode(decoder, latent, host, cache(host), upcast_attention)
        self._entry = None
        tried = attempted(lambda: self._serve(host_decode, check), host_oom_is_ours=True)
        if not tried.is_ours:
            return self._by_host(host_decode, tried)
        made = tried.given()
        self._services.guard.attempt("counting a decode", lambda: self._note_ours(made, latent))
        return made.image

    def _serve(self, host_decode: HostDecode, check: Callable[[], object]) -> Decoded:
        """The result by our forward, compared with the host's at a shape's first use. Raises Refusal if the host's own
        result must be used, torch.cuda.OutOfMemoryError, and HostError for exceptions of the host."""
        check()
        self._admitted(host_decode)
        refuse_surroundings(host_decode.latent)
        return self._ours(host_decode).serve()

    def _admitted(self, host_decode: HostDecode) -> tuple[BoundNetwork, Settings]:
        """The decoder with its weights, and the settings that apply to the decoder now. Raises Refusal if OneDiff is
        switched off, or does not serve this decoder."""
        known = self._decoders.get(host_decode.decoder)
        if known is None:
            # This also happens if another thread has just switched OneDiff off.
            raise Refusal("OneDiff is not switched on for this VAE")
        settings = known[1] or self._services.settings
        why_off = ""
        running = self._services.generations.run_settings
        if running is not None:
            settings, why_off = running
        if not settings.enabled:
            raise Refusal(why_off or SWITCHED_OFF)
        return known[0], settings

    def _ours(self, host_decode: HostDecode) -> WiderType:
        """An object that decodes by our forward, with the weights as they are now; nothing is decoded yet. Raises
        Refusal if our forward does not support the decoder or the latent, if OneDiff is switched off, or if it does not
        serve this decoder."""
        bound, settings = self._admitted(host_decode)
        # on_card, because the kernels that read the weights' contents are loaded on torch's current GPU.
        with self._lock, on_card(host_decode.latent.device):
            bound.reader = self._services.devices.contents_reader(host_decode.latent.device)
            # The host's weights are read in place and never changed: making one channels-last takes a thousandth of a
            # decode, and the host's own decode finds its weights unchanged.
            bound.refresh_without_binding()
            self._services.decoders.of(bound.layout).refuse_latent(bound.layout, host_decode.latent)
            refuse_misplaced(bound.binding, host_decode.latent)
            weights = bound.binding.weights()
            identity = bound.identity()
            decode = Decode(self._services, self._notice, bound.layout, weights, identity, host_decode, settings)
        return WiderType(decode)

    def _by_host(self, host_decode: HostDecode, tried: Attempt[Decoded]) -> Tensor:
        """The host's own image; if that is not finite, ours in a wider dtype, if that is (see _in_place_of). tried: the
        failed attempt to serve the decode; has the reason. If the attempt ran out of GPU memory, OneDiff's is freed
        first.

        A fault of ours is logged only after the host has answered: if the host raises too, the inputs are wrong.
        """
        services = self._services
        reason = tried.reason
        if tried.outcome is Outcome.OUT_OF_MEMORY:
            services.release_memory()
        if tried.fault is None:
            self._note(HOST, reason)
        image = services.pressure.run_host(host_decode.image)
        if tried.fault is not None:
            reason = services.guard.note("the VAE's forward", tried.fault)
            services.guard.attempt("counting a decode", partial(self._note, HOST, reason))
        may_help = not isinstance(tried.error, NoTypeHelps)
        look = lambda: self._in_place_of(image, host_decode, reason, may_help)  # noqa: E731
        shown: Any = services.guard.attempt("looking at the VAE's image", look, image)
        route = HOST if shown is image else OURS
        services.guard.attempt("counting a decode", lambda: self._count(route, host_decode.latent))
        return shown

    def _in_place_of(self, image: Any, host_decode: HostDecode, reason: str, may_help: bool) -> Tensor:
        """The host's `image`, or in its place our image in a wider dtype, if the host's is not finite and ours is.

        Returns the host's image too if OneDiff is switched off or does not serve the decoder, with gradients on, and if
        `image` is not a tensor of four dimensions. If neither image is finite, logs a warning. reason: why OneDiff did
        not decode, for the log and the status. may_help: False if a wider dtype was tried already: then none is tried.
        """
        is_image = isinstance(image, Tensor) and image.dim() == 4 and image.is_floating_point()
        if not is_image or torch.is_grad_enabled():
            return image
        if attempted(lambda: self._admitted(host_decode)).outcome is Outcome.REFUSED or is_finite(image):
            return image
        found = f"{image_or_latent(image)} is {BROKEN}"
        if may_help:
            tried = attempted(lambda: self._ours(host_decode).repeat())
            if tried.is_ours:
                made = tried.given()
                self._note(OURS, made.reason)
                return made.image.to(image.dtype)
            if tried.outcome is Outcome.OUT_OF_MEMORY:
                self._services.release_memory()
            why = tried.reason
            if tried.fault is not None:
                why = self._services.guard.note("the VAE's forward", tried.fault)
            self._note(HOST, f"{reason}; its {found}, and OneDiff could not make a better one: {why}")
            reason = why
        log.warning(
            "VAE: the %s, so the picture may be black, and OneDiff could not make a better one: %s.", found, reason
        )
        return image

    # --- statistics -----------------------------------------------------------------------------------------------

    def _notice(self, entry: Entry) -> None:
        """Keep the entry that was tried last, for status()."""
        self._entry = entry

    def _note_ours(self, made: Decoded, latent: Tensor) -> None:
        """Note and count a result of our forward (_note, _count)."""
        self._note(OURS, made.reason)
        self._count(OURS, latent)

    def _count(self, route: str, latent: Any) -> None:
        """Count a decode by this route (OURS or HOST). latent: the module's input; if it is an image, this was an
        encode, and is not counted."""
        encodes = isinstance(latent, Tensor) and latent.dim() == 4 and image_or_latent(latent) == "image"
        self._calls[route] += not encodes

    def _note(self, route: str, reason: str) -> None:
        """Note the route of the last decode, and its reason, for the status and the image. Logs a line if one of the
        two has changed, but the same line only once in SECONDS_UNTIL_LOGGED_AGAIN. reason: why the route is not OURS,
        or why the decode was not faster; "" for none."""
        self._services.call_stats.note_decode(route, reason)
        changed = (route, reason) != (self._route, self._reason)
        self._route = route
        self._reason = reason
        if changed:
            line = decode_sentence(route, reason)
            now = time.monotonic()
            if now - self._logged.get(line, float("-inf")) > SECONDS_UNTIL_LOGGED_AGAIN:
                log.info("%s", line)
            self._logged[line] = now


def refuse_misplaced(binding: Binding, latent: Tensor) -> None:
    """Raise Refusal if the latent's device or dtype is not that of the decoder's weights: the host's own forward then
    fails too, or converts the latent or the weights."""
    if latent.device != binding.device:
        raise Refusal(f"the VAE's input is on {latent.device}, but its weights are on {binding.device}")
    if latent.dtype != binding.dtype:
        weights = short_name(binding.dtype)
        raise Refusal(f"the VAE's input is in {short_name(latent.dtype)}, but its weights are in {weights}")


def refuse_surroundings(latent: Tensor) -> None:
    """Raise Refusal if a mode is set around the decode that our forward does not support: recorded gradients, global
    module hooks, or autocast to another dtype than the latent's."""
    if torch.is_grad_enabled():
        raise Refusal(TRAINING)
    refuse_global_hooks()
    autocast = autocast_dtype(latent.device.type)
    if autocast not in (None, latent.dtype):
        raise Refusal(
            f"PyTorch's autocast computes in {short_name(autocast)}, but the VAE's input is in "
            f"{short_name(latent.dtype)}"
        )


def image_or_latent(tensor: Tensor) -> str:
    """The word for a VAE's input or output: "image" for a tensor (batch, COLOURS, h, w), otherwise "latent"."""
    return "image" if tensor.shape[1] == COLOURS else "latent"


def decode_sentence(route: str | None, reason: str) -> str:
    """A line for users on how a decode was served, such as "VAE: accelerated"; "" if route is None, before the first
    decode. route: OURS or HOST. reason: why the route is not OURS, or why the decode was not faster; "" for none."""
    if route is None:
        return ""
    if route == OURS:
        return "VAE: accelerated" + (f" ({reason})" if reason else "")
    return "VAE: without OneDiff" + (f", because {reason}" if reason else "")
