"""Neo's library of kernels, as far as its networks call it."""
from __future__ import annotations

import torch
from torch import Tensor


def apply_rope_split_half(heads: Tensor, rotary: Tensor) -> Tensor:
    """Each plane is a number of the first half and one of the second."""
    turned = torch.complex(*heads.float().chunk(2, dim=-1)) * rotary
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


def apply_rope(query: Tensor, key: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Each plane is two numbers that lie beside each other."""
    return turned_pairs(query, rotary), turned_pairs(key, rotary)


def turned_pairs(heads: Tensor, rotary: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).to(heads.dtype)
