"""One decode of ours, or one encode: by the first device that can, and in a wider type where the result is no good."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.attempt import Outcome, attempted
from ...core.card import on_card
from ...core.device import Device, Network
from ...core.guard import first_line
from ...core.key import ShapeKey
from ...core.layer_weights import Weights
from ...core.operators import Operators
from ...core.precision import applied, flags_for, our_modes
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...core.table import Entry, State, Stopwatch
from ...families.vae import DecoderLayout, Decoding
from ...weights.operands import Cast, Operands
from ..rounding import rounding_limit, rounds_as, spread
from ..services import Services
from ..verify import HOST_NOT_FINITE, judge, time_host

log = logging.getLogger("onediff")
AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
# The channels of an image; a latent, as an encoder makes it, has others.
COLOURS = 3
# What was seen of a decode, as people read it after "its image is".
NOT_FINITE = "not finite"
# As a mark of a key: work of the VAE, but the other way round.
ENCODE = "vae encode"
# An image that was encoded by a damaged VAE looks the same here as a UNet's overflow.
BAD_LATENT = (
    "the latent has NaN or infinite values: they come from the UNet or, where an image was encoded before, from the "
    "VAE's encoder, and not from this decode"
)


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_finite(image: Tensor) -> bool:
    """Whether an image (batch, colours, h, w), or what an encoder made, has no NaN and nothing infinite. Waits for the
    device.

    What overflows on the way does not stay hidden: norms and attention spread what is infinite or missing.
    """
    return bool(torch.isfinite(image).all())


class NoTypeHelps(Refusal):
    """The image could not be shown in the widest type either: the host's own stays as it is."""


class HostDecode(NamedTuple):
    """What a host asks for, and its own way to make it: latent is what its decoder is called with, or, to be encoded,
    an image. decode() decodes at every call; image() once."""

    decoder: nn.Module
    latent: Tensor
    decode: Callable[[], Tensor]
    image: Callable[[], Tensor]
    upcast_attention: bool


class Decoded(NamedTuple):
    """An image of ours. reason: why it was not made in a better way. is_finite: see the function."""

    image: Tensor
    entry: Entry
    reason: str
    is_finite: bool


@dataclass(frozen=True)
class Decode:
    """A decode, or an encode, by our forward.

    An image with NaN is decoded again in float32, and that is remembered of the VAE.

    notice: called with every entry that is tried. weights: as they are now; nobody keeps them after the decode.
    identity: the weights' digest, with the sources of the host's forward; see BoundUNet.identity.
    """

    services: Services
    notice: Callable[[Entry], None]
    layout: DecoderLayout
    weights: Weights
    identity: str
    host: HostDecode
    settings: Settings

    def serve(self) -> Decoded:
        """Our image. Raises Refusal where the host is to decode, and torch.cuda.OutOfMemoryError."""
        wanted, tuned, known = self._wanted, self.services.tuning_cache, self._overflow_name
        overflows = f"this VAE overflows in {short_name(wanted)}"
        # Nothing is wider than float32.
        can_widen = wanted != torch.float32
        if can_widen and tuned.get(known) == NOT_FINITE:
            return self._wider(self._done, overflows)
        made = self._by_devices(wanted)
        if made.is_finite:
            return self._checked(made)
        # Its memory is needed now.
        del made
        self._refuse_bad_latent()
        if not can_widen:
            raise NoTypeHelps(f"its image is {NOT_FINITE} in {short_name(wanted)}")
        wider = self._wider(f"{self._done} again", overflows)
        self.services.guard.attempt("remembering a VAE", lambda: tuned.set(known, NOT_FINITE))
        log.warning("VAE: %s. From now on, it is not %s in %s.", wider.reason, self._done, short_name(wanted))
        return wider

    def repeat(self) -> Decoded:
        """Our image in place of the host's own, which is not finite. Raises as serve."""
        self._refuse_bad_latent()
        made = self._wider(f"{self._done} again", f"the VAE's own image is {NOT_FINITE}")
        log.warning("VAE: %s.", made.reason)
        return made

    def _checked(self, made: Decoded) -> Decoded:
        """An image that, the first time at a shape, is like the host's own. Raises Refusal where the two differ by more
        than rounding. A host's image that cannot be shown proves nothing, and ours can."""
        if made.entry.state is not State.COLD:
            return made
        with self.services.call_stats.checking(self._latent.device):
            return self._compared(made)

    def _compared(self, made: Decoded) -> Decoded:
        """The first image at a shape, as _checked."""
        entry, history = made.entry, self.services.history
        if not history.recall(entry):
            # Outside our modes: the host's forward must run exactly as the host would run it. A GPU loads kernels and
            # picks algorithms in the first run at a size. On a CPU there is no other, and no ratio.
            device, on_gpu = self._latent.device, self._latent.is_cuda
            host = self.host.image if on_gpu else lambda: entry.host.time(device, self.host.image)
            # Ours may have been computed in another type than the host's: then the host's rounds more, or less.
            is_another = entry.key.dtype != self._latent.dtype
            allowed = rounding_limit(self._latent.dtype, device, entry.key.precision) if is_another else 0.0
            miss = judge(
                entry, made.image, host, times_host=False, allowed=allowed, same_type=True,
                spread=partial(self._spread, entry),
            )
            if miss == HOST_NOT_FINITE and self._wanted == torch.float32:
                return made._replace(reason=f"the VAE's own image is {NOT_FINITE}")
            if miss == HOST_NOT_FINITE:
                self.services.tuning_cache.set(self._overflow_name, NOT_FINITE)
                return self.repeat()
            if miss is not None:
                raise Refusal(entry.blame(miss))
            log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
            if on_gpu:
                time_host(entry, device, self.host.decode)
            self.services.guard.attempt("remembering a check", lambda: history.keep_verdict(entry))
        entry.state = State.PROVED
        return made

    # --- the type -------------------------------------------------------------------------------------------------

    @property
    def _done(self) -> str:
        return "encoded" if self.layout.encodes else "decoded"

    @property
    def _wanted(self) -> torch.dtype:
        """The type to decode in. Auto keeps to the type of the host's own VAE: its options have decided that. So does
        a choice that a CPU is too slow for, of which ui.effects tells."""
        choice = self.settings.vae_precision
        is_slow = choice in SLOW_ON_CPU and self._latent.device.type == "cpu"
        return self._latent.dtype if choice == AUTO or is_slow else NAMED[choice]

    @property
    def _overflow_name(self) -> str:
        """Under which is remembered, on this machine and for later processes, that it overflows in the wanted type."""
        return f"VAE {self.identity}, {short_name(self._wanted)}"

    @property
    def _latent(self) -> Tensor:
        return self.host.latent

    def _refuse_bad_latent(self) -> None:
        if not is_finite(self._latent):
            raise NoTypeHelps(BAD_LATENT)

    def _wider(self, done: str, why: str) -> Decoded:
        """The image in float32, or in bfloat16 where that does not fit into memory: it has the range, and fewer
        digits."""
        tried = attempted(lambda: self._by_devices(torch.float32, uncompared=True))
        if tried.outcome is Outcome.OUT_OF_MEMORY and self._wanted != torch.bfloat16:
            made, why = self._by_devices(torch.bfloat16, uncompared=True), f"{why}, and there is no memory for float32"
        else:
            made = tried.given()
        name = short_name(made.entry.key.dtype)
        if not made.is_finite:
            self._refuse_bad_latent()
            raise NoTypeHelps(f"{why}, and its image in {name} is {NOT_FINITE} too")
        return made._replace(reason=f"{done} in {name}, because {why}")

    # --- the device -----------------------------------------------------------------------------------------------

    def _by_devices(self, dtype: torch.dtype, uncompared: bool = False) -> Decoded:
        """The image in a type by the first device that does not fail. What cannot be compared with the host's own is
        decoded by torch's operators, which all others are compared with. Raises as serve."""
        services, stored = self.services, self._latent.dtype
        found = services.devices.launched(self.settings, self._latent.device, stored, services.is_warm_up)
        devices, reason = ((services.devices.reference,), "") if uncompared else (found.devices, found.reason)
        latent = self._latent.to(dtype)
        network = Network(self.layout.architecture, self.layout.kernel_users, dtype, latent.device)
        services.pressure.before_decode(self._small.to(dtype))
        for device in devices:
            entry = self._entry(dtype, device.name)
            made = attempted(partial(self._by, device, network, entry, latent, reason))
            if made.is_ours or made.outcome is Outcome.OUT_OF_MEMORY:
                return made.given()
            reason = made.reason
            if made.fault is not None:
                reason = entry.blame(f"our forward failed: {first_line(made.fault)}", is_final=False)
                log.error("%s (%s)", reason, entry.key, exc_info=made.fault)
        raise Refusal(reason)

    @property
    def _small(self) -> Tensor:
        """Something of a latent's size: what is decoded is one; what is encoded is an image."""
        step = self.layout.reduction
        return self._latent[..., ::step, ::step]

    def _entry(self, dtype: torch.dtype, backend: str) -> Entry:
        layout, upcast = self.layout, self.host.upcast_attention
        flags = flags_for(self.settings, dtype, self._latent.device, upcast)
        marks = (ENCODE,) if layout.encodes else ()
        key = ShapeKey.of_decode(layout.architecture, self._small, upcast, backend, dtype, flags, marks)
        entry = self.services.table.entry(key, layout.model_name).of_weights(self.identity)
        self.notice(entry)
        return entry

    def _by(self, device: Device, network: Network, entry: Entry, latent: Tensor, reason: str) -> Decoded:
        """The image by one device. reason: why the one before was not good. Raises Refusal."""
        if entry.state is State.FAILED:
            raise Refusal(entry.reason)
        device.prepare(network)
        return self._computed(device, entry, latent, reason)

    def _spread(self, entry: Entry) -> float:
        """How far rounding moves this image; see rounding.spread."""
        key, latent = entry.key, self._latent.to(entry.key.dtype)
        weights = self._weights_in(key.dtype)

        def image(ops: Operators) -> Tensor:
            return Decoding(weights, ops, key.upcast_attention, fold_biases=False).run(self.layout, latent)

        ops: Operators = self.services.devices.reference.operators()
        with on_card(latent.device), our_modes(latent.device, key.precision):
            return spread(image, ops, rounds_as(key.dtype, latent.device, key.precision), latent.device)

    def _weights_in(self, dtype: torch.dtype) -> Weights:
        """The weights in a type, each cast when it is read."""
        if dtype == self._latent.dtype:
            return self.weights
        return Operands(self.weights, [Cast(dtype, vectors=True)])

    def _computed(self, used: Device, entry: Entry, latent: Tensor, reason: str) -> Decoded:
        """The image of a latent in the type to compute in, in the type of the host's."""
        key, device, stored = entry.key, latent.device, self._latent.dtype
        weights = self._weights_in(key.dtype)
        decoding = Decoding(weights, used.operators(), key.upcast_attention, fold_biases=used.traits.channels_last)
        # A first run at a size loads kernels and picks algorithms.
        stopwatch = entry.own if entry.uses > 1 else Stopwatch()
        with on_card(device), our_modes(device):
            with applied(key.precision):
                image = stopwatch.time(device, lambda: decoding.run(self.layout, latent).contiguous())
            # Others wait for torch's switches; they need not wait for the GPU too.
            image = image.to(stored)
            return Decoded(image, entry, reason, is_finite(image))
