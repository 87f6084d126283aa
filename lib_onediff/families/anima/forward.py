"""Anima's forward pass, as pure functions of tensors against a set of operators.

The arithmetic is that of Cosmos-Predict2's transformer (NVIDIA 2025) as Forge Neo and diffusers have it. Only the
number of products is smaller: all modulations come from one GEMM and one batched one, and all projections that an
attention makes of the same tokens come from one GEMM.
"""
from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import LayerWeights, Weights
from ...core.operators import Activation, Modulation, Operators, Residual, Rotary
from ..rotary import image_positions, rotary_of
from ..transformer import TransformerLayers, blocks_read, through_blocks
from .call import AnimaCall
from .layout import AdaptiveBlock, AnimaLayout


def output(layout: AnimaLayout, weights: Weights, ops: Operators, call: AnimaCall) -> Tensor:
    """The network's output for a latent of any size, (batch, out channels, 1, height, width)."""
    height, width = call.latent.shape[-2:]
    dtype = weights[layout.patches.path].weight.dtype
    tokens, rows, columns = patches_of(layout, weights, ops, call.latent.to(dtype))
    computed = len(blocks_read(layout.blocks, call.cut))
    modulations, out_modulation = modulations_of(layout, weights, ops, call.timestep, dtype, computed)
    rotary = rotary_of(layout.axes, image_positions(rows, columns, tokens.device))
    context = call.context.to(dtype)
    layers = TransformerLayers(weights, ops, call.upcast_attention)

    def through(residual: Residual, index: int, block: AdaptiveBlock) -> Residual:
        return through_block(layers, block, residual, modulations[3 * index:3 * index + 3], context, rotary)

    # In float16 the residual overflows.
    residual = Residual(tokens.float() if dtype == torch.float16 else tokens)
    residual = through_blocks(ops, residual, layout.blocks, call.cut, through)
    _, normed = layers.norm(residual, layout.out_norm, layout.out, out_modulation)
    image = image_of(layout, layers.linear(normed, layout.out), rows, columns)
    return image[..., :height, :width].to(call.latent.dtype)


def through_block(
    layers: TransformerLayers, block: AdaptiveBlock, residual: Residual, modulations: Tensor, context: Tensor,
    rotary: Rotary,
) -> Residual:
    """The residual behind a block. modulations: see modulations_of, those of the block's three layers."""
    own = block.self_attention
    cross = block.cross_attention
    into = block.feed_forward_in
    out = block.feed_forward_out

    modulation, gate = modulation_and_gate(modulations[0])
    residual, normed = layers.norm(residual, block.norm, own.query_key_value, modulation)
    residual = layers.add(residual, layers.self_attention(own, normed, rotary), own.out, gate)

    modulation, gate = modulation_and_gate(modulations[1])
    residual, normed = layers.norm(residual, block.norm, cross.query, modulation)
    residual = layers.add(residual, layers.cross_attention(cross, normed, context), cross.out, gate)

    modulation, gate = modulation_and_gate(modulations[2])
    residual, normed = layers.norm(residual, block.norm, into, modulation)
    return layers.add(residual, layers.activated_linear(normed, into, Activation.GELU, out), out, gate)


def modulation_and_gate(vectors: Tensor) -> tuple[Modulation, Tensor]:
    """(batch, 3 * width) as the modulation before a layer, and the gate behind it."""
    shift, scale, gate = vectors.chunk(3, dim=-1)
    return Modulation(scale, shift), gate


def patches_of(
    layout: AnimaLayout, weights: Weights, ops: Operators, latent: Tensor
) -> tuple[Tensor, int, int]:
    """Tokens, (batch, rows * columns, width), and how many rows and columns of patches there are. A latent whose size
    is no multiple of a patch is continued by its opposite edge. Without a padding mask, every pixel belongs to the
    image."""
    patch = layout.patch
    batch = len(latent)
    height, width = latent.shape[-2:]
    channels = layout.patches.in_features // patch**2
    image = functional.pad(latent[:, :, 0], (0, -width % patch, 0, -height % patch), mode="circular")
    rows = image.shape[-2] // patch
    columns = image.shape[-1] // patch
    image = torch.cat([image, image.new_zeros(batch, channels - layout.in_channels, *image.shape[-2:])], dim=1)
    pieces = image.view(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return ops.linear(pieces.reshape(batch, rows * columns, -1), weights[layout.patches.path]), rows, columns


def image_of(layout: AnimaLayout, tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The output of the last layer as an image, (batch, out channels, 1, height, width)."""
    patch = layout.patch
    pieces = tokens.view(len(tokens), rows, columns, patch, patch, layout.out_channels).permute(0, 5, 1, 3, 2, 4)
    return pieces.reshape(len(tokens), layout.out_channels, 1, rows * patch, columns * patch)


def modulations_of(
    layout: AnimaLayout, weights: Weights, ops: Operators, timestep: Tensor, dtype: torch.dtype, blocks: int
) -> tuple[Tensor, Modulation]:
    """Shift, scale and gate of every layer of the first so many blocks, (layers, batch, 3 * width), and the output's
    modulation. The network gives scales relative to one."""
    time = layout.time
    width = layout.width
    layers = 3 * blocks
    every = 3 * len(layout.blocks)
    waves = ops.sinusoids(timestep, time).to(dtype)
    shared = ops.linear(ops.silu(ops.linear(waves, weights[time.first.path])), weights[time.second.path])
    embedding = ops.silu(ops.rms_norm(waves, weights[layout.time_norm.path], layout.time_norm))
    downs = weights[layout.downs.name]
    rank = len(downs.weight) // (every + 1)
    if layers == every:
        down, down_of_out = ops.linear(embedding, downs).split([every * rank, rank], dim=-1)
    else:
        down = ops.linear(embedding, rows_of(downs, 0, layers * rank))
        down_of_out = ops.linear(embedding, rows_of(downs, every * rank, rank))
    ups = weights[layout.ups.name]
    if layers != every:
        ups = rows_of(ups, 0, layers * len(ups.weight) // every)
    own = raised(down.unflatten(-1, (layers, rank)).transpose(0, 1), ups, ops) + shared
    last = ops.linear(down_of_out, weights[layout.out_up.path]) + shared[:, :2 * width]
    for found in (own, last):
        found[..., width:2 * width] += 1
    return own, Modulation(scale=last[:, width:], shift=last[:, :width])


def raised(down: Tensor, ups: LayerWeights, ops: Operators) -> Tensor:
    """(layers, batch, rank) -> (layers, batch, rows): each layer's product with its own rows of the weight."""
    if ups.weight.is_meta:
        rows = len(ups.weight) // len(down)
        each = [ops.linear(vectors, rows_of(ups, rows * layer, rows)) for layer, vectors in enumerate(down)]
        return torch.stack(each)
    product = torch.bmm(down, ups.weight.view(len(down), -1, down.shape[-1]).mT)
    low_rank = ups.low_rank
    if low_rank is None:
        return product
    rank = 0
    for index, (row, up) in enumerate(low_rank.ups):
        layer = row // product.shape[-1]
        part = low_rank.down[rank:rank + up.shape[1]]
        hidden = functional.linear(down[layer].to(part.dtype), part)
        product[layer] += low_rank.scaled(index, functional.linear(hidden, up))
        rank += up.shape[1]
    return product


def rows_of(layer: LayerWeights, first: int, count: int) -> LayerWeights:
    """So many rows of a layer's weight, with the LoRAs beside them, without bias."""
    low_bit = []
    for whole in layer.low_bit:
        scales = whole.scales if whole.scales.numel() == 1 else whole.scales.narrow(1, first, count)
        low_bit.append(whole._replace(values=whole.values.narrow(0, first, count), scales=scales))
    low_rank = None if layer.low_rank is None else layer.low_rank.of_rows(first, count)
    return LayerWeights(layer.weight.narrow(0, first, count), None, tuple(low_bit), low_rank)
