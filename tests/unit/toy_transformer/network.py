"""A host's network for tests: a small diffusion transformer with a prompt and its mask."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = 4
PATCH = 2
WIDTH = 32
HEADS = 2
CONTEXT_WIDTH = 16
WAVES = 8


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.norm3 = nn.LayerNorm(WIDTH)
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.to_k = nn.Linear(WIDTH, WIDTH)
        self.to_v = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.Linear(WIDTH, WIDTH)
        self.cross_q = nn.Linear(WIDTH, WIDTH)
        self.cross_out = nn.Linear(WIDTH, WIDTH)
        self.cross_k = nn.Linear(CONTEXT_WIDTH, WIDTH)
        self.cross_v = nn.Linear(CONTEXT_WIDTH, WIDTH)
        self.into = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm1(tokens)
        tokens = tokens + self.to_out(attend(self.to_q(normed), self.to_k(normed), self.to_v(normed), None))
        query = self.cross_q(self.norm2(tokens))
        tokens = tokens + self.cross_out(attend(query, self.cross_k(context), self.cross_v(context), mask))
        return tokens + self.out(functional.gelu(self.into(self.norm3(tokens))))


class ToyTransformer(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(CHANNELS * PATCH**2, WIDTH)
        self.time_in = nn.Linear(WAVES, WIDTH)
        self.time_out = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CHANNELS * PATCH**2)

    def forward(self, latent: Tensor, timestep: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: (batch, tokens of the prompt), True where a token belongs to the prompt."""
        rows, columns = (side // PATCH for side in latent.shape[-2:])
        tokens = self.patches(functional.pixel_unshuffle(latent, PATCH).flatten(2).transpose(1, 2))
        exponents = -math.log(10000) * torch.arange(WAVES // 2, device=latent.device) / (WAVES // 2)
        angles = timestep[:, None].float() * exponents.exp() * 1000
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(latent.dtype)
        tokens = tokens + self.time_out(functional.silu(self.time_in(waves)))[:, None]
        for block in self.blocks:
            tokens = block(tokens, context, None if mask is None else mask[:, None, None])
        image = self.out(self.norm(tokens)).transpose(1, 2).unflatten(2, (rows, columns))
        return functional.pixel_shuffle(image, PATCH)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = (one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in (query, key, value))
    return functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
