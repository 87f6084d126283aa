"""Z-Image's forward pass, as pure functions of tensors against a set of operators.

The arithmetic is that of Z-Image's and Lumina 2's transformers as Forge Neo and diffusers have them. Only the number of
products is smaller: all modulations come from one GEMM, and so do the projections that a layer makes of the same
tokens.
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
from ..transformer import TransformerLayers, through_blocks
from .call import ZImageCall
from .layout import StreamBlock, ZImageLayout

# In float16 the inputs of layers are made so much smaller whose output would overflow.
SMALLER = 2.0**-8


class Places(NamedTuple):
    """Where the tokens of a stream are. rotary: of each. mask: as of Operators.attention, or None."""

    rotary: Rotary
    mask: Tensor | None

    def part(self, first: int, count: int) -> Places:
        """Those of some tokens."""
        cosines, sines, interleaved = self.rotary
        rotary = Rotary(
            cosines.narrow(-2, first, count).contiguous(), sines.narrow(-2, first, count).contiguous(), interleaved,
        )
        return Places(rotary, None if self.mask is None else self.mask.narrow(-1, first, count))


class BlockModulation(NamedTuple):
    """Of a block's two layers: scales before them, and gates behind them, (batch, layers, width)."""

    scales: Tensor
    gates: Tensor


def output(layout: ZImageLayout, weights: Weights, ops: Operators, call: ZImageCall) -> Tensor:
    """The network's output for a latent of any size, (batch, channels, height, width)."""
    height, width = call.latent.shape[-2:]
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    image, rows, columns = patches_of(layout, layers, call.latent.to(dtype))
    embedding = embedding_of(layout, layers, call, dtype)
    modulations = modulations_of(layout, layers, embedding)
    text = prompt_of(layout, layers, call)
    places = places_of(layout, call, rows, columns)
    patches = image.shape[1]
    of_image = places.part(0, patches)
    of_text = places.part(patches, text.shape[1])
    refined = begun(image)
    read = begun(text)
    for block in layout.image_refiner:
        refined = through_block(layers, block, refined, of_image, modulations.pop(0))
    for block in layout.text_refiner:
        read = through_block(layers, block, read, of_text, None)

    def through(residual: Residual, index: int, block: StreamBlock) -> Residual:
        return through_block(layers, block, residual, places, modulations[index])

    stream = torch.cat([ops.materialize(refined), ops.materialize(read)], dim=1)
    residual = through_blocks(ops, Residual(stream), layout.blocks, call.cut, through)
    scale = layers.linear(ops.silu(embedding), layout.out_modulation) + 1
    _, normed = layers.norm(residual, layout.out_norm, layout.out, Modulation(scale))
    found = image_of(layout, layers.linear(normed, layout.out), rows, columns)[..., :height, :width]
    return (-found if layout.is_negated else found).to(call.latent.dtype)


def begun(tokens: Tensor) -> Residual:
    """The residual before the first block. In float16 it would be rounded too much."""
    return Residual(tokens.float() if tokens.dtype == torch.float16 else tokens)


def through_block(
    layers: TransformerLayers, block: StreamBlock, residual: Residual, places: Places,
    modulated: BlockModulation | None,
) -> Residual:
    """The residual behind a block. modulated: None where the timestep changes nothing in it."""
    own = block.attention
    into = block.feed_forward_in
    out = block.feed_forward_out
    before_attention = before_feed_forward = None
    behind_attention = behind_feed_forward = None
    if modulated is not None:
        before_attention, before_feed_forward = map(Modulation, modulated.scales.unbind(1))
        behind_attention, behind_feed_forward = modulated.gates.unbind(1)

    residual, normed = layers.norm(residual, block.attention_norm, own.query_key_value, before_attention)
    mixed = layers.self_attention(own, normed, places.rotary, places.mask)
    norm = block.attention_out_norm
    is_half = mixed.dtype == torch.float16
    if is_half:
        mixed, norm = made_smaller(mixed, norm)
    residual = layers.add(residual, mixed, own.out, behind_attention, norm)

    residual, normed = layers.norm(residual, block.feed_forward_norm, into, before_feed_forward)
    norm = block.feed_forward_out_norm
    if is_half:
        gate, value = layers.linear(normed, into).float().chunk(2, dim=-1)
        hidden, norm = made_smaller(functional.silu(gate) * value, norm)
    else:
        hidden = layers.gated_linear(normed, into, SWIGLU, out)
    return layers.add(residual, hidden, out, behind_feed_forward, norm)


def made_smaller(x: Tensor, norm: RMSNorm) -> tuple[Tensor, RMSNorm]:
    """The input of a linear layer in float16, and the norm behind that layer, which undoes the factor. What is too
    large even then is cut off, as hosts cut it off."""
    most = torch.finfo(torch.float16).max
    smaller = (x * SMALLER).nan_to_num(nan=0.0).clamp(-most, most)
    return smaller.to(torch.float16), replace(norm, eps=norm.eps * SMALLER**2)


def patches_of(layout: ZImageLayout, layers: TransformerLayers, latent: Tensor) -> tuple[Tensor, int, int]:
    """Tokens, (batch, rows * columns and those that fill up, width), and how many rows and columns of patches there
    are. A latent whose size is no multiple of a patch is continued by its opposite edge."""
    patch = layout.patch
    height, width = latent.shape[-2:]
    image = functional.pad(latent, (0, -width % patch, 0, -height % patch), mode="circular")
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
    """The output of the last layer as an image, (batch, channels, height, width), of the first tokens."""
    patch = layout.patch
    pieces = tokens[:, :rows * columns].unflatten(2, (patch, patch, -1)).unflatten(1, (rows, columns))
    image: Tensor = pieces.permute(0, 5, 1, 3, 2, 4)
    return image.reshape(len(tokens), -1, rows * patch, columns * patch)


def prompt_of(layout: ZImageLayout, layers: TransformerLayers, call: ZImageCall) -> Tensor:
    """The prompt's tokens, (batch, tokens, width), filled up."""
    context = call.context.to(layers.weights[layout.text.path].weight.dtype)
    normed = layers.ops.rms_norm(context, layers.weights[layout.text_norm.path], layout.text_norm)
    tokens = layers.linear(normed, layout.text)
    if layout.text_pad is None:
        return tokens
    numbers = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
    is_filled_up = numbers >= call.lengths[:, None]
    token = layers.weights[layout.text_pad.path].weight.to(tokens.dtype)
    return torch.where(is_filled_up[..., None], token, tokens)


def places_of(layout: ZImageLayout, call: ZImageCall, rows: int, columns: int) -> Places:
    """Of the image's tokens, then the prompt's. The prompt's are numbered from one on along the first axis, on which
    the image has the next number. What fills up the image is at zero."""
    device = call.latent.device
    length = call.context.shape[1]
    patches = rows * columns
    image = image_positions(rows, columns, device, first=length + 1)
    image = functional.pad(image, (0, 0, 0, -patches % layout.multiple))
    numbers = torch.arange(length, dtype=torch.int64, device=device)
    positions = torch.cat([image, functional.pad(numbers[:, None] + 1, (0, 2))])
    if not call.is_ragged:
        return Places(rotary_of(layout.axes, positions), None)
    own_lengths = call.lengths + -call.lengths % layout.multiple
    positions = positions.repeat(len(own_lengths), 1, 1)
    positions[:, :patches, 0] += (own_lengths - length)[:, None]
    is_own = functional.pad(numbers < own_lengths[:, None], (len(image), 0), value=True)
    return Places(rotary_of(layout.axes, positions), is_own[:, None, None])


def embedding_of(layout: ZImageLayout, layers: TransformerLayers, call: ZImageCall, dtype: torch.dtype) -> Tensor:
    """The embedding of the timestep, (batch, width). The network takes the share of the image."""
    time = layout.time
    share = 1.0 - call.timestep if call.image_share is None else call.image_share
    waves = layers.ops.sinusoids(share * layout.time_scale, time).to(dtype)
    return layers.linear(layers.ops.silu(layers.linear(waves, time.first)), time.second)


def modulations_of(layout: ZImageLayout, layers: TransformerLayers, embedding: Tensor) -> list[BlockModulation]:
    """Of every block with an image. The network gives scales relative to one."""
    given = layers.ops.silu(embedding) if layout.activates_time else embedding
    together = layers.linear(given, layout.modulations).unflatten(-1, (-1, 4, layout.width))
    scales = together[:, :, 0::2] + 1
    gates = together[:, :, 1::2].tanh()
    return list(map(BlockModulation, scales.unbind(1), gates.unbind(1)))
