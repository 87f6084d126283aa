"""Krea 2's forward pass, as pure functions of tensors against a set of operators.

The arithmetic is that of Krea 2's transformer as Forge Neo and diffusers have it. Only the number of products is
smaller: what an attention makes of the same tokens, its gate too, comes from one GEMM.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import Weights
from ...core.operators import SWIGLU, Activation, Filled, Modulation, Operators, Residual, Rotary
from ..rotary import image_positions, rotary_of
from ..transformer import TransformerLayers, blocks_read, through_blocks
from .call import Krea2Call
from .layout import TIME_SCALE, GatedLayers, Krea2Layout, StreamBlock, TextFusion

# Factor, shift and gate of a block's two layers.
VECTORS = 6


class Prompt(NamedTuple):
    """The prompt of a call, in which the tokens that belong to it come first. order: (batch, tokens), the place that
    each had in the call. used: (batch,), how many belong to it. None for both if all do."""

    context: Tensor
    order: Tensor | None
    used: Tensor | None


def output(layout: Krea2Layout, weights: Weights, ops: Operators, call: Krea2Call) -> Tensor:
    """The network's output, of the latent's shape."""
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    image, rows, columns = patches_of(layers, layout, call.latent.to(dtype))
    computed = blocks_read(layout.blocks, call.cut)
    modulations, out_modulation = modulations_of(layers, layout, computed, call.timestep, dtype)
    tokens = prompt_of(call, dtype)
    prompt = fused_prompt(layers, layout, tokens)
    patches = image.shape[1]
    rotary = rotary_of(layout.axes, positions_of(call, tokens, rows, columns))
    filled = None if tokens.used is None else Filled.of(tokens.used + patches, patches + prompt.shape[1])

    def through(residual: Residual, index: int, block: StreamBlock) -> Residual:
        return through_layers(layers, block.layers, residual, rotary, filled, modulations[index])

    # The prompt behind the image, where the host has it in front: no layer depends on the order of tokens.
    residual = residual_of(torch.cat([image, prompt], dim=1))
    residual = through_blocks(ops, residual, layout.blocks, call.cut, through)
    residual = Residual(ops.materialize(residual)[:, :patches])
    _, normed = layers.norm(residual, layout.out_norm, layout.out, out_modulation)
    return image_of(layout, layers.linear(normed, layout.out), rows, columns, call.latent)


def through_layers(
    layers: TransformerLayers, block: GatedLayers, residual: Residual, rotary: Rotary | None = None,
    filled: Filled | None = None, modulation: Tensor | None = None,
) -> Residual:
    """The residual behind attention and feed-forward layers. filled: None if all tokens count. modulation: (batch,
    6 * width), or None for the prompt's own layers."""
    before, gate, feed_forward_before, feed_forward_gate = vectors_of(modulation)
    attention = block.attention
    into = block.feed_forward_in
    out = block.feed_forward_out

    residual, normed = layers.norm(residual, block.norm, attention.query_key_value, before)
    residual = layers.add(residual, layers.self_attention(attention, normed, rotary, filled), attention.out, gate)

    residual, normed = layers.norm(residual, block.feed_forward_norm, into, feed_forward_before)
    return layers.add(residual, layers.gated_linear(normed, into, SWIGLU, out), out, feed_forward_gate)


def vectors_of(
    modulation: Tensor | None,
) -> tuple[Modulation | None, Tensor | None, Modulation | None, Tensor | None]:
    """Of each of a block's two layers the modulation before it and the gate behind it."""
    if modulation is None:
        return None, None, None, None
    scale, shift, gate, feed_forward_scale, feed_forward_shift, feed_forward_gate = modulation.chunk(VECTORS, dim=-1)
    return Modulation(scale, shift), gate, Modulation(feed_forward_scale, feed_forward_shift), feed_forward_gate


def patches_of(layers: TransformerLayers, layout: Krea2Layout, latent: Tensor) -> tuple[Tensor, int, int]:
    """Tokens, (batch, rows * columns, width), and how many rows and columns of patches there are. A latent whose size
    is no multiple of a patch is continued by its opposite edge."""
    height, width = latent.shape[-2:]
    image = latent.reshape(len(latent), layout.channels, height, width)
    image = functional.pad(image, (0, -width % layout.patch, 0, -height % layout.patch), mode="circular")
    rows = image.shape[-2] // layout.patch
    columns = image.shape[-1] // layout.patch
    pieces = functional.pixel_unshuffle(image, layout.patch).flatten(2).transpose(1, 2)
    return layers.linear(pieces.contiguous(), layout.patches), rows, columns


def image_of(layout: Krea2Layout, tokens: Tensor, rows: int, columns: int, latent: Tensor) -> Tensor:
    """The output of the last layer as an image, of the latent's shape and dtype."""
    height, width = latent.shape[-2:]
    image = functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), layout.patch)
    return image[..., :height, :width].reshape(latent.shape).to(latent.dtype)


def modulations_of(
    layers: TransformerLayers, layout: Krea2Layout, blocks: Sequence[StreamBlock], timestep: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Modulation]:
    """The modulation of these blocks, (blocks, batch, 6 * width), and the output's. The network gives factors relative
    to one; they are summed in float32, and rounded once."""
    ops = layers.ops
    width = layout.width
    waves = ops.sinusoids(timestep.float() * TIME_SCALE, layout.time).to(dtype)
    time = layers.linear(gelu(layers.linear(waves, layout.time.first)), layout.time.second)
    shared = layers.linear(gelu(time), layout.modulation)
    tables = ops.join([layers.weights[block.table.path].weight.flatten() for block in blocks])
    ones = torch.zeros(VECTORS, 1, dtype=torch.float32, device=time.device)
    ones[::3] = 1
    sums = tables.float().view(-1, 1, VECTORS, width) + (shared.float().view(-1, VECTORS, width) + ones)
    scale, shift = layers.weights[layout.out_table.path].weight.float().view(2, width)
    wide = time.float()
    return sums.to(dtype).flatten(2), Modulation((1 + (wide + scale)).to(dtype), (wide + shift).to(dtype))


def prompt_of(call: Krea2Call, dtype: torch.dtype) -> Prompt:
    """A call's prompt, in a type."""
    if call.mask is None:
        # Operators may write into a residual, and the call's inputs are not ours.
        return Prompt(call.context.to(dtype, copy=True), None, None)
    order = call.mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    context = call.context.gather(1, order[:, :, None].expand(-1, -1, call.context.shape[2]))
    return Prompt(context.to(dtype), order, call.mask.sum(dim=1))


def fused_prompt(layers: TransformerLayers, layout: Krea2Layout, prompt: Prompt) -> Tensor:
    """The prompt's tokens, (batch, tokens, width). The prompt's context is written into."""
    text = layout.text
    context = prompt.context
    batch, tokens, _ = context.shape
    filled = None if prompt.used is None else Filled.of(prompt.used, tokens)
    residual = residual_of(context.reshape(batch * tokens, layout.text_layers, layout.text_width))
    for block in text.across_layers:
        residual = through_layers(layers, block, residual)
    each = layers.ops.materialize(residual).view(batch, tokens, layout.text_layers, layout.text_width)
    residual = residual_of(layers.linear(each.transpose(2, 3).to(context.dtype), text.sum).squeeze(3))
    for block in text.across_tokens:
        residual = through_layers(layers, block, residual, filled=filled)
    return projected(layers, text, residual)


def residual_of(tokens: Tensor) -> Residual:
    """Tokens as a residual: with float16 in float32, in which it does not overflow."""
    return Residual(tokens.float() if tokens.dtype == torch.float16 else tokens)


def projected(layers: TransformerLayers, text: TextFusion, residual: Residual) -> Tensor:
    """The fused prompt in the network's width."""
    _, normed = layers.norm(residual, text.norm, text.into)
    hidden = layers.activated_linear(normed, text.into, Activation.GELU_TANH, text.out)
    return layers.linear(hidden, text.out)


def positions_of(call: Krea2Call, prompt: Prompt, rows: int, columns: int) -> Tensor:
    """The positions of the image's tokens and the prompt's, (tokens, 3), or (batch, tokens, 3) where the order of the
    prompt's differs."""
    text = prompt.context.shape[1]
    if call.positions is None:
        return functional.pad(image_positions(rows, columns, call.latent.device), (0, 0, 0, text))
    of_text = call.positions[:, :text]
    of_image = call.positions[:, text:]
    if prompt.order is None:
        return torch.cat([of_image, of_text], dim=1)[0]
    batch = len(prompt.order)
    axes = of_text.shape[2]
    ordered = of_text.expand(batch, -1, -1).gather(1, prompt.order[:, :, None].expand(-1, -1, axes))
    return torch.cat([of_image.expand(batch, -1, -1), ordered], dim=1)


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")
