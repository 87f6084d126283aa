"""Z-Image's forward pass: functions of tensors, over the operators of core.operators.

The arithmetic is that of Z-Image's and Lumina 2's transformers as Forge Neo and diffusers compute it, in fewer
products: all modulations come from one GEMM, and so do the projections that a layer makes of the same tokens.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import Weights
from ...core.leaves import RMSNorm
from ...core.operators import SWIGLU, Modulation, Operators, Residual, Rotary
from ..rotary import image_positions, rotary_of
from ..transformer import TransformerLayers, first_residual, padded_to_patches, through_blocks
from .call import ZImageCall
from .layout import StreamBlock, ZImageLayout

# In float16, the inputs of layers whose output would overflow are multiplied by this: see scaled_down.
SMALLER = 2.0**-8


class Positions(NamedTuple):
    """The positions of some tokens, for the attentions of a block.

    rotary: the rotary embedding of each token. mask: bool (batch, 1, 1, tokens), True for the tokens to which a row of
        the batch attends; None if each row attends to all.
    """

    rotary: Rotary
    mask: Tensor | None

    def part(self, first: int, count: int) -> Positions:
        """The Positions of `count` of these tokens, from token `first` on. The rotary embedding is a copy, the mask a
        view."""
        cosines, sines, interleaved = self.rotary
        rotary = Rotary(
            cosines.narrow(-2, first, count).contiguous(), sines.narrow(-2, first, count).contiguous(), interleaved,
        )
        return Positions(rotary, None if self.mask is None else self.mask.narrow(-1, first, count))


class BlockModulation(NamedTuple):
    """The factors by which the timestep modulates a block, (batch, 2, width) each: index 0 of the second dimension is
    for the attention, 1 for the feed-forward layer. scales: multiply the norm before the layer. gates: multiply the
    norm after the layer."""

    scales: Tensor
    gates: Tensor


def output(layout: ZImageLayout, weights: Weights, ops: Operators, call: ZImageCall) -> Tensor:
    """The network's output, (batch, channels, height, width) in the latent's dtype. The latent may have any height and
    width: it is padded to whole patches, and the output is cropped. call.cut: see through_blocks."""
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    height, width = call.latent.shape[-2:]
    image, rows, columns = patches_of(layers, layout, call.latent.to(dtype))
    embedding = embedding_of(layers, layout, call, dtype)
    modulations = modulations_of(layers, layout, embedding)
    text = prompt_of(layers, layout, call)
    positions = positions_of(layout, call, rows, columns)
    image_tokens = image.shape[1]

    of_image = positions.part(0, image_tokens)
    refined_image = first_residual(image)
    for block in layout.image_refiner:
        refined_image = through_block(layers, block, refined_image, of_image, modulations.pop(0))

    of_text = positions.part(image_tokens, text.shape[1])
    refined_text = first_residual(text)
    for block in layout.text_refiner:
        refined_text = through_block(layers, block, refined_text, of_text, None)

    def through(residual: Residual, index: int, block: StreamBlock) -> Residual:
        return through_block(layers, block, residual, positions, modulations[index])

    residual = Residual(torch.cat([ops.materialize(refined_image), ops.materialize(refined_text)], dim=1))
    residual = through_blocks(ops, residual, layout.blocks, call.cut, through)

    scale = layers.linear(ops.silu(embedding), layout.out_modulation) + 1
    _, normed = layers.norm(residual, layout.out_norm, layout.out, Modulation(scale))
    result = image_of(layout, layers.linear(normed, layout.out), rows, columns)[..., :height, :width]
    return (-result if layout.is_negated else result).to(call.latent.dtype)


def through_block(
    layers: TransformerLayers, block: StreamBlock, residual: Residual, positions: Positions,
    modulation: BlockModulation | None,
) -> Residual:
    """The residual after the attention and the feed-forward layer of one block. The given residual must not be used
    afterwards. positions: of the block's tokens. modulation: None for a block over the prompt alone.

    In float16, the inputs of the two linear layers before a norm (attention.out, feed_forward_out) are made smaller:
    see scaled_down."""
    own = block.attention
    into = block.feed_forward_in
    out = block.feed_forward_out
    before_attention = before_feed_forward = None
    attention_gate = feed_forward_gate = None
    if modulation is not None:
        before_attention, before_feed_forward = map(Modulation, modulation.scales.unbind(1))
        attention_gate, feed_forward_gate = modulation.gates.unbind(1)

    residual, normed = layers.norm(residual, block.attention_norm, own.query_key_value, before_attention)
    mixed = layers.self_attention(own, normed, positions.rotary, positions.mask)
    norm = block.attention_out_norm
    is_half = mixed.dtype == torch.float16
    if is_half:
        mixed, norm = scaled_down(mixed, norm)
    residual = layers.add(residual, mixed, own.out, attention_gate, norm)

    residual, normed = layers.norm(residual, block.feed_forward_norm, into, before_feed_forward)
    norm = block.feed_forward_out_norm
    if is_half:
        gate, value = layers.linear(normed, into).float().chunk(2, dim=-1)
        hidden, norm = scaled_down(functional.silu(gate) * value, norm)
    else:
        hidden = layers.gated_linear(normed, into, SWIGLU, out)
    return layers.add(residual, hidden, out, feed_forward_gate, norm)


def scaled_down(x: Tensor, norm: RMSNorm) -> tuple[Tensor, RMSNorm]:
    """For a network in float16 (the caller checks that): x times SMALLER as a new float16 tensor, the input of a linear
    layer whose output would overflow otherwise; and the norm that follows the layer, with an epsilon that fits.

    x: float16 or float32. The layer must have no bias: then its output is SMALLER times as large, too, and does not
    overflow. The norm divides that factor out again; only its epsilon has to be scaled by SMALLER ** 2. Values that are
    still too large are clamped and NaN becomes 0, as in the hosts.
    """
    most = torch.finfo(torch.float16).max
    smaller = (x * SMALLER).nan_to_num(nan=0.0).clamp(-most, most)
    return smaller.to(torch.float16), replace(norm, eps=norm.eps * SMALLER**2)


def patches_of(layers: TransformerLayers, layout: ZImageLayout, latent: Tensor) -> tuple[Tensor, int, int]:
    """The latent's patches, projected to tokens (batch, tokens, width), and the numbers of rows and columns of patches.
    Sides that are no multiple of the patch are padded.

    Learned tokens (image_pad) follow until the number of tokens is a multiple of layout.multiple.
    """
    patch = layout.patch
    image = padded_to_patches(latent, patch)
    rows = image.shape[-2] // patch
    columns = image.shape[-1] // patch
    pieces = image.unflatten(3, (columns, patch)).unflatten(2, (rows, patch)).permute(0, 2, 4, 3, 5, 1)
    tokens = layers.linear(pieces.reshape(len(image), rows * columns, -1), layout.patches)
    missing = -rows * columns % layout.multiple
    if layout.image_pad is None or not missing:
        return tokens, rows, columns
    token = layers.weights[layout.image_pad.path].weight.to(tokens.dtype)
    return torch.cat([tokens, token.expand(len(tokens), missing, -1)], dim=1), rows, columns


def image_of(layout: ZImageLayout, tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The last layer's tokens put together to an image, the inverse of patches_of: (batch, tokens, patch * patch *
    channels) -> (batch, channels, rows * patch, columns * patch). Tokens after the first rows * columns (padding, the
    prompt) are dropped."""
    patch = layout.patch
    pieces = tokens[:, :rows * columns].unflatten(2, (patch, patch, -1)).unflatten(1, (rows, columns))
    image: Tensor = pieces.permute(0, 5, 1, 3, 2, 4)
    return image.reshape(len(tokens), -1, rows * patch, columns * patch)


def prompt_of(layers: TransformerLayers, layout: ZImageLayout, call: ZImageCall) -> Tensor:
    """The prompt's tokens, normed and projected to the network's width, (batch, tokens, width).

    In each row of the batch, the tokens from call.lengths on are padding. They are replaced by the learned token
    text_pad; in a network that has none, they stay as projected."""
    context = call.context.to(layers.weights[layout.text.path].weight.dtype)
    normed = layers.ops.rms_norm(context, layers.weights[layout.text_norm.path], layout.text_norm)
    tokens = layers.linear(normed, layout.text)
    if layout.text_pad is None:
        return tokens
    indices = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
    is_padding = indices >= call.lengths[:, None]
    token = layers.weights[layout.text_pad.path].weight.to(tokens.dtype)
    return torch.where(is_padding[..., None], token, tokens)


def positions_of(layout: ZImageLayout, call: ZImageCall, rows: int, columns: int) -> Positions:
    """The Positions of the image's tokens, followed by the prompt's. rows, columns: of the image's patches.

    The prompt's tokens, padding included, are at (1, 0, 0), (2, 0, 0) and so on. The image's patches are at (next
    number, row, column), where a prompt in a ragged call counts without the tokens after its own padding. Tokens that
    pad the image are at (0, 0, 0). Only a ragged call has a mask.
    """
    device = call.latent.device
    length = call.context.shape[1]
    patches = rows * columns
    image = image_positions(rows, columns, device, first=length + 1)
    image = functional.pad(image, (0, 0, 0, -patches % layout.multiple))
    indices = torch.arange(length, dtype=torch.int64, device=device)
    positions = torch.cat([image, functional.pad(indices[:, None] + 1, (0, 2))])
    if not call.is_ragged:
        return Positions(rotary_of(layout.axes, positions), None)
    own_lengths = call.lengths + -call.lengths % layout.multiple
    positions = positions.repeat(len(own_lengths), 1, 1)
    positions[:, :patches, 0] += (own_lengths - length)[:, None]
    is_own = functional.pad(indices < own_lengths[:, None], (len(image), 0), value=True)
    return Positions(rotary_of(layout.axes, positions), is_own[:, None, None])


def embedding_of(layers: TransformerLayers, layout: ZImageLayout, call: ZImageCall, dtype: torch.dtype) -> Tensor:
    """The embedding of the timestep, (batch, width) in dtype. What the network embeds is the share of the image in the
    latent: call.image_share if the host has passed it, else 1 - timestep."""
    time = layout.time
    share = 1.0 - call.timestep if call.image_share is None else call.image_share
    waves = layers.ops.sinusoids(share * layout.time_scale, time).to(dtype)
    return layers.linear(layers.ops.silu(layers.linear(waves, time.first)), time.second)


def modulations_of(layers: TransformerLayers, layout: ZImageLayout, embedding: Tensor) -> list[BlockModulation]:
    """The modulations of all blocks over the image's tokens: first of layout.image_refiner's, then of layout.blocks,
    including blocks that a cached pass leaves out.

    embedding: the result of embedding_of, (batch, width), before any activation: the SiLU that some networks have
        before their modulations (layout.activates_time) is applied here.
    The network computes scale - 1, and gates before a tanh; this returns the scales, and the gates after the tanh."""
    given = layers.ops.silu(embedding) if layout.activates_time else embedding
    together = layers.linear(given, layout.modulations).unflatten(-1, (-1, 4, layout.width))
    scales = together[:, :, 0::2] + 1
    gates = together[:, :, 1::2].tanh()
    return list(map(BlockModulation, scales.unbind(1), gates.unbind(1)))
