"""Functions that Neo's networks share: pad_to_patch_size for latents, and fp16_fix for overflows in float16."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fp16_fix(x: Tensor) -> Tensor:
    """Replaces infinities by the largest float16 number, and NaN by 0; other dtypes stay as they are."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x


def pad_to_patch_size(img: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Pads a latent to a multiple of the patch size in each dimension after the channels, by values from the opposite
    edge."""
    for axis, patch in enumerate(patch_size, start=2):
        size = img.shape[axis]
        img = img.index_select(axis, torch.arange(-(-size // patch) * patch, device=img.device) % size)
    return img
