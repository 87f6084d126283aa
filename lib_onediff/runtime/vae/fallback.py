"""One decode of ours, or one encode: by the first backend that can, and in a wider type where the result is no good."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.affine import Weights
from ...core.card import on_card
from ...core.device import Device
from ...core.guard import first_line
from ...core.key import ShapeKey
from ...core.precision import applied, flags_for, our_modes
from ...core.refusal import Refusal
from ...core.table import Entry, State, Stopwatch
from ...families.vae.forward import Decoding
from ...families.vae.layout import DecoderLayout
from ...options.settings import Settings
from ..effects import FP16_ON_CPU
from ..services import Services
from ..verify import blame, recall
from .call_stats import HOST, OURS
from .checks import HostDecode, Outcome, check, short_name
from .kernels import decoder_candidates, decoder_network
from .overflow import ONE_COLOUR, SATURATED, Finding, WatchedOperators, described, look_at
from .precision import AUTO, BY_THE_HOST, NAMED, SLOW_ON_CPU, CastWeights, KnownVaes, digest_of

log = logging.getLogger("onediff")

# As a mark of a key: a decode with nothing to compare it with, because the host's own image cannot be shown.
UNCOMPARED = "uncompared"
# As a mark of a key: work of the VAE, but the other way round.
ENCODE = "vae encode"
# An image that was encoded by a damaged VAE looks the same here as a UNet's overflow.
BAD_LATENT = (
    "the latent has NaN or infinite values: they come from the UNet or, where an image was encoded before, from the "
    "VAE's encoder, and not from this decode"
)


@dataclass(frozen=True)
class DecodeJob:
    """A decode that was asked for; or an encode: then latent is an image.

    weights: as they are now; nobody keeps them after the decode. sources: what tells the host's forward from others.
    """

    layout: DecoderLayout
    weights: Weights
    latent: Tensor
    host: HostDecode
    upcast_attention: bool
    settings: Settings
    sources: str = ""

    @property
    def small(self) -> Tensor:
        """Something of a latent's size: what is decoded is one; what is encoded is an image."""
        step = self.layout.reduction
        return self.latent[..., ::step, ::step]

    @property
    def done(self) -> str:
        return "encoded" if self.layout.encodes else "decoded"

    @property
    def choice(self) -> str:
        return self.settings.vae_precision

    @property
    def wanted(self) -> torch.dtype:
        """The type to decode in. Auto keeps to the type of the host's own VAE: its options have decided that. So does
        a choice that a CPU is too slow for."""
        return self.latent.dtype if self.choice == AUTO or self.why_not_chosen else NAMED[self.choice]

    @property
    def why_not_chosen(self) -> str:
        """Why the chosen type is not taken; empty if it is."""
        if self.choice in SLOW_ON_CPU and self.latent.device.type == "cpu" and self.latent.dtype != NAMED[self.choice]:
            return f"{self.done} in {short_name(self.latent.dtype)}, because {FP16_ON_CPU}"
        return ""

    @cached_property
    def digest(self) -> str:
        return digest_of(self.layout.architecture, self.weights)


class Attempt(NamedTuple):
    """An image in one type, or None where the host is to decode. reason: why not by a better backend."""

    image: Tensor | None
    entry: Entry
    reason: str
    finding: Finding


class DecodeFallbackChain:
    """The backends and the types of a decode.

    An image with NaN, or of one colour, is decoded again in float32, and so is, where the choice is auto, a decode in
    float16 that came near the largest number of it. What was seen is remembered of the VAE.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known = KnownVaes(services.tuning_cache)

    def serve(self, job: DecodeJob) -> Outcome:
        """Our image, or the reason why the host is to decode. Raises torch.cuda.OutOfMemoryError."""
        wanted = job.wanted
        # Nothing is wider than float32.
        remembers = wanted != torch.float32
        known = self._known.saw(job.digest, wanted) if remembers else None
        if known is not None and (job.choice == AUTO or known != SATURATED):
            return self._wider(job, job.done, f"this VAE {described(known, wanted)}")
        uncompared = remembers and self._known.saw(job.digest, BY_THE_HOST) is not None
        attempt = self._attempt(job, wanted, uncompared)
        saw = attempt.finding.saw
        if attempt.image is None:
            return Outcome(None, HOST, attempt.reason, attempt.entry)
        if saw is None or (saw == ONE_COLOUR and not remembers):
            return self._compared(job, attempt)
        if not attempt.finding.latent_is_finite:
            return Outcome(None, HOST, BAD_LATENT, attempt.entry, exhausted=True)
        if not remembers:
            return Outcome(None, HOST, f"its image is {saw} in {short_name(wanted)}", attempt.entry, exhausted=True)
        # Its memory is needed now.
        del attempt
        outcome = self._wider(job, f"{job.done} again", f"this VAE {described(saw, wanted)}")
        if outcome.image is not None and not (saw == ONE_COLOUR and self._has_one_colour(outcome.image, job)):
            self._known.remember(job.digest, wanted, saw)
            log.warning("VAE: %s. From now on, it is not %s in %s.", outcome.reason, job.done, short_name(wanted))
        return outcome

    def repeat(self, job: DecodeJob, saw: str) -> Outcome:
        """Our image in place of the host's own, of which this was seen; or why there is none.

        Raises torch.cuda.OutOfMemoryError.
        """
        if not bool(torch.isfinite(job.latent).all()):
            return Outcome(None, HOST, BAD_LATENT)
        outcome = self._wider(job, f"{job.done} again", f"the VAE's own image is {saw}")
        if outcome.image is None or outcome.entry is None:
            return outcome
        if saw == ONE_COLOUR and self._has_one_colour(outcome.image, job):
            return Outcome(None, HOST, f"it is of one colour in {short_name(outcome.entry.key.dtype)} too")
        log.warning("VAE: %s.", outcome.reason)
        return outcome

    @staticmethod
    def _has_one_colour(image: Tensor, job: DecodeJob) -> bool:
        return look_at(image, job.latent).saw == ONE_COLOUR

    def _wider(self, job: DecodeJob, done: str, why: str) -> Outcome:
        """The image in float32, or in bfloat16 where that does not fit into memory: it has the range, and fewer
        digits."""
        attempt = self._attempt_if_it_fits(job, torch.float32)
        if attempt is None:
            attempt = self._attempt(job, torch.bfloat16, uncompared=True)
            why = f"{why}, and there is no memory for float32"
        name = short_name(attempt.entry.key.dtype)
        if attempt.image is None:
            return Outcome(None, HOST, attempt.reason, attempt.entry)
        if attempt.finding.saw not in (None, ONE_COLOUR):
            finite = attempt.finding.latent_is_finite
            reason = f"{why}, and its image in {name} is {attempt.finding.saw} too" if finite else BAD_LATENT
            return Outcome(None, HOST, reason, attempt.entry, exhausted=True)
        return Outcome(attempt.image, OURS, f"{done} in {name}, because {why}", attempt.entry)

    def _attempt_if_it_fits(self, job: DecodeJob, dtype: torch.dtype) -> Attempt | None:
        try:
            return self._attempt(job, dtype, uncompared=True)
        except torch.cuda.OutOfMemoryError:
            if job.wanted == torch.bfloat16:
                raise
        return None

    def _attempt(self, job: DecodeJob, dtype: torch.dtype, uncompared: bool) -> Attempt:
        """Decode in a type by the first backend that does not fail. What cannot be compared with the host's own is
        decoded by torch's operators, which all others are compared with."""
        services, sound, stored = self._services, Finding(None), job.latent.dtype
        devices, reason, _ = decoder_candidates(services, job.settings, job.latent.device, job.latent.dtype)
        latent = job.latent.to(dtype)
        services.pressure.before_decode(job.small.to(dtype))
        for device in (services.devices.reference,) if uncompared else devices:
            entry = self._entry(job, dtype, device.name, uncompared)
            if entry.state is not State.FAILED:
                try:
                    device.prepare(decoder_network(job.layout, latent), services.waits_for_compile)
                    image, finding = self._image(job, device, entry, latent)
                except torch.cuda.OutOfMemoryError:
                    raise
                except Refusal as refusal:
                    if dtype == stored:
                        return Attempt(None, entry, str(refusal), sound)
                    # The host would decode in another type than the user has chosen.
                    reason = str(refusal)
                    continue
                except Exception as error:
                    blame(entry, f"our forward failed: {first_line(error)}", is_final=False)
                    log.exception("%s (%s)", entry.reason, entry.key)
                else:
                    return Attempt(image, entry, "" if uncompared else reason, finding)
            reason = entry.reason
        return Attempt(None, entry, reason, sound)

    def _entry(self, job: DecodeJob, dtype: torch.dtype, backend: str, uncompared: bool) -> Entry:
        flags = flags_for(job.settings, dtype, job.latent.device, job.upcast_attention)
        marks = (*((ENCODE,) if job.layout.encodes else ()), *((UNCOMPARED,) if uncompared else ()))
        key = ShapeKey.of_decode(
            job.layout.architecture, job.small, job.upcast_attention, backend, dtype, flags, marks
        )
        entry = self._services.table.entry(key, job.layout.model_name).of_weights(f"{job.digest} {job.sources}")
        if uncompared and entry.state is State.COLD:
            entry.state = State.PROVED
        return entry

    def _image(self, job: DecodeJob, used: Device, entry: Entry, latent: Tensor) -> tuple[Tensor, Finding]:
        """The image of a latent in the type to compute in, in the type of the host's, and what it looks like."""
        key, device = entry.key, latent.device
        ops = used.operators()
        watched = WatchedOperators(ops) if job.choice == AUTO and key.dtype == torch.float16 else None
        weights = job.weights if key.dtype == job.latent.dtype else CastWeights(job.weights, key.dtype)
        decoding = Decoding(
            weights, watched or ops, key.upcast_attention, fold_biases=used.traits.channels_last
        )
        stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
        with on_card(device), our_modes(device):
            with applied(key.precision):
                image = stopwatch.time(device, lambda: decoding.run(job.layout, latent).contiguous())
            # Others wait for torch's switches; they need not wait for the GPU too.
            return image.to(job.latent.dtype), look_at(image, latent, watched.peaks if watched else ())

    def _compared(self, job: DecodeJob, attempt: Attempt) -> Outcome:
        """Our image if, the first time at a shape, it is like the host's own."""
        entry = attempt.entry
        ours = Outcome(attempt.image, OURS, attempt.reason or job.why_not_chosen, entry)
        if entry.state is not State.COLD:
            return ours
        history = self._services.history
        if not recall(entry, history):
            # Outside our modes: the host's forward must run exactly as the host would run it.
            checked = check(ours, job.host)
            if checked.host_saw is not None:
                if job.wanted != torch.float32:
                    self._known.remember(job.digest, BY_THE_HOST, checked.host_saw)
            elif checked is ours:
                history.keep_verdict(entry.key.backend, entry.key, entry.weights, entry.relative_error)
            return checked
        entry.state = State.PROVED
        return ours
