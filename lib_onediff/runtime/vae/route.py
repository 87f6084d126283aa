"""Serve the decodes of a host's VAE by our forward where it can, and say why where it cannot."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.refusal import Refusal
from ...core.weak_dictionary import WeakDictionary
from ...options.settings import Settings
from ...weights.scan import HostTraits
from ..services import OUT_OF_MEMORY, SWITCHED_OFF, Services
from .bound import BoundDecoder
from .call_stats import HOST, OURS, DecodeStats
from .checks import HostDecode, Outcome, misfit, why_not_now
from .fallback import DecodeFallbackChain, DecodeJob
from .kernels import prepare_early
from .overflow import COLOURS, look_at

log = logging.getLogger("onediff")


class DecoderRoute:
    """Routes the decodes of every decoder that a host has handed over."""

    def __init__(self, services: Services) -> None:
        self.call_stats = DecodeStats()
        self._services = services
        self._fallback = DecodeFallbackChain(services)
        self._decoders: WeakDictionary[nn.Module, BoundDecoder] = WeakDictionary()
        self._run: tuple[Settings, str] | None = None
        # A live preview is decoded on another thread than the image.
        self._lock = threading.RLock()

    # --- what hosts say -------------------------------------------------------------------------------------------

    def adopt(
        self, decoder: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()  # noqa: B008
    ) -> None:
        """Take a decoder into care; nothing of it changes, then or later. settings override the runtime's."""
        with self._lock:
            known = self._decoders.get(decoder)
            if known is None:
                self._decoders[decoder] = BoundDecoder(decoder, settings, host_traits)
                prepare_early(self._services, decoder, settings or self._services.settings)
            else:
                known.settings = settings

    def release(self, decoder: nn.Module) -> None:
        """Forget a decoder; nothing of it was changed."""
        with self._lock:
            self._decoders.pop(decoder, None)

    def release_all(self) -> None:
        """Forget every decoder."""
        for decoder in self._decoders:
            self.release(decoder)

    def begin_run(self) -> None:
        """A sampling begins: its image is decoded after it, by the settings that hold now."""
        self._run = self._services.run_settings

    def end_run(self) -> None:
        """The image is done."""
        self._run = None

    def note_host(self, reason: str) -> None:
        """Take down that the host decodes a latent of which we know nothing, and why."""
        self.call_stats.note(HOST, reason, None)

    def tell_host(self, reason: str) -> None:
        """As note_host, before a decode that may never come to us: it is told, but not counted."""
        self.call_stats.note(HOST, reason, None, counted=False)

    def status(self) -> dict[str, Any]:
        """What became of the last decode, as plain values; see DecodeStats."""
        return self.call_stats.status()

    # --- one decode -----------------------------------------------------------------------------------------------

    def decode(self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool = False) -> Tensor:
        """The decoder's image of a latent, (batch, channels, h, w); host() is the host's own decode of the same.

        Never raises for a reason of ours: what we cannot serve, the host decodes, and status() says why. An image
        with NaN or of one colour, whoever made it, is decoded again in a wider type; where that does not help, it is
        the host's own, so that the host finds what it would have found without us.
        """
        outcome = self._attempt(lambda: self._serve(decoder, latent, host, upcast_attention))
        self.call_stats.note(outcome.route, outcome.reason, outcome.entry, counted=not is_encoded(latent))
        if outcome.image is not None:
            return outcome.image
        return self._by_host(decoder, latent, host, upcast_attention, outcome)

    def decode_by_host(
        self, decoder: nn.Module, latent: Tensor, host: HostDecode, reason: str, upcast_attention: bool = False
    ) -> Tensor:
        """The host's own decode, for a reason that its adapter knows; its image is looked at as decode() does."""
        self.call_stats.note(HOST, reason, None, counted=not is_encoded(latent))
        return self._by_host(decoder, latent, host, upcast_attention, Outcome(None, HOST, reason))

    def _attempt(self, work: Callable[[], Outcome]) -> Outcome:
        """work(), or what stands in its way."""
        try:
            return work()
        except Refusal as refusal:
            return Outcome(None, HOST, str(refusal))
        except torch.cuda.OutOfMemoryError:
            outcome = Outcome(None, HOST, OUT_OF_MEMORY)
        except Exception as error:
            return Outcome(None, HOST, self._services.guard.note("the VAE's forward", error))
        # Only now is everything gone that our forward had computed before it failed.
        self._services.free_graphs()
        return outcome

    def _settings(self, decoder: nn.Module) -> Settings | str:
        """The settings that hold now, or why OneDiff may not run."""
        bound = self._decoders.get(decoder)
        if bound is None:
            return "this VAE was not handed to OneDiff"
        own = bound.settings or self._services.settings
        settings, why_off = self._services.run_settings or self._run or (own, "")
        if not settings.enabled:
            return why_off or SWITCHED_OFF
        return settings

    def _serve(self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool) -> Outcome:
        settings = self._settings(decoder)
        if isinstance(settings, str):
            return Outcome(None, HOST, settings)
        job = why_not_now(latent) or self._job(decoder, latent, host, upcast_attention, settings)
        return Outcome(None, HOST, job) if isinstance(job, str) else self._fallback.serve(job)

    def _job(
        self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool, settings: Settings
    ) -> DecodeJob | str:
        """The decode as we take it, or why the decoder or the latent is none of ours. Raises Refusal."""
        bound = self._decoders.get(decoder)
        if bound is None:
            # Another thread has switched OneDiff off meanwhile.
            return "this VAE was given back"
        with self._lock:
            return bound.look() or misfit(bound, latent) or (
                DecodeJob(bound.layout, bound.weights(), latent, host, upcast_attention, settings, bound.sources())
            )

    def _by_host(
        self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool, outcome: Outcome
    ) -> Tensor:
        """The host's own image, or ours where that cannot be shown."""
        image = self._services.pressure.run_host(host)
        look = lambda: self._in_place_of(image, decoder, latent, host, upcast_attention, outcome)  # noqa: E731
        shown = self._services.guard.attempt("looking at the VAE's image", look)
        return image if shown is None else shown

    def _in_place_of(
        self, image: Tensor, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool,
        outcome: Outcome,
    ) -> Tensor:
        """The host's image where it can be shown, and else ours if there is one."""
        settings = self._settings(decoder)
        if isinstance(settings, str) or not is_image(image) or torch.is_grad_enabled():
            return image
        saw = look_at(image, latent).saw
        if saw is None:
            return image

        def repeat() -> Outcome:
            job = self._job(decoder, latent, host, upcast_attention, settings)
            return Outcome(None, HOST, job) if isinstance(job, str) else self._fallback.repeat(job, saw)

        reason, made = outcome.reason, "image" if image.shape[1] == COLOURS else "latent"
        if not outcome.exhausted:
            repeated = self._attempt(repeat)
            if repeated.image is not None:
                self.call_stats.correct(OURS, repeated.reason, repeated.entry)
                return repeated.image.to(image.dtype)
            reason = repeated.reason
            both = f"{outcome.reason}; its {made} is {saw}, and ours could not take its place: {reason}"
            self.call_stats.correct(HOST, both, outcome.entry)
        log.warning("VAE: the %s is %s, and OneDiff could not help: %s.", made, saw, reason)
        return image


def is_encoded(latent: Any) -> bool:
    """Whether what was handed over is an image, to be encoded, and no latent."""
    return isinstance(latent, Tensor) and latent.dim() == 4 and latent.shape[1] == COLOURS


def is_image(decoded: Any) -> bool:
    return isinstance(decoded, Tensor) and decoded.dim() == 4 and decoded.is_floating_point() and decoded.numel() > 0
