"""Code of Neo's Flux that its other networks use: sinusoids, and rotary embeddings of several axes."""
from __future__ import annotations

import math

import torch
from comfy_kitchen import apply_rope
from torch import Tensor, nn

__all__ = ["EmbedND", "apply_rope", "timestep_embedding"]


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """The sinusoidal embedding of noise levels between 1 and 0: (batch,) -> (batch, dim)."""
    place = torch.arange(dim // 2, dtype=torch.float32, device=t.device) / (dim // 2)
    angles = (1000.0 * t)[:, None].float() * torch.exp(-math.log(10000.0) * place)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(t)


class EmbedND(nn.Module):
    def __init__(self, dim: int, theta: int, axes_dim: list[int]) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.axes_dim = axes_dim

    def forward(self, ids: Tensor) -> Tensor:
        """The rotary embedding of positions, as complex numbers of absolute value 1: (batch, tokens, axes) -> (batch,
        1, tokens, dim / 2)."""
        angles = []
        for axis, width in enumerate(self.axes_dim):
            exponents = torch.arange(0, width, 2, dtype=torch.float64, device=ids.device) / width
            angles.append(ids[..., axis, None].double() * self.theta**-exponents)
        together = torch.cat(angles, dim=-1)
        return torch.polar(torch.ones_like(together), together).to(torch.complex64)[:, None]
