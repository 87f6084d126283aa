"""The functions of Neo's kernel library that its networks call."""
from __future__ import annotations

import torch
from torch import Tensor


def apply_rope_split_half(heads: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[width / 2 + i]) of each head by complex numbers."""
    turned = torch.complex(*heads.float().chunk(2, dim=-1)) * rotary
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


def apply_rope(query: Tensor, key: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (x[2 * i], x[2 * i + 1]) of each head by complex numbers."""
    return turned_pairs(query, rotary), turned_pairs(key, rotary)


def turned_pairs(heads: Tensor, rotary: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).to(heads.dtype)
