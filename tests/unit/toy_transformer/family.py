"""The family of toy transformers: small networks for tests, which no WebUI has."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lib_onediff.core.family import AttentionShapes, UsualSizes
from lib_onediff.core.layer_weights import Weights
from lib_onediff.core.leaves import names_of
from lib_onediff.core.operators import Operators
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.transformer import SCHEDULE, blocks_read, deepest_cut

from . import forward
from .call import ToyTransformerCall
from .layout import ToyTransformerLayout, is_toy_transformer, read_toy_transformer
from .network import PATCH


class ToyTransformers:
    """See core.family.Family."""

    layout = ToyTransformerLayout
    # The timestep is the share of noise.
    first_timestep = 1.0
    schedule = SCHEDULE
    readers = ((is_toy_transformer, read_toy_transformer),)
    usual_sizes = (UsualSizes("Toy transformer", ("Toy transformer",), ("64x64",)),)

    def refuse_call(self, layout: ToyTransformerLayout, call: ToyTransformerCall) -> None:
        latent = call.latent
        context = call.context
        if latent.dim() != 4 or latent.shape[1] != layout.in_channels or any(side % PATCH for side in latent.shape[2:]):
            raise Refusal(f"the latent is {tuple(latent.shape)}, but a toy takes {layout.in_channels} channels")
        if context.dim() != 3 or context.shape[2] != layout.context_width:
            raise Refusal(f"the prompt is {tuple(context.shape)}, but a toy takes a width of {layout.context_width}")
        if call.mask is not None and call.mask.shape != context.shape[:2]:
            raise Refusal(f"the mask is {tuple(call.mask.shape)}, but the prompt is {tuple(context.shape)}")

    def example(
        self, layout: ToyTransformerLayout, size: tuple[int, int], batch: int, tokens: int,
        noise: Callable[..., Tensor],
    ) -> ToyTransformerCall:
        latent = noise(batch, layout.in_channels, *size)
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=latent.device)
        return ToyTransformerCall(latent, timestep, noise(batch, tokens, layout.context_width), mask)

    def output(
        self, layout: ToyTransformerLayout, weights: Weights, ops: Operators, call: ToyTransformerCall
    ) -> Tensor:
        return forward.output(layout, weights, ops, call)

    def units(self, layout: ToyTransformerLayout, call: ToyTransformerCall) -> list[tuple[str, ...]]:
        first = names_of((layout.patches, layout.time))
        blocks = blocks_read(layout.blocks, call.cut)
        return [first, *map(names_of, blocks), names_of((layout.out_norm, layout.out))]

    def deepest(self, layout: ToyTransformerLayout) -> int:
        return deepest_cut(layout.blocks)

    def attentions(self, layout: ToyTransformerLayout, call: ToyTransformerCall) -> list[AttentionShapes]:
        height, width = call.latent.shape[-2:]
        attention = layout.blocks[0].self_attention
        head_width = attention.out.in_features // attention.heads
        pixels = len(call.latent), attention.heads, height * width // PATCH**2, head_width
        prompt = len(call.latent), attention.heads, call.tokens, head_width
        return [AttentionShapes(pixels, pixels), AttentionShapes(pixels, prompt)]
