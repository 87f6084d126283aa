"""Anima as a family, and its forward pass, as pure functions of tensors against a set of operators.

The arithmetic is that of Cosmos-Predict2's transformer (NVIDIA 2025) as Forge Neo and diffusers have it. What differs
is only how many products it takes: what all places make of the timestep is one GEMM and one batched one, and so is what
an attention projects of the same tokens.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.call import Call
from ...core.family import AttentionShapes, UsualSizes
from ...core.layer_weights import LayerWeights, Weights
from ...core.leaves import CrossAttention, SelfAttention, names_of
from ...core.operators import Operators, Residual, Rotary, Rows
from ...core.refusal import Refusal
from .layout import AdaptiveBlock, AnimaLayout, Positions, is_anima, is_cosmos, read_anima, read_cosmos

# To how many tokens the host fills shorter prompts up.
FEWEST_TOKENS = 512


class Animas:
    """See core.family.Family."""

    # The timestep is the share of noise.
    layout, first_timestep = AnimaLayout, 1.0
    readers = (is_anima, read_anima), (is_cosmos, read_cosmos)
    usual_sizes = (UsualSizes("Anima", ("Anima",), (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x1536",
    )),)

    def refuse_call(self, layout: AnimaLayout, call: Call) -> None:
        latent, context = call.latent, call.context
        if latent.dim() != 5 or latent.shape[1:3] != (layout.in_channels, 1):
            taken = f"{layout.in_channels} channels, one image"
            raise Refusal(f"the latent is {tuple(latent.shape)}, but {layout.model_name} takes {taken}")
        if context.dim() != 3 or context.shape[-1] != layout.context_width:
            taken = f"{layout.context_width} values a token"
            raise Refusal(f"the prompt is {tuple(context.shape)}, but {layout.model_name} takes {taken}")
        if context.shape[0] != latent.shape[0] or call.timestep.shape != latent.shape[:1]:
            raise Refusal("latent, timestep and prompt are of different batches")
        if call.y is not None or call.control is not None or call.image_prompts:
            raise Refusal(f"{layout.model_name} takes no label, ControlNet or image prompt")

    def example(
        self, layout: AnimaLayout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> Call:
        latent = noise(batch, layout.in_channels, 1, *size)
        context = noise(batch, max(tokens, FEWEST_TOKENS), layout.context_width)
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        return Call(latent, timestep, context)

    def output(self, layout: AnimaLayout, weights: Weights, ops: Operators, call: Call) -> Tensor:
        """For latents of any size."""
        height, width = call.latent.shape[-2:]
        dtype = weights[layout.patches.path].weight.dtype
        tokens, rows, columns = patches_of(layout, weights, ops, call.latent.to(dtype))
        modulations, (shift, factor) = modulations_of(layout, weights, ops, call.timestep, dtype)
        rotary = rotary_of(layout.positions, rows, columns, tokens.device)
        blocks = Blocks(weights, ops, call.context.to(dtype), rotary, call.upcast_attention)
        # In float16 a residual overflows.
        residual = Residual(tokens.float() if dtype == torch.float16 else tokens)
        for number, block in enumerate(layout.blocks):
            residual = blocks.through(block, residual, modulations[3 * number:3 * number + 3])
        out = weights[layout.out.path]
        _, normed = ops.layer_norm(residual, LayerWeights(factor, shift), layout.out_norm, out)
        return image_of(layout, ops.linear(normed, out), rows, columns)[..., :height, :width].to(call.latent.dtype)

    def units(self, layout: AnimaLayout, call: Call) -> list[tuple[str, ...]]:
        apart = ("blocks", "out")
        first = names_of(tuple(getattr(layout, one.name) for one in fields(layout) if one.name not in apart))
        return [first, *(names_of(block) for block in layout.blocks), names_of(layout.out)]

    def deepest(self, layout: AnimaLayout) -> int:
        return 0

    def attentions(self, layout: AnimaLayout, call: Call) -> list[AttentionShapes]:
        batch, (height, width) = call.latent.shape[0], call.latent.shape[-2:]
        pixels, heads = -(-height // layout.patch) * -(-width // layout.patch), layout.blocks[0].self_attention.heads
        own, other = ((batch, heads, count, layout.width // heads) for count in (pixels, call.context.shape[1]))
        return [(own, own), (own, other)]


def patches_of(
    layout: AnimaLayout, weights: Weights, ops: Operators, latent: Tensor
) -> tuple[Tensor, int, int]:
    """Tokens, (batch, rows * columns, width), and how many rows and columns of patches there are. What is beyond the
    edges is the opposite edge; a padding mask that the latent does not bring says of nothing that it is none of the
    image."""
    patch = layout.patch
    batch, height, width = len(latent), *latent.shape[-2:]
    channels = layout.patches.in_features // patch**2
    image = functional.pad(latent[:, :, 0], (0, -width % patch, 0, -height % patch), mode="circular")
    rows, columns = image.shape[-2] // patch, image.shape[-1] // patch
    image = torch.cat([image, image.new_zeros(batch, channels - layout.in_channels, *image.shape[-2:])], dim=1)
    pieces = image.view(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return ops.linear(pieces.reshape(batch, rows * columns, -1), weights[layout.patches.path]), rows, columns


def image_of(layout: AnimaLayout, tokens: Tensor, rows: int, columns: int) -> Tensor:
    """(batch, out channels, 1, height, width) of what the last layer gives."""
    patch = layout.patch
    pieces = tokens.view(len(tokens), rows, columns, patch, patch, layout.out_channels).permute(0, 5, 1, 3, 2, 4)
    return pieces.reshape(len(tokens), layout.out_channels, 1, rows * patch, columns * patch)


def modulations_of(
    layout: AnimaLayout, weights: Weights, ops: Operators, timestep: Tensor, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Shift, factor and gate of every layer, (layers, batch, 3 * width), and shift and factor, (batch, width) each, of
    the output. The network gives factors less one."""
    time, width, layers = layout.time, layout.width, 3 * len(layout.blocks)
    waves = ops.sinusoids(timestep, time).to(dtype)
    shared = ops.linear(ops.silu(ops.linear(waves, weights[time.first.path])), weights[time.second.path])
    embedding = ops.silu(ops.rms_norm(waves, weights[layout.time_norm.path], layout.time_norm))
    down = ops.linear(embedding, weights[layout.downs.name]).view(len(waves), layers + 1, -1).transpose(0, 1)
    own = raised(down[:layers], weights[layout.ups.name]) + shared
    last = ops.linear(down[layers], weights[layout.out_up.path]) + shared[:, :2 * width]
    for found in (own, last):
        found[..., width:2 * width] += 1
    return own, (last[:, :width], last[:, width:])


def raised(down: Tensor, ups: LayerWeights) -> Tensor:
    """(layers, batch, rank), each by its own rows of the weight: (layers, batch, rows)."""
    product, rank = torch.bmm(down, ups.weight.view(len(down), -1, down.shape[-1]).mT), 0
    low_rank = ups.low_rank
    if low_rank is None:
        return product
    for index, (row, up) in enumerate(low_rank.ups):
        layer, part = row // product.shape[-1], low_rank.down[rank:rank + up.shape[1]]
        hidden = functional.linear(down[layer].to(part.dtype), part)
        product[layer] += low_rank.scaled(index, functional.linear(hidden, up))
        rank += up.shape[1]
    return product


def rotary_of(positions: Positions, rows: int, columns: int, device: torch.device) -> Rotary:
    """Of rows * columns tokens."""
    angles = []
    for count, width, theta in zip((1, rows, columns), positions.widths, positions.thetas, strict=True):
        exponents = (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width).to(positions.rounded)
        frequencies = 1.0 / theta ** exponents.to(positions.frequencies)
        angles.append(torch.outer(torch.arange(count, dtype=torch.float32, device=device), frequencies))
    time, down, across = angles
    together = torch.cat([
        time[:, None].expand(rows, columns, -1), down[:, None].expand(-1, columns, -1),
        across[None].expand(rows, -1, -1),
    ], dim=-1).flatten(0, 1)
    return together.cos(), together.sin()


class Blocks:
    """What all blocks of a call share. context: the prompt, (batch, tokens, width)."""

    def __init__(
        self, weights: Weights, ops: Operators, context: Tensor, rotary: Rotary, upcast_attention: bool
    ) -> None:
        self._weights, self._ops = weights, ops
        self._context, self._rotary, self._upcast = context, rotary, upcast_attention

    def through(self, block: AdaptiveBlock, residual: Residual, modulations: Tensor) -> Residual:
        """The residual behind a block. modulations: (3, batch, 3 * width)."""
        weights, ops, own, cross = self._weights, self._ops, block.self_attention, block.cross_attention
        into, out = weights[block.feed_forward_in.path], weights[block.feed_forward_out.path]
        at_self, at_cross, at_feed_forward = modulations
        residual, normed = self._normed(block, residual, at_self, weights[own.query_key_value.name])
        attended = self._self_attention(own, normed)
        residual = ops.add_linear(residual, attended, weights[own.out.path], gate_of(at_self))
        residual, normed = self._normed(block, residual, at_cross, weights[cross.query.path])
        attended = self._cross_attention(cross, normed)
        residual = ops.add_linear(residual, attended, weights[cross.out.path], gate_of(at_cross))
        residual, normed = self._normed(block, residual, at_feed_forward, into)
        return ops.add_linear(residual, ops.gelu_linear(normed, into, out), out, gate_of(at_feed_forward))

    def _normed(
        self, block: AdaptiveBlock, residual: Residual, modulation: Tensor, reader: LayerWeights
    ) -> tuple[Residual, Rows]:
        shift, factor, _ = modulation.chunk(3, dim=-1)
        return self._ops.layer_norm(residual, LayerWeights(factor, shift), block.norm, reader)

    def _self_attention(self, own: SelfAttention, normed: Rows) -> Tensor:
        weights, ops = self._weights, self._ops
        norms = [(weights[norm.path], norm) for norm in own.norms]
        projected = ops.linear(normed, weights[own.query_key_value.name])
        query, key, value = ops.normed_heads(projected, own.heads, (*norms, None), self._rotary)
        return ops.attention(query, key, value, self._upcast).transpose(1, 2).flatten(2)

    def _cross_attention(self, own: CrossAttention, normed: Rows) -> Tensor:
        weights, ops = self._weights, self._ops
        for_query, for_key = ((weights[norm.path], norm) for norm in own.norms)
        [query] = ops.normed_heads(ops.linear(normed, weights[own.query.path]), own.heads, (for_query,), None)
        projected = ops.linear(self._context, weights[own.key_value.name])
        key, value = ops.normed_heads(projected, own.heads, (for_key, None), None)
        return ops.attention(query, key, value, self._upcast).transpose(1, 2).flatten(2)


def gate_of(modulation: Tensor) -> Tensor:
    return modulation.chunk(3, dim=-1)[2]
