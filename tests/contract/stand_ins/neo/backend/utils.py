"""Functions that Neo's networks share: padding a latent to whole patches, and limiting overflown numbers."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fp16_fix(x: Tensor) -> Tensor:
    """Replaces numbers that have overflown in float16 by its largest number."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x


def pad_to_patch_size(img: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Pads the latent to whole patches, with values from the opposite edge."""
    for axis, patch in enumerate(patch_size, start=2):
        size = img.shape[axis]
        img = img.index_select(axis, torch.arange(-(-size // patch) * patch, device=img.device) % size)
    return img
