"""How Neo makes a latent as large as whole patches."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_to_patch_size(img: Tensor, patch_size: Sequence[int]) -> Tensor:
    """What is beyond an edge is the opposite one."""
    for axis, patch in enumerate(patch_size, start=2):
        size = img.shape[axis]
        img = img.index_select(axis, torch.arange(-(-size // patch) * patch, device=img.device) % size)
    return img
