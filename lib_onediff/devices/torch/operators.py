"""The reference operators in plain torch, for any device and dtype. core.operators.Operators describes each operator;
the docstrings here say what is particular. Images keep their memory format.

Some operators have arguments that only other backends need, such as consumer: they are ignored here.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import LayerWeights, LowRank, merged
from ...core.leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm, TimeEmbedding
from ...core.operators import Activation, Filled, GatedUnit, Heads, Modulation, Residual, Rotary, WeightedNorm
from .quantized import decoded, is_decoded, quantized_linear

# Whether torch supports attention with fewer heads of keys than of queries: torch 2.5 and newer.
HAS_GQA = "enable_gqa" in str(torch.ops.aten.scaled_dot_product_attention.default._schema)


def sinusoids(timestep: Tensor, time: TimeEmbedding) -> Tensor:
    """Cosines and sines of the timestep at falling frequencies: (batch,) -> float32 (batch, channels).

    As ldm's timestep_embedding and diffusers' get_timestep_embedding. time.frequency_shift is diffusers'
    downscale_freq_shift; ldm's is 0. The number of channels is even in every known model.
    """
    angles = timestep[:, None].float() * frequencies(time, timestep.device)[None] * time.scale
    waves = (angles.cos(), angles.sin())
    return torch.cat(waves if time.cosine_first else waves[::-1], dim=-1)


def frequencies(time: TimeEmbedding, device: torch.device) -> Tensor:
    """The frequencies of the sinusoids, float32 (channels / 2,). Computed in the same order as in the hosts, because
    another order rounds differently, and some models amplify that a thousandfold."""
    half = time.channels // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=device)
    return torch.exp(exponents / (half - time.frequency_shift))


def join(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors concatenated to one."""
    return torch.cat(list(vectors))


def linear(x: Tensor, layer: LayerWeights) -> Tensor:
    """A linear layer with its LoRAs: (..., in) -> (..., out). The weight may be a 1x1 convolution's, (out, in, 1, 1).

    LoRAs are added, or merged into a copy of the weight, whichever takes less memory traffic. If the weight exists in
    eight bits only, layer.weight is a tensor on torch's meta device, and the 8-bit weight is decoded or multiplied as
    it is; see quantized.is_decoded.
    """
    layer = layer._replace(weight=layer.weight.flatten(1))
    if layer.weight.is_meta and is_decoded(layer):
        layer = layer._replace(weight=decoded(layer.low_bit[0], x.dtype), low_bit=())
    if layer.low_rank is not None and merges(layer, x.numel()):
        layer = merged(layer)
    if layer.weight.is_meta:
        product = quantized_linear(x, layer)
    else:
        product = functional.linear(x, layer.weight, layer.bias)
    return product if layer.low_rank is None else add_low_rank(product, x, layer.low_rank)


def merges(layer: LayerWeights, numbers: int) -> bool:
    """Whether merging a layer's LoRAs into its weight (out, in) takes less memory traffic than adding their products.
    False for a layer without LoRAs, and for LoRAs with scales, because the host rounds the input of those as well.

    Merging reads and writes the weight once more. Adding reads the input once more, and reads or writes the output four
    times. numbers: how many numbers the layer's input has.
    """
    if layer.low_rank is None or layer.low_rank.scales:
        return False
    out, width = layer.weight.shape
    return 2 * layer.weight.numel() < numbers + 4 * numbers // width * out


def add_low_rank(product: Tensor, x: Tensor, low_rank: LowRank) -> Tensor:
    """Add the products of a linear layer's LoRAs in place to the layer's product, (..., out), and return the product.
    x: the layer's input, (..., in)."""
    down = low_rank.down.flatten(1)
    rank = 0
    hidden = functional.linear(x.to(down.dtype), down)
    # If possible, the GEMM itself adds to the output, which costs nothing.
    adds = not low_rank.scales and product.is_contiguous() and product.dtype == hidden.dtype
    for index, (row, up) in enumerate(low_rank.ups):
        rows, ranks = up.shape
        part = hidden[..., rank:rank + ranks]
        if adds:
            together = product.view(-1, product.shape[-1])
            together[:, row:row + rows].addmm_(part.flatten(0, -2), up.t())
        else:
            product[..., row:row + rows] += low_rank.scaled(index, functional.linear(part, up))
        rank += ranks
    return product


def pointwise(image: Tensor, layer: LayerWeights) -> Tensor:
    """A 1x1 convolution as a GEMM, with its LoRAs: (batch, in, h, w) -> (batch, out, h, w). Computed as a batched
    product for contiguous images, and as a linear layer over the pixels for channels-last images and for weights that
    exist in eight bits only."""
    batch, _, height, width = image.shape
    # In channels-last order, the pixels are the rows of a linear layer. 8-bit weights only have that form.
    if not image.is_contiguous() or layer.weight.is_meta:
        return tokens_to_image(linear(image_to_tokens(image), layer), height, width)
    weight = layer.weight.flatten(1).expand(batch, -1, -1)
    pixels = image.flatten(2)
    if layer.bias is None:
        product = torch.bmm(weight, pixels)
    else:
        product = torch.baddbmm(layer.bias[None, :, None], weight, pixels)
    if layer.low_rank is not None:
        add_low_rank(product.mT, pixels.mT, layer.low_rank)
    return product.view(batch, -1, height, width)


def convolution(image: Tensor, layer: LayerWeights, shape: Convolution) -> Tensor:
    """A square 2D convolution with its LoRAs: (batch, in, h, w) -> (batch, out, h, w), padded with zeros or, if
    shape.circular, with the opposite edge."""
    padding = shape.padding
    if shape.circular:
        image = functional.pad(image, [padding] * 4, mode="circular")
        padding = 0
    product = functional.conv2d(image, layer.weight, layer.bias, shape.stride, padding)
    if layer.low_rank is not None:
        low_rank = layer.low_rank
        rank = 0
        hidden = functional.conv2d(image.to(low_rank.down.dtype), low_rank.down, None, shape.stride, padding)
        for index, (_, up) in enumerate(low_rank.ups):
            ranks = up.shape[1]
            added = functional.conv2d(hidden[:, rank:rank + ranks], up[:, :, None, None])
            product += low_rank.scaled(index, added)
            rank += ranks
    return product


def group_norm(
    image: Tensor, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
    consumer: LayerWeights | None = None,
) -> Tensor:
    """The group norm of image + shift (batch, channels), followed by SiLU if silu, in the image's dtype."""
    if shift is not None:
        image = image + shift[:, :, None, None]
    normed = functional.group_norm(image, norm.groups, layer.weight, layer.bias, norm.eps)
    return functional.silu(normed, inplace=True) if silu else normed


def residual_norm(
    residual: Residual, layer: LayerWeights | None, norm: LayerNorm | RMSNorm | AdaptiveNorm, consumer: LayerWeights,
    modulation: Modulation | None = None,
) -> tuple[Residual, Tensor]:
    """(the residual with only its tokens, to which all its other parts were added; its norm with modulation, in the
    dtype of the consumer's weight). RMS norms are computed in float32. layer: the norm's weight and bias; None for an
    AdaptiveNorm."""
    tokens = materialize(residual)
    if isinstance(norm, RMSNorm):
        assert layer is not None
        normed = wide_rms_norm(tokens, layer, norm)
    elif layer is None:
        normed = functional.layer_norm(tokens, (norm.width,), eps=norm.eps)
    else:
        normed = functional.layer_norm(tokens, (norm.width,), layer.weight, layer.bias, norm.eps)
    if modulation is not None:
        normed = normed * modulation.scale[:, None]
        if modulation.shift is not None:
            normed = normed + modulation.shift[:, None]
    return Residual(tokens), normed.to(consumer.weight.dtype)


def rms_norm(x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
    """The RMS norm of x (..., width) in the dtype of x, computed in float32."""
    return wide_rms_norm(x, layer, norm).to(x.dtype)


def wide_rms_norm(x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
    """The RMS norm of x (..., width), computed and returned in float32. torch has no RMS norm before 2.4."""
    wide = x.float()
    weight = layer.weight.float() + 1 if norm.plus_one else layer.weight
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * weight


def split_heads(projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
    """(batch, tokens, heads of all parts * head width) -> one (batch, heads, tokens, head width) for each part, with
    its norm and rotary embedding applied. Parts without norm and rotary embedding are views of `projected`."""
    numbers = [part.number for part in parts]
    width = projected.shape[-1] // sum(numbers)
    pieces = projected.split([number * width for number in numbers], dim=-1)
    return [heads_of(piece, part) for piece, part in zip(pieces, parts, strict=True)]


def heads_of(projected: Tensor, part: Heads) -> Tensor:
    """The heads (batch, heads, tokens, head width) of a projection (batch, tokens, heads * head width), normed and
    rotated as `part` describes."""
    heads = projected.unflatten(-1, (part.number, -1)).transpose(1, 2)
    if part.norm is not None:
        heads = rms_norm(heads, *part.norm)
    return heads if part.rotary is None else rotated(heads, part.rotary)


def rotated(heads: Tensor, rotary: Rotary) -> Tensor:
    """Heads of queries or keys, (batch, heads, tokens, head width), rotated by a rotary embedding in float32, and
    rounded to their dtype."""
    cosines = rotary.cosines
    sines = rotary.sines
    if cosines.dim() == 3:  # positions of each row: the same for its heads
        cosines = cosines[:, None]
        sines = sines[:, None]
    wide = heads.float()
    if rotary.interleaved:
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = wide.chunk(2, dim=-1)
    pairs = cosines * first - sines * second, sines * first + cosines * second
    together = torch.stack(pairs, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(pairs, dim=-1)
    return together.to(heads.dtype)


def add_linear(
    residual: Residual, x: Tensor, layer: LayerWeights, gate: Tensor | None = None, norm: WeightedNorm | None = None
) -> Residual:
    """residual + gate * norm(linear(x, layer)), without gate or norm if it is None. The sum is computed now, as new
    tokens, and not deferred. The given residual's own update and biases stay as they are."""
    tokens = residual.tokens
    update = linear(x, layer)
    if norm is not None:
        update = rms_norm(update, *norm)
    if gate is None:
        return residual._replace(tokens=tokens + update)
    return residual._replace(tokens=torch.addcmul(tokens, gate[:, None].to(tokens.dtype), update.to(tokens.dtype)))


def materialize(residual: Residual) -> Tensor:
    """The residual's value, as one tensor in the dtype of its tokens; the tokens themselves if the other parts are all
    None. The native backend calls this function too, with residuals that have updates and biases."""
    tokens = residual.tokens
    update = residual.update
    if update is not None and residual.update_scales is not None:
        update = update * residual.update_scales
    if update is not None and residual.norm is not None:
        update = wide_rms_norm(update, *residual.norm)
    if update is not None and residual.gate is not None:
        update = update * residual.gate[:, None]
    for addend in (residual.deferred_bias, residual.bias, update):
        tokens = tokens if addend is None else tokens + addend.to(tokens.dtype)
    return tokens


def attention(
    query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
) -> Tensor:
    """Softmax attention over (batch, heads, tokens, head width) by torch's own choice of kernel, in float32 if upcast,
    and returned in the query's dtype. mask: see Operators.attention."""
    if not upcast:
        return scaled_dot_product_attention(query, key, value, mask)
    wide = scaled_dot_product_attention(query.float(), key.float(), value.float(), mask)
    return wide.to(query.dtype)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Filled | None = None
) -> Tensor:
    """Softmax attention over (batch, heads, tokens, head width) by torch's own choice of kernel. The output of a query
    that sees no key is zero. mask: see Operators.attention."""
    if isinstance(mask, Filled):
        return grouped_attention(query, key, value, mask.mask(key.shape[2]))
    if mask is None:
        return grouped_attention(query, key, value, None)
    # The softmax of a query without keys is NaN or zero, depending on torch's version and kernel.
    sees_nothing = ~mask.any(dim=-1, keepdim=True)
    mixed = grouped_attention(query, key, value, mask | sees_nothing)
    return mixed.masked_fill(sees_nothing, 0)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """torch's scaled_dot_product_attention, for keys and values that may have fewer heads than the queries. Keys and
    values are repeated if shares_key_heads says that torch's kernel does not support fewer heads. A query that sees no
    key may give NaN. mask: True where a query sees a key; None: everywhere."""
    heads = query.shape[1]
    if key.shape[1] == heads:
        return functional.scaled_dot_product_attention(query, key, value, mask)
    if shares_key_heads(query, mask):
        return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    return functional.scaled_dot_product_attention(query, repeated(key, heads), repeated(value, heads), mask)


def shares_key_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Whether to use torch's enable_gqa, if keys have fewer heads than queries. On a GPU, only flash attention and
    cuDNN support it, in half precision and without a mask; otherwise torch would repeat the heads itself, and store all
    scores. False if torch does not have it."""
    if not HAS_GQA:
        return False
    return query.device.type != "cuda" or (mask is None and query.dtype in (torch.float16, torch.bfloat16))


def repeated(heads: Tensor, count: int) -> Tensor:
    """Heads of keys or values, (batch, heads, tokens, width), each repeated count / heads times, so that there are
    `count` heads. count: a multiple of heads."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)


def gated(tokens: Tensor, unit: GatedUnit, consumer: LayerWeights | None = None) -> Tensor:
    """A gated linear unit: value * activation(gate) of the two halves of tokens, (..., 2 n) -> (..., n). The gate is
    the first half if unit.gate_first, otherwise the second."""
    value, gate = tokens.chunk(2, dim=-1)
    if unit.gate_first:
        value, gate = gate, value
    return value * activated(gate, unit.activation)


def sigmoid_gated(x: Tensor, gate: Tensor, consumer: LayerWeights | None = None) -> Tensor:
    """x * sigmoid(gate), of the same shape each."""
    return x * torch.sigmoid(gate)


def gated_linear(x: Tensor, layer: LayerWeights, unit: GatedUnit, consumer: LayerWeights) -> Tensor:
    """gated(linear(x, layer), unit): (..., in) -> (..., out / 2)."""
    return gated(linear(x, layer), unit, consumer)


def activated_linear(x: Tensor, layer: LayerWeights, activation: Activation, consumer: LayerWeights) -> Tensor:
    """activation(linear(x, layer)): (..., in) -> (..., out)."""
    return activated(linear(x, layer), activation)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """activation(x), as a new tensor. activation: any Activation."""
    if activation is Activation.SILU:
        return functional.silu(x)
    if activation is Activation.SIGMOID:
        return torch.sigmoid(x)
    return functional.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return functional.silu(x)


def residual_add(image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    """image + update + bias (channels,), as a new image."""
    return image + (update if bias is None else update + bias[:, None, None])


def concatenate(image: Tensor, skip: Tensor) -> Tensor:
    """image and skip, concatenated along the channels, as a copy."""
    return torch.cat([image, skip], dim=1)


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """An image (batch, channels, h, w), resized to (height, width) by nearest neighbour."""
    return functional.interpolate(image, size=(height, width), mode="nearest")


def image_to_tokens(image: Tensor) -> Tensor:
    """(batch, channels, h, w) -> (batch, h * w, channels). A view if the image is channels-last, otherwise a copy."""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def tokens_to_image(tokens: Tensor, height: int, width: int) -> Tensor:
    """(batch, h * w, channels) -> (batch, channels, h, w), a view in channels-last order."""
    image: Tensor = tokens.unflatten(1, (height, width))
    return image.permute(0, 3, 1, 2)


def bias_or_zeros(norm: LayerWeights) -> Tensor:
    """A norm's bias; new zeros of the shape, dtype and device of its weight if the norm has no bias."""
    return torch.zeros_like(norm.weight) if norm.bias is None else norm.bias


def channels_last(image: Tensor) -> Tensor:
    """The image in channels-last memory format; the same tensor if it is in it already."""
    return image.contiguous(memory_format=torch.channels_last)


class WideNorms:
    """The operators of this module, but with group norms in float32, for a host that computes them so, as under
    torch.autocast: the norm and the SiLU after it are computed in float32, and the result is rounded once, after the
    SiLU."""

    def __getattr__(self, name: str) -> Any:
        """The function of this name in this module, which is how all operators but group_norm are found. Raises
        KeyError if there is none."""
        return globals()[name]

    def group_norm(
        self, image: Tensor, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        consumer: LayerWeights | None = None,
    ) -> Tensor:
        """The group norm of image + shift (batch, channels), followed by SiLU if silu, computed in float32 and rounded
        once to the image's dtype. The shift is added in the image's dtype."""
        if shift is not None:
            image = image + shift[:, :, None, None]
        wide = LayerWeights(layer.weight.float(), None if layer.bias is None else layer.bias.float())
        return group_norm(image.float(), wide, norm, silu).to(image.dtype)
