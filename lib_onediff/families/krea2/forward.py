"""Krea 2's forward pass: functions of tensors, over the operators of core.operators.

The arithmetic is that of Krea 2's transformer as Forge Neo and diffusers compute it, in fewer products: the projections
that an attention makes of the same tokens, with its gate, come from one GEMM.
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
from ..transformer import TransformerLayers, blocks_read, first_residual, padded_to_patches, through_blocks
from .call import Krea2Call
from .layout import TIME_SCALE, GatedLayers, Krea2Layout, StreamBlock, TextFusion

# The number of vectors of a block's modulation: scale, shift and gate of the attention, then of the feed-forward layer.
VECTORS = 6


class Prompt(NamedTuple):
    """The prompt of a call, reordered so that padding comes last in each row.

    context: (batch, tokens, text layers * text width).
    order: (batch, tokens), the index that each token had in the call. used: (batch,), how many tokens are not padding.
        If the call has no mask, order and used are None.
    """

    context: Tensor
    order: Tensor | None
    used: Tensor | None


def output(layout: Krea2Layout, weights: Weights, ops: Operators, call: Krea2Call) -> Tensor:
    """The network's output, of the latent's shape and dtype. The latent may have any height and width: it is padded to
    whole patches, and the output is cropped. call.cut: see through_blocks."""
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    image, rows, columns = patches_of(layers, layout, call.latent.to(dtype))
    computed = blocks_read(layout.blocks, call.cut)
    modulations, out_modulation = modulations_of(layers, layout, computed, call.timestep, dtype)
    prompt = prompt_of(call, dtype)
    text = fused_prompt(layers, layout, prompt)
    patches = image.shape[1]
    rotary = rotary_of(layout.axes, positions_of(call, prompt, rows, columns))
    filled = None
    if prompt.used is not None:
        filled = Filled.of(prompt.used + patches, patches + text.shape[1], certain=patches)

    def through(residual: Residual, index: int, block: StreamBlock) -> Residual:
        return through_layers(layers, block.layers, residual, rotary, filled, modulations[index])

    # Hosts have the prompt first. No layer depends on the order of tokens, and this way padding is at the end.
    residual = first_residual(torch.cat([image, text], dim=1))
    residual = through_blocks(ops, residual, layout.blocks, call.cut, through)
    residual = Residual(ops.materialize(residual)[:, :patches])
    _, normed = layers.norm(residual, layout.out_norm, layout.out, out_modulation)
    return image_of(layout, layers.linear(normed, layout.out), rows, columns, call.latent)


def through_layers(
    layers: TransformerLayers, block: GatedLayers, residual: Residual, rotary: Rotary | None = None,
    filled: Filled | None = None, modulation: Tensor | None = None,
) -> Residual:
    """The residual after the attention and the feed-forward layer of one block: a block over image and prompt, or one
    of TextFusion's. The given residual must not be used afterwards.

    rotary: rotates queries and keys; None for TextFusion's blocks, which have no rotary embedding.
    filled: how many tokens at the beginning of each row are not padding; None if the call has no mask, or for attention
        among the layers of one token.
    modulation: (batch, 6 * width), see VECTORS; None for TextFusion's blocks, which the timestep does not modulate.
    """
    before_attention, attention_gate, before_feed_forward, feed_forward_gate = modulations_and_gates(modulation)
    attention = block.attention
    into = block.feed_forward_in
    out = block.feed_forward_out

    residual, normed = layers.norm(residual, block.norm, attention.query_key_value, before_attention)
    mixed = layers.self_attention(attention, normed, rotary, filled)
    residual = layers.add(residual, mixed, attention.out, attention_gate)

    residual, normed = layers.norm(residual, block.feed_forward_norm, into, before_feed_forward)
    return layers.add(residual, layers.gated_linear(normed, into, SWIGLU, out), out, feed_forward_gate)


def modulations_and_gates(
    modulation: Tensor | None,
) -> tuple[Modulation | None, Tensor | None, Modulation | None, Tensor | None]:
    """The modulation of the norm before a block's attention, the gate (batch, width) of the attention's output, then
    the modulation of the norm before the feed-forward layer and the gate of that layer's output.

    modulation: (batch, 6 * width), see VECTORS; the results are views of it. None for a block without modulation: then
    all four results are None."""
    if modulation is None:
        return None, None, None, None
    scale, shift, gate, feed_forward_scale, feed_forward_shift, feed_forward_gate = modulation.chunk(VECTORS, dim=-1)
    return Modulation(scale, shift), gate, Modulation(feed_forward_scale, feed_forward_shift), feed_forward_gate


def patches_of(layers: TransformerLayers, layout: Krea2Layout, latent: Tensor) -> tuple[Tensor, int, int]:
    """The latent's patches, projected to tokens (batch, rows * columns, width), and the numbers of rows and columns of
    patches. Sides that are no multiple of the patch are padded."""
    height, width = latent.shape[-2:]
    image = padded_to_patches(latent.reshape(len(latent), layout.channels, height, width), layout.patch)
    rows = image.shape[-2] // layout.patch
    columns = image.shape[-1] // layout.patch
    pieces = functional.pixel_unshuffle(image, layout.patch).flatten(2).transpose(1, 2)
    return layers.linear(pieces.contiguous(), layout.patches), rows, columns


def image_of(layout: Krea2Layout, tokens: Tensor, rows: int, columns: int, latent: Tensor) -> Tensor:
    """The last layer's tokens (batch, rows * columns, channels * patch * patch) put together to an image, the inverse
    of patches_of. It is cropped to the latent's size, and has the shape and dtype of the latent; the latent's values
    are not read."""
    height, width = latent.shape[-2:]
    image = functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), layout.patch)
    return image[..., :height, :width].reshape(latent.shape).to(latent.dtype)


def modulations_of(
    layers: TransformerLayers, layout: Krea2Layout, blocks: Sequence[StreamBlock], timestep: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Modulation]:
    """The vectors, computed from the timestep (batch,), by which norms and outputs of layers are modulated; in dtype.

    Returns the vectors of each of these blocks, (blocks, batch, 6 * width), see VECTORS, and the modulation of the last
    norm. The network computes scale - 1; this returns the scale. All sums are made in float32 and rounded once.
    blocks: the blocks that the call computes: all, or only the first ones in a cached pass of DeepCache.
    """
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
    """The call's prompt in dtype. If the call has a mask, the tokens of each row are reordered so that padding comes
    last; used tokens keep their order among themselves. The context is a new tensor, because operators may write into
    it."""
    if call.mask is None:
        # Operators may write into a residual that shares this memory, and the call's inputs must not change.
        return Prompt(call.context.to(dtype, copy=True), None, None)
    order = call.mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    context = call.context.gather(1, order[:, :, None].expand(-1, -1, call.context.shape[2]))
    return Prompt(context.to(dtype), order, call.mask.sum(dim=1))


def fused_prompt(layers: TransformerLayers, layout: Krea2Layout, prompt: Prompt) -> Tensor:
    """The prompt's tokens in the network's width, (batch, tokens, width): TextFusion combines the outputs of the text
    encoder's layers for each token. May overwrite prompt.context."""
    text = layout.text
    context = prompt.context
    batch, tokens, _ = context.shape
    filled = None if prompt.used is None else Filled.of(prompt.used, tokens)
    residual = first_residual(context.reshape(batch * tokens, layout.text_layers, layout.text_width))
    for block in text.across_layers:
        residual = through_layers(layers, block, residual)
    each = layers.ops.materialize(residual).view(batch, tokens, layout.text_layers, layout.text_width)
    residual = first_residual(layers.linear(each.transpose(2, 3).to(context.dtype), text.sum).squeeze(3))
    for block in text.across_tokens:
        residual = through_layers(layers, block, residual, filled=filled)
    return projected_text(layers, text, residual)


def projected_text(layers: TransformerLayers, text: TextFusion, residual: Residual) -> Tensor:
    """The prompt's tokens after TextFusion's last norm and its two linear layers, which bring them to the network's
    width: (batch, tokens, text width) -> (batch, tokens, width)."""
    _, normed = layers.norm(residual, text.norm, text.into)
    hidden = layers.activated_linear(normed, text.into, Activation.GELU_TANH, text.out)
    return layers.linear(hidden, text.out)


def positions_of(call: Krea2Call, prompt: Prompt, rows: int, columns: int) -> Tensor:
    """The rotary positions of the image's tokens, followed by the prompt's: (tokens, 3); or (batch, tokens, 3) if the
    prompt was reordered and the call has positions, because each row has another order then.

    Without call.positions, the prompt's tokens are at (0, 0, 0) and the image's at (0, row, column). rows, columns: of
    the image's patches."""
    tokens = prompt.context.shape[1]
    if call.positions is None:
        return functional.pad(image_positions(rows, columns, call.latent.device), (0, 0, 0, tokens))
    of_text = call.positions[:, :tokens]
    of_image = call.positions[:, tokens:]
    if prompt.order is None:
        return torch.cat([of_image, of_text], dim=1)[0]
    batch = len(prompt.order)
    axes = of_text.shape[2]
    ordered = of_text.expand(batch, -1, -1).gather(1, prompt.order[:, :, None].expand(-1, -1, axes))
    return torch.cat([of_image.expand(batch, -1, -1), ordered], dim=1)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, as a new tensor."""
    return functional.gelu(x, approximate="tanh")
