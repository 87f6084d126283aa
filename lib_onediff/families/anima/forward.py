"""Anima's forward pass: functions of tensors, over the operators of core.operators.

The arithmetic is that of Cosmos-Predict2's transformer (NVIDIA 2025), as Forge Neo and diffusers compute it, in fewer
products: all modulations come from one GEMM and one batched GEMM, and the projections that an attention makes of the
same tokens from one GEMM.
"""
from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import LayerWeights, Weights
from ...core.operators import Activation, Modulation, Operators, Residual, Rotary
from ..rotary import image_positions, rotary_of
from ..transformer import TransformerLayers, blocks_read, first_residual, padded_to_patches, through_blocks
from .call import AnimaCall
from .layout import AdaptiveBlock, AnimaLayout


def output(layout: AnimaLayout, weights: Weights, ops: Operators, call: AnimaCall) -> Tensor:
    """The network's output, (batch, out channels, 1, height, width) in the latent's dtype. The latent may have any
    height and width: it is padded to whole patches, and the output is cropped. call.cut: see through_blocks."""
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    height, width = call.latent.shape[-2:]
    tokens, rows, columns = patches_of(layers, layout, call.latent.to(dtype))
    computed = len(blocks_read(layout.blocks, call.cut))
    modulations, out_modulation = modulations_of(layers, layout, call.timestep, dtype, computed)
    rotary = rotary_of(layout.axes, image_positions(rows, columns, tokens.device))
    context = call.context.to(dtype)

    def through(residual: Residual, index: int, block: AdaptiveBlock) -> Residual:
        return through_block(layers, block, residual, modulations[3 * index:3 * index + 3], context, rotary)

    residual = through_blocks(ops, first_residual(tokens), layout.blocks, call.cut, through)
    _, normed = layers.norm(residual, layout.out_norm, layout.out, out_modulation)
    image = image_of(layout, layers.linear(normed, layout.out), rows, columns)
    return image[..., :height, :width].to(call.latent.dtype)


def through_block(
    layers: TransformerLayers, block: AdaptiveBlock, residual: Residual, modulations: Tensor, context: Tensor,
    rotary: Rotary,
) -> Residual:
    """The residual after self attention, cross attention and feed-forward layer of one block. The given residual must
    not be used afterwards.

    modulations: (3, batch, 3 * width), the shift, scale and gate of the block's self attention, of its cross attention
        and of its feed-forward layer, in this order.
    context: (batch, tokens, context width) in the weights' dtype. rotary: of the image's tokens.
    """
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
    """The modulation of the norm before a layer, and the gate (batch, width) of its output. vectors: the layer's shift,
    scale and gate, side by side, (batch, 3 * width). Returns views."""
    shift, scale, gate = vectors.chunk(3, dim=-1)
    return Modulation(scale, shift), gate


def patches_of(layers: TransformerLayers, layout: AnimaLayout, latent: Tensor) -> tuple[Tensor, int, int]:
    """The latent's patches, projected to tokens (batch, rows * columns, width), and the numbers of rows and columns of
    patches. Sides that are no multiple of the patch are padded.

    latent: (batch, in channels, 1, height, width). A network may take more channels than the latent has: they are the
        padding mask, which is zero where a pixel belongs to the image. Every pixel does here, so zeros are appended.
    """
    patch = layout.patch
    batch = len(latent)
    image = padded_to_patches(latent[:, :, 0], patch)
    rows = image.shape[-2] // patch
    columns = image.shape[-1] // patch
    channels = layout.patches.in_features // patch**2
    image = torch.cat([image, image.new_zeros(batch, channels - layout.in_channels, *image.shape[-2:])], dim=1)
    pieces = image.view(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return layers.linear(pieces.reshape(batch, rows * columns, -1), layout.patches), rows, columns


def image_of(layout: AnimaLayout, tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The last layer's tokens put together to an image, the inverse of patches_of: (batch, rows * columns, patch *
    patch * out channels) -> (batch, out channels, 1, rows * patch, columns * patch)."""
    patch = layout.patch
    pieces = tokens.view(len(tokens), rows, columns, patch, patch, layout.out_channels).permute(0, 5, 1, 3, 2, 4)
    return pieces.reshape(len(tokens), layout.out_channels, 1, rows * patch, columns * patch)


def modulations_of(
    layers: TransformerLayers, layout: AnimaLayout, timestep: Tensor, dtype: torch.dtype, blocks: int
) -> tuple[Tensor, Modulation]:
    """The vectors, computed from the timestep (batch,), by which norms and outputs of layers are modulated.

    Returns the shift, scale and gate of each layer of the blocks that the call computes, (3 * blocks, batch, 3 *
    width), in the order of the forward, and the modulation of the last norm. The network computes scale - 1; this
    returns the scale.
    dtype: the weights'. blocks: how many of the first blocks the call computes: all, or fewer in a cached pass of
        DeepCache.
    """
    ops = layers.ops
    time = layout.time
    width = layout.width
    count = 3 * blocks
    every = 3 * len(layout.blocks)
    waves = ops.sinusoids(timestep, time).to(dtype)
    shared = layers.linear(ops.silu(layers.linear(waves, time.first)), time.second)
    embedding = ops.silu(ops.rms_norm(waves, layers.weights[layout.time_norm.path], layout.time_norm))
    downs = layers.weights[layout.downs.name]
    rank = len(downs.weight) // (every + 1)
    if count == every:
        down, down_of_out = ops.linear(embedding, downs).split([every * rank, rank], dim=-1)
    else:
        down = ops.linear(embedding, rows_of(downs, 0, count * rank))
        down_of_out = ops.linear(embedding, rows_of(downs, every * rank, rank))
    ups = layers.weights[layout.ups.name]
    if count != every:
        ups = rows_of(ups, 0, count * len(ups.weight) // every)
    own = up_projected(ops, down.unflatten(-1, (count, rank)).transpose(0, 1), ups) + shared
    last = layers.linear(down_of_out, layout.out_up) + shared[:, :2 * width]
    for vectors in (own, last):
        vectors[..., width:2 * width] += 1
    return own, Modulation(scale=last[:, width:], shift=last[:, :width])


def up_projected(ops: Operators, down: Tensor, ups: LayerWeights) -> Tensor:
    """The outputs of the second linear layers of low-rank pairs, all in one batched product: (layers, batch, rank) ->
    (layers, batch, 3 * width).

    down: the outputs of the pairs' first linear layers.
    ups: the weights of the pairs' second linear layers, one below the other: (layers * 3 * width, rank), without bias,
        and their LoRAs, whose outputs are added. Weights that exist in 8 bits alone take one product a layer instead.
    """
    # A weight that exists in 8 bits alone has no values to multiply in a batch.
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
    """The weights of a layer that computes only `count` of a layer's outputs, from output `first` on: views of these
    rows of the weight, of its 8-bit copies, and of the LoRAs. The bias is left out."""
    low_bit = []
    for whole in layer.low_bit:
        scales = whole.scales if whole.scales.numel() == 1 else whole.scales.narrow(1, first, count)
        low_bit.append(whole._replace(values=whole.values.narrow(0, first, count), scales=scales))
    low_rank = None if layer.low_rank is None else layer.low_rank.of_rows(first, count)
    return LayerWeights(layer.weight.narrow(0, first, count), None, tuple(low_bit), low_rank)
