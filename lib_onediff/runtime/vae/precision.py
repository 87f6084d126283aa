"""In which type a VAE is decoded: what the user chooses, when a decode overflows, and what is remembered of each VAE.

Overflow is measured on the device and read once, at the end: nothing waits for the device on the way.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.affine import Affine, Weights
from ...core.leaves import Convolution
from ...core.operators import Operators
from ...core.tuning_cache import TuningCache
from ...weights.contents import digest_of_values

AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
# What comes within this share of a type's largest number is about to overflow, or was cut off there.
NEAR_THE_LIMIT = 0.9
# The channels of an image; a latent, as an encoder makes it, has others.
COLOURS = 3
# What was seen of a decode, as people read it after "its image" or "its activations".
NOT_FINITE, ONE_COLOUR, SATURATED = "not finite", "of one colour", "near the limit"
# Where a VAE overflows: in a type, or
BY_THE_HOST = "as the host decodes it"


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CastWeights(Mapping[str, Affine]):
    """Every layer's tensors in another type, cast when they are asked for: there is never a whole second VAE."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, path: str) -> Affine:
        weight, bias = self._weights[path][:2]
        return Affine(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


# --- what is seen of a decode -----------------------------------------------------------------------------------------


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


def look_at(image: Tensor, peaks: Sequence[Tensor] = ()) -> str | None:
    """What is wrong with an image (batch, colours, h, w), or with what an encoder made: NOT_FINITE, ONE_COLOUR or
    SATURATED; None where it is sound. Waits for the device, once.

    peaks: of WatchedOperators, in the type that was computed in.
    """
    lowest, highest = (extreme(image.flatten(2), 2) for extreme in (torch.amin, torch.amax))
    # No decoder makes an image that does not vary at all, of any latent: edges differ.
    flat = (lowest == highest).all(1).any()
    measured = [flat, lowest.amin(), highest.amax(), *peaks]
    is_flat, *values = torch.stack([one.float() for one in measured]).tolist()
    if not all(map(math.isfinite, values)):
        return NOT_FINITE
    if is_flat and image.shape[1] == COLOURS:
        return ONE_COLOUR
    if peaks and max(values[2:]) >= NEAR_THE_LIMIT * torch.finfo(peaks[0].dtype).max:
        return SATURATED
    return None


def described(saw: str, dtype: torch.dtype) -> str:
    """What was seen of a decode in a type, as a sentence says it of the VAE."""
    name = short_name(dtype)
    if saw == SATURATED:
        return f"comes near the largest number of {name}"
    return f"overflows in {name}" if saw == NOT_FINITE else f"makes an image {saw} in {name}"


# --- what is remembered of a VAE --------------------------------------------------------------------------------------


class KnownVae:
    """What was seen of a VAE is remembered by a digest of its weights, on this machine and for later processes.

    digest: tells it from every other of its architecture by a value of each of a layer's channels, and every bias. It
    copies some 50 KB from the device and waits for it: about a millisecond.
    """

    def __init__(self, tuning_cache: TuningCache, architecture: str, weights: Weights) -> None:
        self._tuning_cache = tuning_cache
        some = [first_of_each_row(affine.weight) for affine in weights.values()]
        some += [affine.bias for affine in weights.values() if affine.bias is not None]
        self.digest = digest_of_values(architecture, some)

    def saw(self, where: torch.dtype | str) -> str | None:
        """What was seen of it in this type, or BY_THE_HOST; None if nothing was."""
        found = self._tuning_cache.get(self._name(where))
        # It may come from a store that anybody has written.
        return found if found in (NOT_FINITE, ONE_COLOUR, SATURATED) else None

    def remember(self, where: torch.dtype | str, saw: str) -> None:
        self._tuning_cache.set(self._name(where), saw)

    def _name(self, where: torch.dtype | str) -> str:
        return f"VAE {self.digest}, {str(where).removeprefix('torch.')}"


def first_of_each_row(weight: Tensor) -> Tensor:
    """(out, ...) -> (out,): a view, however the weight lies in memory."""
    while weight.dim() > 1:
        weight = weight.select(-1, 0)
    return weight
