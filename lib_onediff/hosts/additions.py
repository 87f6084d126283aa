"""What users put on a UNet that our forward computes itself, in place of functions of a host or its extensions."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..core.additions import FreeU, ImagePrompt, PerturbedAttention, Shrink


class Additions(NamedTuple):
    """See UNetCall. stand_for: in place of what our forward computes these: lists of functions, classes of processors.
    """

    image_prompts: tuple[ImagePrompt, ...] = ()
    freeu: FreeU | None = None
    perturbed: PerturbedAttention | None = None
    shrink: Shrink | None = None
    stand_for: frozenset[Any] = frozenset()


NO_ADDITIONS = Additions()


@lru_cache(maxsize=8)
def freeu_of(factors: tuple[tuple[float, float] | None, ...], follows_mean: bool, device: torch.device) -> FreeU:
    """FreeU with these factors of the backbone and of the skip at each output stage: the same tensor for every call."""
    with torch.inference_mode(False):
        values = torch.tensor([pair or (1.0, 1.0) for pair in factors], dtype=torch.float32, device=device)
    return FreeU(values, frozenset(index for index, pair in enumerate(factors) if pair is not None), follows_mean)
