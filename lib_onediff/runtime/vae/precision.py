"""In which type a VAE is decoded: the user's choice, what is seen where it overflows, and what is remembered of it."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...core.affine import Affine, Weights
from ...core.tuning_cache import TuningCache
from ...weights.contents import digest_of_values

AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
# The channels of an image; a latent, as an encoder makes it, has others.
COLOURS = 3
# What was seen of a decode, as people read it after "its image is".
NOT_FINITE = "not finite"


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


def is_finite(image: Tensor) -> bool:
    """Whether an image (batch, colours, h, w), or what an encoder made, has no NaN and nothing infinite. Waits for the
    device.

    What overflows on the way does not stay hidden: norms and attention spread what is infinite or missing.
    """
    return bool(torch.isfinite(image).all())


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

    def overflows(self, dtype: torch.dtype) -> bool:
        """Whether it was seen to, in this type."""
        return bool(self._tuning_cache.get(self._name(dtype)) == NOT_FINITE)

    def note_overflow(self, dtype: torch.dtype) -> None:
        self._tuning_cache.set(self._name(dtype), NOT_FINITE)

    def _name(self, dtype: torch.dtype) -> str:
        return f"VAE {self.digest}, {short_name(dtype)}"


def first_of_each_row(weight: Tensor) -> Tensor:
    """(out, ...) -> (out,): a view, however the weight lies in memory."""
    while weight.dim() > 1:
        weight = weight.select(-1, 0)
    return weight
