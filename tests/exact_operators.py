"""The operators in float64, written out: the reference for the tests of all implementations.

torch's own group norm is not used: on a CPU, it loses all digits of a channels-last image whose mean is far from zero.
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
    # erfc and not 1 + erf, because for gates far below zero the sum would have no correct digits.
    return value * gate * 0.5 * torch.special.erfc(-gate * 0.5**0.5)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """Heads (batch, heads, tokens, width), rotated as complex numbers. cosines, sines: (batch or 1, tokens, width /
    2)."""
    wide = heads.double()
    pairs = wide.unflatten(-1, (-1, 2)) if interleaved else wide.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = torch.complex(cosines.double(), sines.double())[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def stored_layer(layer: LayerWeights) -> LayerWeights:
    """The layer in float64, of one that is stored in 8 bits: with the decoded weight, to which its LoRA, if any, is
    added."""
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
    """Attention of (batch, heads, tokens, width). Keys and values may have fewer heads, each shared by several of the
    queries'. mask: as for Operators.attention in core.operators, a tensor."""
    shared_by = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(shared_by, dim=1) for part in (key, value))
    scores = query.double() @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1) @ value
    weights = torch.where(mask, (scores - scores.amax(-1, keepdim=True)).exp(), torch.zeros_like(scores))
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ value


def worst_error(output: Tensor, exact: Tensor) -> float:
    """The largest difference of an element, in units of eps of output's dtype times max(|exact|, 1)."""
    assert output.shape == exact.shape
    unit = torch.finfo(output.dtype).eps * exact.abs().clamp_min(1.0)
    return float(((output.double() - exact).abs() / unit).max())


def relative_error(output: Tensor, exact: Tensor) -> float:
    """||output - exact|| / ||exact||."""
    assert output.shape == exact.shape
    return float((output.double() - exact.double()).norm() / exact.double().norm())


def rounded_rows(rows: Tensor, kind: Any, one_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows (rows, width): returns 8-bit values of the same shape, and float32 scales, (rows, 1), each from its
    row's largest value, or one_scale. kind: see weights.low_bit.Kind."""
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / kind.largest if one_scale is None else one_scale
    ratio = wide / scales
    return (ratio if kind.dtype.is_floating_point else (ratio + 0.5).floor()).to(kind.dtype), scales


def one_scale_of(rows: Tensor, kind: Any) -> Tensor:
    """One float32 scale for all rows, (1, 1), from their largest value."""
    return (rows.float().abs().amax().clamp_min(1e-12) / kind.largest).view(1, 1)


def hosts_rows(rows: Tensor, matrix: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows (rows, width) as the hosts' CUDA kernels quantize the input of a layer stored in INT8: returns int8
    values, and float32 scales (rows, 1). matrix: a rotation, by which groups of a row are multiplied first. The rotated
    row is rounded to rows' dtype, and divided by the scale in that dtype."""
    wide = rows.float()
    if matrix is not None:
        wide = (wide.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)
    scales = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    # In float16, the scale of a small row may be too small for its values to fit; ours is larger then.
    divisors = torch.maximum(scales.to(rows.dtype).float(), scales * (127 / 127.2))
    ratio = (wide.to(rows.dtype).float() / divisors).to(rows.dtype).float()
    return ratio.round().clamp(-128, 127).to(torch.int8), scales
