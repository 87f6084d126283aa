"""The reference operators: plain torch, any device, any dtype. Images stay in the format they come in."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import LayerWeights, LowRank, merged
from ...core.leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm, TimeEmbedding
from ...core.operators import Residual, Rotary


def sinusoids(timestep: Tensor, time: TimeEmbedding) -> Tensor:
    """As ldm's timestep_embedding and diffusers' get_timestep_embedding (frequency_shift is the latter's
    downscale_freq_shift; ldm's is 0). Channels are even in every known model."""
    angles = timestep[:, None].float() * frequencies(time, timestep.device)[None] * time.scale
    waves = (angles.cos(), angles.sin())
    return torch.cat(waves if time.cosine_first else waves[::-1], dim=-1)


def frequencies(time: TimeEmbedding, device: torch.device) -> Tensor:
    """Those of the sinusoids, (channels / 2,) in float32. In the order of the hosts' own sums: another one rounds
    otherwise, and some models make a thousand times as much of it."""
    half = time.channels // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=device)
    return torch.exp(exponents / (half - time.frequency_shift))


def join(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(vectors))


def linear(x: Tensor, layer: LayerWeights) -> Tensor:
    layer = layer._replace(weight=layer.weight.flatten(1))
    if layer.low_rank is not None and merges(layer, x.numel()):
        layer = merged(layer)
    product = functional.linear(x, layer.weight, layer.bias)
    return product if layer.low_rank is None else add_low_rank(product, x, layer.low_rank)


def merges(layer: LayerWeights, numbers: int) -> bool:
    """Whether LoRAs are less work in a weight (out, in), which is read and written once more, than beside its product
    with tokens of so many numbers: they are read once more, and what comes out is written or read four times. Those
    that are computed in a type of their own are never merged: their input is rounded too."""
    if layer.low_rank is None or layer.low_rank.scales:
        return False
    out, width = layer.weight.shape
    return 2 * layer.weight.numel() < numbers + 4 * numbers // width * out


def add_low_rank(product: Tensor, x: Tensor, low_rank: LowRank) -> Tensor:
    """What LoRAs add to a linear layer's product (..., out), written into it. x: (..., in)."""
    down, rank = low_rank.down.flatten(1), 0
    hidden = functional.linear(x.to(down.dtype), down)
    for index, (row, up) in enumerate(low_rank.ups):
        rows, ranks = up.shape
        added = functional.linear(hidden[..., rank:rank + ranks], up)
        product[..., row:row + rows] += low_rank.scaled(index, added)
        rank += ranks
    return product


def pointwise(image: Tensor, layer: LayerWeights) -> Tensor:
    batch, _, height, width = image.shape
    if not image.is_contiguous():  # channels last: the pixels already are the rows of the GEMM
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
    padding = shape.padding
    if shape.circular:
        image, padding = functional.pad(image, [padding] * 4, mode="circular"), 0
    product = functional.conv2d(image, layer.weight, layer.bias, shape.stride, padding)
    if layer.low_rank is not None:
        low_rank, rank = layer.low_rank, 0
        hidden = functional.conv2d(image.to(low_rank.down.dtype), low_rank.down, None, shape.stride, padding)
        for index, (_, up) in enumerate(low_rank.ups):
            ranks = up.shape[1]
            added = functional.conv2d(hidden[:, rank:rank + ranks], up[:, :, None, None])
            product += low_rank.scaled(index, added)
            rank += ranks
    return product


def group_norm(
    image: Tensor, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
    reader: LayerWeights | None = None,
) -> Tensor:
    if shift is not None:
        image = image + shift[:, :, None, None]
    normed = functional.group_norm(image, norm.groups, layer.weight, layer.bias, norm.eps)
    return functional.silu(normed, inplace=True) if silu else normed


def layer_norm(
    residual: Residual, layer: LayerWeights, norm: LayerNorm | AdaptiveNorm, reader: LayerWeights
) -> tuple[Residual, Tensor]:
    tokens, weight, bias = materialize(residual), layer.weight, layer.bias
    if isinstance(norm, LayerNorm):
        return Residual(tokens), functional.layer_norm(tokens, (norm.width,), weight, bias, norm.eps)
    normed = functional.layer_norm(tokens, (norm.width,), eps=norm.eps) * weight[:, None]
    return Residual(tokens), (normed if bias is None else normed + bias[:, None]).to(reader.weight.dtype)


def rms_norm(x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
    """torch has one from 2.4 on."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * layer.weight).to(x.dtype)


def normed_heads(
    projected: Tensor, heads: int, norms: Sequence[tuple[LayerWeights, RMSNorm] | None], rotary: Rotary | None
) -> list[Tensor]:
    batch, tokens, _ = projected.shape
    parts = projected.view(batch, tokens, len(norms), heads, -1).permute(2, 0, 3, 1, 4).unbind()
    normed = [part if norm is None else rms_norm(part, *norm) for part, norm in zip(parts, norms, strict=True)]
    if rotary is None:
        return normed
    return [part if norm is None else apply_rotary(part, rotary) for part, norm in zip(normed, norms, strict=True)]


def apply_rotary(heads: Tensor, rotary: Rotary) -> Tensor:
    """Queries or keys, (batch, heads, tokens, width)."""
    (cosines, sines), (first, second) = rotary, heads.float().chunk(2, dim=-1)
    return torch.cat([cosines * first - sines * second, sines * first + cosines * second], dim=-1).to(heads.dtype)


def add_linear(residual: Residual, x: Tensor, layer: LayerWeights, gate: Tensor | None = None) -> Residual:
    tokens, update = residual.tokens, linear(x, layer)
    if gate is None:
        return residual._replace(tokens=tokens + update)
    return residual._replace(tokens=torch.addcmul(tokens, gate[:, None].to(tokens.dtype), update.to(tokens.dtype)))


def materialize(residual: Residual) -> Tensor:
    tokens, *vectors, update, scales, gate = residual
    if update is not None and scales is not None:
        update = update * scales
    if update is not None and gate is not None:
        update = update * gate[:, None]
    for addend in (*vectors, update):
        tokens = tokens if addend is None else tokens + addend.to(tokens.dtype)
    return tokens


def attention(query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
    if not upcast:
        return functional.scaled_dot_product_attention(query, key, value)
    wide = functional.scaled_dot_product_attention(query.float(), key.float(), value.float())
    return wide.to(query.dtype)


def geglu(tokens: Tensor, reader: LayerWeights | None = None) -> Tensor:
    value, gate = tokens.chunk(2, dim=-1)
    return value * functional.gelu(gate)


def gated_linear(x: Tensor, layer: LayerWeights, reader: LayerWeights) -> Tensor:
    return geglu(linear(x, layer), reader)


def gelu_linear(x: Tensor, layer: LayerWeights, reader: LayerWeights) -> Tensor:
    return functional.gelu(linear(x, layer))


def silu(x: Tensor) -> Tensor:
    return functional.silu(x)


def residual_add(image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    return image + (update if bias is None else update + bias[:, None, None])


def concatenate(image: Tensor, skip: Tensor) -> Tensor:
    return torch.cat([image, skip], dim=1)


def resize(image: Tensor, height: int, width: int) -> Tensor:
    return functional.interpolate(image, size=(height, width), mode="nearest")


def image_to_tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def tokens_to_image(tokens: Tensor, height: int, width: int) -> Tensor:
    image: Tensor = tokens.unflatten(1, (height, width))
    return image.permute(0, 3, 1, 2)


def bias_or_zeros(norm: LayerWeights) -> Tensor:
    """What a norm adds."""
    return torch.zeros_like(norm.weight) if norm.bias is None else norm.bias


def channels_last(image: Tensor) -> Tensor:
    """The same image with its pixels' channels side by side in memory; itself if it is so already."""
    return image.contiguous(memory_format=torch.channels_last)


class WideNorms:
    """The same operators, with group norms in float32 up to their end, as torch.autocast has them: what comes out of
    SiLU is rounded, and not what goes into it too."""

    def __getattr__(self, name: str) -> Any:
        return globals()[name]

    def group_norm(
        self, image: Tensor, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        reader: LayerWeights | None = None,
    ) -> Tensor:
        if shift is not None:
            image = image + shift[:, :, None, None]
        wide = LayerWeights(layer.weight.float(), None if layer.bias is None else layer.bias.float())
        return group_norm(image.float(), wide, norm, silu).to(image.dtype)
