"""Neo's library of kernels, as far as its Anima calls it."""
from __future__ import annotations

import torch
from torch import Tensor


def apply_rope_split_half(heads: Tensor, rotary: Tensor) -> Tensor:
    """Each plane is a number of the first half and one of the second."""
    turned = torch.complex(*heads.float().chunk(2, dim=-1)) * rotary
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)
