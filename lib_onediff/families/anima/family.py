"""Anima as a family."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...core.affine import Weights
from ...core.call import Call
from ...core.family import AttentionShapes
from ...core.operators import Operators
from . import forward
from .layout import AnimaLayout, refuse_call
from .read_forge import is_anima, read_anima

# To how many tokens the host fills shorter prompts up.
FEWEST_TOKENS = 512


class Animas:
    """See core.family.Family."""

    # The timestep is the share of noise.
    layout, first_timestep = AnimaLayout, 1.0

    def knows(self, module: nn.Module) -> bool:
        return is_anima(module)

    def read(self, module: nn.Module) -> AnimaLayout:
        return read_anima(module)

    def refuse_call(self, layout: AnimaLayout, call: Call) -> None:
        refuse_call(layout, call)

    def example(
        self, layout: AnimaLayout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> Call:
        latent = noise(batch, layout.in_channels, 1, *size)
        context = noise(batch, max(tokens, FEWEST_TOKENS), layout.context_width)
        return Call(latent, torch.full((batch,), self.first_timestep / 2, device=latent.device), context)

    def output(self, layout: AnimaLayout, weights: Weights, ops: Operators, call: Call) -> Tensor:
        return forward.forward(layout, weights, ops, call)

    def units(self, layout: AnimaLayout, call: Call) -> list[tuple[str, ...]]:
        return layout.units()

    def deepest(self, layout: AnimaLayout) -> int:
        return 0

    def attentions(self, layout: AnimaLayout, call: Call) -> list[AttentionShapes]:
        batch, (height, width) = call.latent.shape[0], call.latent.shape[-2:]
        pixels, heads = -(-height // layout.patch) * -(-width // layout.patch), layout.blocks[0].self_attention.heads
        own, other = ((batch, heads, count, layout.width // heads) for count in (pixels, call.context.shape[1]))
        return [(own, own), (own, other)]
