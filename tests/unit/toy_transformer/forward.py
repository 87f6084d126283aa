"""A toy transformer's forward pass, as pure functions of tensors against a set of operators."""
from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from lib_onediff.core.layer_weights import Weights
from lib_onediff.core.operators import Activation, Operators, Residual
from lib_onediff.families.transformer import TransformerLayers, through_blocks

from .call import ToyTransformerCall
from .layout import ToyBlockLayout, ToyTransformerLayout
from .network import PATCH


def output(layout: ToyTransformerLayout, weights: Weights, ops: Operators, call: ToyTransformerCall) -> Tensor:
    """The network's output, (batch, channels, height, width)."""
    layers = TransformerLayers(weights, ops, call.upcast_attention)
    dtype = weights[layout.patches.path].weight.dtype
    rows, columns = (side // PATCH for side in call.latent.shape[-2:])
    mask = None if call.mask is None else call.mask[:, None, None]
    context = call.context.to(dtype)
    pieces = functional.pixel_unshuffle(call.latent.to(dtype), PATCH).flatten(2).transpose(1, 2)
    tokens = layers.linear(pieces.contiguous(), layout.patches)
    waves = ops.sinusoids(call.timestep, layout.time).to(dtype)
    embedding = layers.linear(ops.silu(layers.linear(waves, layout.time.first)), layout.time.second)

    def through(residual: Residual, index: int, block: ToyBlockLayout) -> Residual:
        return through_block(layers, block, residual, context, mask)

    residual = through_blocks(ops, Residual(tokens + embedding[:, None]), layout.blocks, call.cut, through)
    _, normed = layers.norm(residual, layout.out_norm, layout.out)
    image = layers.linear(normed, layout.out).transpose(1, 2).unflatten(2, (rows, columns))
    return functional.pixel_shuffle(image, PATCH).to(call.latent.dtype)


def through_block(
    layers: TransformerLayers, block: ToyBlockLayout, residual: Residual, context: Tensor, mask: Tensor | None
) -> Residual:
    own = block.self_attention
    cross = block.cross_attention
    into = block.feed_forward_in
    out = block.feed_forward_out
    residual, normed = layers.norm(residual, block.self_norm, own.query_key_value)
    residual = layers.add(residual, layers.self_attention(own, normed), own.out)
    residual, normed = layers.norm(residual, block.cross_norm, cross.query)
    residual = layers.add(residual, layers.cross_attention(cross, normed, context, mask), cross.out)
    residual, normed = layers.norm(residual, block.feed_forward_norm, into)
    return layers.add(residual, layers.activated_linear(normed, into, Activation.GELU, out), out)
