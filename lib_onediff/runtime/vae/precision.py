"""In which type a VAE is decoded: the user's choice, its weights in that type, and what was learned of each VAE."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...core.affine import Affine, Weights
from ...core.tuning_cache import TuningCache
from ...weights.contents import digest_of_values
from .overflow import NOT_FINITE, ONE_COLOUR, SATURATED

AUTO = "auto"
NAMED: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SLOW_ON_CPU = frozenset({"fp16"})
# Where a VAE overflows: in a type, or
BY_THE_HOST = "as the host decodes it"


class KnownVaes:
    """What was seen of a VAE is remembered by a digest of its weights, on this machine and for later processes."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache

    def saw(self, digest: str, where: torch.dtype | str) -> str | None:
        """What was seen of a VAE in this type, or BY_THE_HOST; None if nothing was."""
        found = self._tuning_cache.get(verdict_name(digest, where))
        # It may come from a store that anybody has written.
        return found if found in (NOT_FINITE, ONE_COLOUR, SATURATED) else None

    def remember(self, digest: str, where: torch.dtype | str, saw: str) -> None:
        self._tuning_cache.set(verdict_name(digest, where), saw)


def verdict_name(digest: str, where: torch.dtype | str) -> str:
    return f"VAE {digest}, {str(where).removeprefix('torch.')}"


def digest_of(architecture: str, weights: Weights) -> str:
    """What tells a VAE from every other of its architecture: a value of each of a layer's channels, and every bias.

    Copies some 50 KB from the device and waits for it: about a millisecond.
    """
    some = [first_of_each(affine.weight) for affine in weights.values()]
    some += [affine.bias for affine in weights.values() if affine.bias is not None]
    return digest_of_values(architecture, some)


def first_of_each(weight: Tensor) -> Tensor:
    """(out, ...) -> (out,): the first value of every output channel."""
    first: tuple[slice | int, ...] = (slice(None), *(0,) * (weight.dim() - 1))
    return weight[first]


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
