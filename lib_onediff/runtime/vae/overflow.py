"""Watch a decode for overflow: how large its hidden states become, and whether its image can be shown.

Everything is measured on the device and read once, at the end: nothing waits for the device on the way.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.affine import Affine
from ...core.leaves import Convolution
from ...core.operators import Operators

# What comes within this share of a type's largest number is about to overflow, or was cut off there.
NEAR_THE_LIMIT = 0.9
# An image's; a latent, as an encoder makes it, has others.
COLOURS = 3
# What was seen of a decode, as people read it after "its image" or "its activations".
NOT_FINITE, ONE_COLOUR, SATURATED = "not finite", "of one colour", "near the limit"


@dataclass(frozen=True)
class Finding:
    """What a decode looks like. saw: one of the above, or None where it is sound."""

    saw: str | None
    latent_is_finite: bool = True


class WatchedOperators:
    """Operators that take down how large the hidden states become that a convolution or an addition makes.

    An infinite or missing value between two of them would not stay hidden: norms and attention spread it.
    """

    def __init__(self, ops: Operators) -> None:
        self._ops = ops
        self.peaks: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        return self._watched(self._ops.convolution(image, affine, shape))

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        return self._watched(self._ops.residual_add(image, update, bias))

    def _watched(self, hidden_states: Tensor) -> Tensor:
        # One pass that only reads, and keeps NaN.
        self.peaks.append(torch.linalg.vector_norm(hidden_states, math.inf))
        return hidden_states


def look_at(image: Tensor, latent: Tensor, peaks: Sequence[Tensor] = ()) -> Finding:
    """What an image (batch, colours, h, w), or what an encoder made, and what led to it look like.

    Waits for the device, once.

    peaks: of WatchedOperators, in the type that was computed in.
    """
    colours = image.flatten(2)
    measured = [colours.amin(2).flatten(), colours.amax(2).flatten(), torch.linalg.vector_norm(latent, math.inf)[None]]
    if peaks:
        measured.append(torch.stack(list(peaks)))
    values = torch.cat([part.float() for part in measured]).tolist()
    count = image.shape[0] * image.shape[1]
    lowest, highest, (latent_peak, *seen) = values[:count], values[count:2 * count], values[2 * count:]
    finite_latent = math.isfinite(latent_peak)
    if not all(map(math.isfinite, (*lowest, *highest, *seen))):
        return Finding(NOT_FINITE, finite_latent)
    if has_one_colour(lowest, highest, image.shape[1]):
        return Finding(ONE_COLOUR, finite_latent)
    if peaks and max(seen) >= NEAR_THE_LIMIT * torch.finfo(peaks[0].dtype).max:
        return Finding(SATURATED, finite_latent)
    return Finding(None, finite_latent)


def has_one_colour(lowest: list[float], highest: list[float], colours: int) -> bool:
    """Whether an image of the batch does not vary at all; no decoder makes that of any latent: edges differ."""
    if colours != COLOURS:
        return False
    flat = [low == high for low, high in zip(lowest, highest, strict=True)]
    return any(all(flat[start:start + colours]) for start in range(0, len(flat), colours))


def described(saw: str, dtype: torch.dtype) -> str:
    """What was seen of a decode in a type, as a sentence says it of the VAE."""
    name = str(dtype).removeprefix("torch.")
    if saw == SATURATED:
        return f"comes near the largest number of {name}"
    return f"overflows in {name}" if saw == NOT_FINITE else f"makes an image {saw} in {name}"
