"""One decode, or one encode, in one dtype, by the first backend that can compute it, compared with the host's image."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.card import on_card
from ...core.device import Device, KernelUse
from ...core.key import ShapeKey
from ...core.layer_weights import Weights
from ...core.operators import Operators
from ...core.precision import applied, flags_for, our_modes
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...core.table import Entry, State, Stopwatch
from ...weights.operands import Cast, Operands
from ..backend_choice import Candidate, first_to_serve
from ..rounding import rounding_limit, rounds_as, spread
from ..services import Services
from ..verify import HOST_NOT_FINITE, time_host, why_it_differs

log = logging.getLogger("onediff")
# The mark in the key of an encode.
ENCODE = "vae encode"


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", for messages."""
    return str(dtype).removeprefix("torch.")


def is_finite(image: Tensor) -> bool:
    """Whether a tensor, such as an image (batch, colours, h, w) or an encoder's output, has neither NaN nor infinite
    values. Waits for the device.

    An overflow inside of the network shows in its output, because norms and attention spread infinite values and NaN.
    """
    return bool(torch.isfinite(image).all())


class HostNotFinite(Refusal):
    """The host's own image has NaN or infinite values, so ours cannot be compared with it."""


class HostDecode(NamedTuple):
    """A host's call of a VAE's decoder or encoder. The fields are named for a decode; in an encode, `latent` is the
    image, and decode() and image() return the latent's mean and log variance.

    decoder: the host's module, a decoder or an encoder.
    latent: the module's input, (batch, channels, h, w).
    decode: computes the host's own result anew at every call, so that it can be timed.
    image: returns the host's own result, to compare with and to return; computed at the first call, and then
        remembered.
    upcast_attention: whether attention scores are computed in float32.
    """

    decoder: nn.Module
    latent: Tensor
    decode: Callable[[], Tensor]
    image: Callable[[], Tensor]
    upcast_attention: bool


class Decoded(NamedTuple):
    """The result of one decode or encode by our forward.

    image: in the host's dtype; for an encode, the latent's mean and log variance.
    entry: the entry of the shape with the backend and dtype that computed the image.
    reason: why a faster backend, or the one in the settings, did not compute the image, for users; "" if no backend was
        passed over, and for in_type(uncompared=True), which uses the reference backend alone.
    is_finite: whether the image has neither NaN nor infinite values.
    """

    image: Tensor
    entry: Entry
    reason: str
    is_finite: bool


@dataclass(frozen=True)
class Decode:
    """One decode, or one encode, by our forward. Names are as in HostDecode: in an encode, the image is the latent's
    mean and log variance.

    notice: called with every entry that is tried; the route shows the last one in its status.
    layout, weights: the decoder's layout and weights, as they are now. Nothing may keep the weights after the decode.
    identity: a digest of the weights and of the code of the host's forward; see BoundNetwork.identity.
    host: the host's call.
    settings: the settings that apply to the call.
    """

    services: Services
    notice: Callable[[Entry], None]
    layout: Any
    weights: Weights
    identity: str
    host: HostDecode
    settings: Settings

    def in_type(self, dtype: torch.dtype, uncompared: bool = False) -> Decoded:
        """The image, computed in a dtype by the fastest backend that does not fail, and cast to the latent's dtype. The
        image may have NaN (Decoded.is_finite), and is not compared with the host's: the caller passes it to checked().

        uncompared: True if there is no host image to compare with: then only the reference backend is used. Raises
        Refusal if no backend can decode, and torch.cuda.OutOfMemoryError.
        """
        services = self.services
        found = services.devices.launched(
            self.settings, self._latent.device, self._latent.dtype, services.is_warm_up
        )
        devices = found.devices
        reason = found.reason
        if uncompared:
            devices = (services.devices.reference,)
            reason = ""
        latent = self._latent.to(dtype)
        use = KernelUse(self.layout.architecture, self.layout.kernel_users, dtype, latent.device)
        services.pressure.before_decode(self._small.to(dtype))
        return first_to_serve(
            (
                Candidate(partial(self._entry, dtype, device.name), partial(self._by_backend, device, use, latent))
                for device in devices
            ),
            reason,
        )

    def checked(self, made: Decoded) -> Decoded:
        """Returns `made`. At the first use of its shape, its image is compared with the host's own before, unless the
        history has such a comparison of this machine.

        Raises Refusal if the images differ by more than rounding explains, so that the host's image must be used;
        HostNotFinite if the host's image has NaN or infinite values; and HostError.
        """
        if made.entry.state is not State.COLD:
            return made
        with self.services.call_stats.checking(self._latent.device):
            self._compare(made)
        return made

    def _compare(self, made: Decoded) -> None:
        """Make a COLD entry PROVED: because of an earlier comparison in the history, or by comparing the image with the
        host's, and timing the host. If the images differ, the entry becomes FAILED. Raises the exceptions of checked();
        after HostNotFinite, the entry is still COLD."""
        entry = made.entry
        history = self.services.history
        if not history.recall(entry):
            # Outside of our_modes(), because the host's forward must run exactly as the host would run it. On a GPU,
            # the first run at a size loads kernels and picks algorithms, so it is not timed. On a CPU it is the only
            # run, to save time.
            device = self._latent.device
            host = self.host.image
            if not self._latent.is_cuda:
                host = partial(entry.host.time, device, self.host.image)
            # If ours was computed in another dtype than the host's, the two round differently.
            is_another = entry.key.dtype != self._latent.dtype
            allowed = rounding_limit(self._latent.dtype, device, entry.key.precision) if is_another else 0.0
            miss = why_it_differs(
                entry, made.image, host, times_host=False, allowed=allowed, same_type=True,
                spread=partial(self._spread, entry),
            )
            if miss == HOST_NOT_FINITE:
                raise HostNotFinite(miss)
            if miss is not None:
                raise Refusal(entry.mark_failed(miss))
            log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
            if self._latent.is_cuda:
                time_host(entry, device, self.host.decode)
            self.services.guard.attempt("remembering a check", lambda: history.keep_verdict(entry))
        entry.state = State.PROVED

    @property
    def _latent(self) -> Tensor:
        """The decoder's input; see HostDecode.latent."""
        return self.host.latent

    @property
    def _small(self) -> Tensor:
        """A tensor with the height and width of a latent, for the shape's key and the estimate of memory: the latent of
        a decode; of an image to encode, every n-th pixel, where n is Layout.reduction."""
        step = self.layout.reduction
        return self._latent[..., ::step, ::step]

    def _entry(self, dtype: torch.dtype, backend: str) -> Entry:
        """The entry of this decode in a dtype and with a backend, switched to the verdict for the present weights.
        Calls notice() with it."""
        layout = self.layout
        upcast = self.host.upcast_attention
        flags = flags_for(self.settings, dtype, self._latent.device, upcast)
        marks = (ENCODE,) if layout.encodes else ()
        key = ShapeKey.of_decode(layout.architecture, self._small, upcast, backend, dtype, flags, marks)
        entry = self.services.table.entry(key, layout.model_name).switch_to(self.identity)
        self.notice(entry)
        return entry

    def _by_backend(self, device: Device, use: KernelUse, latent: Tensor, entry: Entry, reason: str) -> Decoded:
        """The image by one backend, whose kernels are loaded first if necessary. reason: why a faster backend did not
        compute the image. Raises Refusal if the entry is FAILED, or if the kernels cannot be loaded."""
        if entry.state is State.FAILED:
            raise Refusal(entry.reason)
        device.prepare(use)
        return self._computed(device, entry, latent, reason)

    def _spread(self, entry: Entry) -> float:
        """How far rounding in the entry's dtype moves the image, as a relative error; see rounding.spread."""
        key = entry.key
        latent = self._latent.to(entry.key.dtype)
        weights = self._weights_in(key.dtype)

        def image(ops: Operators) -> Tensor:
            return self.services.decoders.output(self.layout, weights, ops, latent, key.upcast_attention)

        ops: Operators = self.services.devices.reference.operators()
        with on_card(latent.device), our_modes(latent.device, key.precision):
            return spread(image, ops, rounds_as(key.dtype, latent.device, key.precision), latent.device)

    def _weights_in(self, dtype: torch.dtype) -> Weights:
        """The weights in a dtype; the stored weights themselves if it is the latent's dtype. Otherwise each weight is
        cast when it is read, so that there is never a copy of all weights."""
        if dtype == self._latent.dtype:
            return self.weights
        return Operands(self.weights, [Cast(dtype, vectors=True)])

    def _computed(self, used: Device, entry: Entry, latent: Tensor, reason: str) -> Decoded:
        """The image by a backend (used) whose kernels are loaded, in the host's dtype. latent: in the dtype to compute
        in. reason: becomes Decoded.reason."""
        key = entry.key
        device = latent.device
        stored = self._latent.dtype
        output = partial(
            self.services.decoders.output, self.layout, self._weights_in(key.dtype), used.operators(), latent,
            key.upcast_attention, used.traits.channels_last,
        )
        # The first run at a size loads kernels and picks algorithms, so its time does not count.
        stopwatch = entry.own if entry.uses > 1 else Stopwatch()
        with on_card(device), our_modes(device):
            with applied(key.precision):
                image = stopwatch.time(device, lambda: output().contiguous())
            # Outside of applied(): other threads wait for torch's switches, and need not wait for the GPU as well.
            image = image.to(stored)
            return Decoded(image, entry, reason, is_finite(image))
