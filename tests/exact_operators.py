"""The operators in float64, written out: what every implementation of them is held to.

torch's own group norm is no yardstick: on a CPU it loses all digits of a channels-last image far from zero.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.devices.torch.quantized import hadamard


def group_norm(
    image: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool = False,
    shift: Tensor | None = None,
) -> Tensor:
    """Group norm of image (batch, channels, height, width) + shift (batch, channels), then SiLU if silu."""
    values = image.double() if shift is None else image.double() + shift.double()[:, :, None, None]
    grouped = values.contiguous().unflatten(1, (groups, -1)).flatten(2)
    distance = grouped - grouped.mean(2, keepdim=True)
    normed = distance / (distance.square().mean(2, keepdim=True) + eps).sqrt()
    output = normed.view(values.shape) * weight.double()[:, None, None] + bias.double()[:, None, None]
    return output * output.sigmoid() if silu else output


def layer_norm(tokens: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension."""
    distance = tokens.double() - tokens.double().mean(-1, keepdim=True)
    normed = distance / (distance.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def geglu(tokens: Tensor) -> Tensor:
    """(..., 2 n) -> (..., n): the first half times the GELU (erf form) of the second."""
    value, gate = tokens.double().chunk(2, dim=-1)
    # erfc and not 1 + erf: for gates far below zero the sum would have no digits left.
    return value * gate * 0.5 * torch.special.erfc(-gate * 0.5**0.5)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """Heads (batch, heads, tokens, width), rotated as complex numbers. cosines, sines: (batch or 1, tokens, width / 2).
    """
    wide = heads.double()
    pairs = wide.unflatten(-1, (-1, 2)) if interleaved else wide.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = torch.complex(cosines.double(), sines.double())[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def stored_layer(layer: LayerWeights) -> LayerWeights:
    """A layer that is there in eight bits alone, as its file has it: decoded, with its LoRA, if it has one, added."""
    [quantized] = layer.low_bit
    weight = quantized.values.double() * quantized.scales.double().t()
    group = quantized.rotation
    if group:
        weight = (weight.unflatten(-1, (-1, group)) @ hadamard(group, weight.device).double()).flatten(-2)
    if layer.low_rank is not None:
        [(_, up)] = layer.low_rank.ups
        weight = weight + up.double() @ layer.low_rank.down.double()
    return LayerWeights(weight, None if layer.bias is None else layer.bias.double())


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Of heads, (batch, heads, tokens, width); keys and values may have fewer heads. mask: see core.operators."""
    shared_by = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(shared_by, dim=1) for part in (key, value))
    scores = query.double() @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1) @ value
    weights = torch.where(mask, (scores - scores.amax(-1, keepdim=True)).exp(), torch.zeros_like(scores))
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ value


def worst_error(output: Tensor, exact: Tensor) -> float:
    """The largest difference, in units of what rounding to output's dtype costs at the size of the exact value."""
    assert output.shape == exact.shape
    unit = torch.finfo(output.dtype).eps * exact.abs().clamp_min(1.0)
    return float(((output.double() - exact).abs() / unit).max())


def relative_error(output: Tensor, exact: Tensor) -> float:
    """||output - exact|| / ||exact||."""
    assert output.shape == exact.shape
    return float((output.double() - exact.double()).norm() / exact.double().norm())


def rounded_rows(rows: Tensor, kind: Any, one_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, width) as values of the same shape in eight bits, and the scales in float32 that give it back: (rows, 1),
    each taken from its row's largest value, or the one that is given. kind: see weights.low_bit.Kind."""
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / kind.largest if one_scale is None else one_scale
    ratio = wide / scales
    return (ratio if kind.dtype.is_floating_point else (ratio + 0.5).floor()).to(kind.dtype), scales


def one_scale_of(rows: Tensor, kind: Any) -> Tensor:
    """(1, 1), in float32: the scale for all rows that their largest value asks for."""
    return (rows.float().abs().amax().clamp_min(1e-12) / kind.largest).view(1, 1)


def hosts_rows(rows: Tensor, matrix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows (rows, width) as int8 and their scales (rows, 1) in float32, as the hosts' CUDA kernels round the input of
    a layer that is stored in INT8. matrix: by which groups of the row are multiplied first; a rotated row is rounded to
    its dtype behind its scale."""
    wide = rows.float()
    if matrix is not None:
        wide = (wide.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)
    scales = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    # In float16 the scale of a small row may be too small for a byte: ours is larger then.
    divisors = torch.maximum(scales.to(rows.dtype).float(), scales * (127 / 127.2))
    ratio = (wide.to(rows.dtype).float() / divisors).to(rows.dtype).float()
    return ratio.round().clamp(-128, 127).to(torch.int8), scales
