"""What a decode must be to be ours, and what our image must be to be shown."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...core.precision import autocast_dtype
from ...core.table import Entry, State
from ..services import TRAINING
from ..verify import blame, relative_error, rounding_limit, time_host
from .bound import BoundDecoder
from .call_stats import HOST
from .overflow import NOT_FINITE

log = logging.getLogger("onediff")
HostDecode = Callable[[], Tensor]


@dataclass
class Outcome:
    """What our attempt at a decode came to. image is None where the host is still to decode.

    exhausted: no type is left in which the image could be shown. host_saw: why the host's own image cannot be.
    """

    image: Tensor | None
    route: str
    reason: str = ""
    entry: Entry | None = None
    exhausted: bool = False
    host_saw: str | None = None


def check(ours: Outcome, host: HostDecode) -> Outcome:
    """Compare our image with the host's own, which takes its place where the two differ by more than rounding.

    A host's image that cannot be shown proves nothing, and ours can.
    """
    entry, image = ours.entry, ours.image
    assert entry is not None and image is not None, "only an image of ours is checked"
    # A GPU loads kernels and picks algorithms in the first run at a size. On a CPU there is no other, and no ratio.
    on_gpu = image.device.type == "cuda"
    expected = host() if on_gpu else entry.host.time(image.device, host)
    if not bool(torch.isfinite(expected).all()):
        return replace(ours, reason=f"the VAE's own image is {NOT_FINITE}", host_saw=NOT_FINITE)
    reason = disagreement(entry, image, expected)
    if reason is not None:
        return Outcome(expected, HOST, blame(entry, reason), entry)
    log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
    entry.state = State.PROVED
    if on_gpu:
        time_host(entry, image.device, host)
    return ours


def disagreement(entry: Entry, image: Tensor, expected: Tensor) -> str | None:
    """How our image differs from the host's by more than rounding, in one line; None if it does not."""
    if (image.shape, image.dtype) != (expected.shape, expected.dtype):
        return (
            f"the VAE's own image is {tuple(expected.shape)} in {short_name(expected.dtype)}, "
            f"ours is {tuple(image.shape)} in {short_name(image.dtype)}"
        )
    entry.relative_error = relative_error(image, expected)
    # Ours may have been computed in another type than the host's.
    key = entry.key
    limit = max(rounding_limit(dtype, image.device, key.precision) for dtype in (key.dtype, key.latent_dtype))
    if entry.relative_error <= limit:
        return None
    return f"it differs from the VAE's own image by {entry.relative_error:.1e} (rounding explains {limit:.0e})"


def why_not_now(latent: Tensor) -> str | None:
    """What surrounds a decode that our forward takes no part in, or None."""
    if torch.is_grad_enabled():
        return TRAINING
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "a forward hook is set on all modules"
    autocast = autocast_dtype(latent.device.type)
    if autocast not in (None, latent.dtype):
        return f"autocast to {short_name(autocast)} is on, but the latent is {short_name(latent.dtype)}"
    return None


def misfit(bound: BoundDecoder, latent: Tensor) -> str | None:
    """Why a latent does not fit the decoder, or None."""
    channels, binding = bound.layout.in_channels, bound.binding
    if latent.dim() != 4 or latent.shape[1] != channels:
        return f"the latent is {tuple(latent.shape)}, but this VAE takes {channels} channels"
    if latent.device != binding.device:
        return f"the VAE's weights are on {binding.device}, the latent is on {latent.device}"
    if latent.dtype != binding.dtype:
        return f"the VAE's weights are {short_name(binding.dtype)}, the latent is {short_name(latent.dtype)}"
    return None


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
