"""Serve the decodes of a host's VAE by our forward where it can, and say why where it cannot."""
from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import backends
from ..ladder import COMPILING, blame
from ..modes import our_modes
from ..settings import Settings
from ..shapes.key import ShapeKey
from ..shapes.table import Entry, State
from ..shapes.timing import Stopwatch
from ..unet.foreign import Habits
from ..unet.layout import UnsupportedUNet
from ..unet.weights import Weights
from ..verify import first_line, recall
from .bound import BoundDecoder
from .checks import HostDecode, NotServed, Outcome, check, refuse_latent, refuse_modes, short_name
from .forward import Decoding
from .journal import HOST, OURS, DecodeJournal
from .layout import DecoderLayout
from .wiring import decoder_steps, kernels_are_ready, prepare_early

if TYPE_CHECKING:
    from ..accelerator import Accelerator

log = logging.getLogger("onediff")


class DecoderRoute:
    """Routes the decodes of every decoder that a host has handed over."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.journal = DecodeJournal()
        self._accelerator = accelerator
        self._decoders: weakref.WeakKeyDictionary[nn.Module, BoundDecoder] = weakref.WeakKeyDictionary()
        self._run: tuple[Settings, str] | None = None
        # A live preview is decoded on another thread than the picture.
        self._lock = threading.RLock()

    # --- what hosts say -------------------------------------------------------------------------------------------

    def adopt(self, decoder: nn.Module, settings: Settings | None = None, habits: Habits = Habits()) -> None:  # noqa: B008
        """Take a decoder into care; nothing of it changes, then or later. settings override the runtime's."""
        with self._lock:
            known = self._decoders.get(decoder)
            if known is None:
                self._decoders[decoder] = BoundDecoder(decoder, settings, habits)
                prepare_early(self._accelerator, decoder, settings or self._accelerator.settings)
            else:
                known.settings = settings

    def release(self, decoder: nn.Module) -> None:
        """Forget a decoder; nothing of it was changed."""
        with self._lock:
            self._decoders.pop(decoder, None)

    def release_all(self) -> None:
        """Forget every decoder."""
        for decoder in list(self._decoders):
            self.release(decoder)

    def begin_run(self) -> None:
        """A sampling begins: its picture is decoded after it, by the settings that hold now."""
        self._run = self._accelerator.run_settings

    def end_run(self) -> None:
        """The picture is done."""
        self._run = None

    def note_host(self, reason: str) -> None:
        """Take down that the host decodes a latent of which we know nothing, and why."""
        self.journal.note(HOST, reason, None)

    def status(self) -> dict[str, Any]:
        """What became of the last decode, as plain values; see DecodeJournal."""
        return self.journal.status()

    # --- one decode -----------------------------------------------------------------------------------------------

    def decode(self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool = False) -> Tensor:
        """The decoder's picture of a latent, (batch, channels, h, w); host() is the host's own decode of the same.

        Never raises for a reason of ours: what we cannot serve, the host decodes, and status() says why. So does it
        where our picture is not finite: it must find what it would have found without us, and act on it.
        """
        outcome = self._attempt(decoder, latent, host, upcast_attention)
        # Only now is everything gone that our forward had computed before it failed.
        if outcome.out_of_memory:
            self._accelerator.free_graphs()
        self.journal.note(outcome.route, outcome.reason, outcome.entry)
        return host() if outcome.picture is None else outcome.picture

    def _attempt(self, decoder: nn.Module, latent: Tensor, host: HostDecode, upcast_attention: bool) -> Outcome:
        try:
            settings = self._settings(decoder)
            refuse_modes(latent)
            return self._serve(self._decoders[decoder], latent, host, upcast_attention, settings)
        except (NotServed, UnsupportedUNet) as refusal:
            return Outcome(None, HOST, str(refusal))
        except torch.cuda.OutOfMemoryError:
            return Outcome(None, HOST, "out of GPU memory: the graphs were freed", out_of_memory=True)
        except Exception as error:
            # A fault of ours must not cost the user a picture.
            log.exception("a fault of ours")
            return Outcome(None, HOST, f"a fault of ours, please report it: {first_line(error)}")

    def _settings(self, decoder: nn.Module) -> Settings:
        """The settings that hold now. Raises NotServed where nothing of ours may run."""
        bound = self._decoders.get(decoder)
        if bound is None:
            raise NotServed("this VAE was not handed to OneDiff")
        own = bound.settings or self._accelerator.settings
        settings, why_off = self._accelerator.run_settings or self._run or (own, "")
        if not settings.enabled:
            raise NotServed(why_off or "OneDiff is switched off")
        return settings

    def _serve(
        self, bound: BoundDecoder, latent: Tensor, host: HostDecode, upcast_attention: bool, settings: Settings
    ) -> Outcome:
        """Decode by the first backend that does not fail."""
        with self._lock:
            bound.look()
            refuse_latent(bound, latent)
            layout, weights = bound.layout, bound.weights()
        names, reason = decoder_steps(self._accelerator, settings, latent.device)
        for backend in names:
            key = ShapeKey.of_decode(layout.architecture, latent, upcast_attention, backend)
            entry = self._accelerator.table.entry(key, layout.model_name)
            if entry.state is not State.FAILED:
                try:
                    if backend == backends.NATIVE and not kernels_are_ready(self._accelerator, layout, latent):
                        return Outcome(None, HOST, COMPILING, entry)
                    picture = self._picture(entry, layout, weights, latent)
                except torch.cuda.OutOfMemoryError:
                    raise
                except Exception as error:
                    entry.fail(blame(backend, f"our forward failed: {first_line(error)}"))
                    log.exception("%s (%s)", entry.reason, key)
                else:
                    return self._judged(Outcome(picture, OURS, reason, entry), settings, host)
            reason = entry.reason
        return Outcome(None, HOST, reason, entry)

    def _picture(self, entry: Entry, layout: DecoderLayout, weights: Weights, latent: Tensor) -> Tensor:
        key = entry.key
        ops = self._accelerator.operators.of(key.backend)
        decoding = Decoding(weights, ops, key.upcast_attention, fold_biases=key.backend == backends.NATIVE)
        stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
        with our_modes(latent.device):
            return stopwatch.time(latent.device, lambda: decoding.run(layout, latent).contiguous())

    def _judged(self, ours: Outcome, settings: Settings, host: HostDecode) -> Outcome:
        """Our picture if it is finite and, the first time at a shape, like the host's own."""
        entry = ours.entry
        if not bool(torch.isfinite(ours.picture).all()):
            return Outcome(None, HOST, f"its picture is not finite in {short_name(entry.key.dtype)}", entry)
        if entry.state is not State.COLD:
            return ours
        history = self._accelerator.history
        if not recall(entry, history) and settings.verify:
            # Outside our modes: the host's forward must run exactly as the host would run it.
            checked = check(ours, host)
            if checked is ours:
                history.keep_verdict(entry.key.backend, entry.key, entry.relative_error)
            return checked
        entry.state = State.PROVED
        return ours
