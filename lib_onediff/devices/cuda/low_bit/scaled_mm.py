"""Matrix products in float8 (e4m3) with one scale for each factor.

Lossy: three bits of every factor are kept after the point. The type is that of Micikevicius et al. 2022 (FP8 Formats
for Deep Learning). It keeps as many bits of what is a thousand times smaller, so one scale serves most factors; with a
scale for every row and column, libraries are slower, or have no product at all (compute capability 8.9).
"""
from __future__ import annotations

import torch
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedTokens
from ....weights.low_bit import Kind, largest_of

# A row of zeros has this for its largest value.
SMALLEST_MAXIMUM = 1e-12
# The two factors lie as multiples of 16 bytes, or no library multiplies them.
ALIGNED = 16


def product(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype) -> Tensor:
    """(rows, in), which have one scale, times (out, in), plus bias (out,): (rows, out) in the result's dtype, summed in
    float32.

    Raises RuntimeError where this torch or this device cannot.
    """
    if weight.scales.numel() > 1:
        # What was not scaled yet does not overflow in bfloat16.
        sums = scaled_sums(tokens, weight.values, torch.ones_like(tokens.scales), None, torch.bfloat16)
        sums = sums.mul_(weight.scales)
        return (sums if bias is None else sums.add_(bias)).to(result)
    return scaled_sums(tokens, weight.values, weight.scales, bias, result)


def scaled_sums(
    tokens: QuantizedTokens, weight: Tensor, scale: Tensor, bias: Tensor | None, result: torch.dtype
) -> Tensor:
    return torch._scaled_mm(
        tokens.values, weight.t(), scale_a=tokens.scales, scale_b=scale,
        bias=None if bias is None else bias.to(result), out_dtype=result, use_fast_accum=True,
    )


def update(tokens: QuantizedTokens, weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """The product of tokens whose rows may have scales, which are left to who reads it: (rows, out), and those scales,
    (rows, 1). In bfloat16, in which what was not scaled does not overflow."""
    if tokens.unit is None:
        return product(tokens, weight, None, torch.bfloat16), None
    return product(tokens._replace(scales=tokens.unit), weight, None, torch.bfloat16), tokens.scales


def rounded_rows(rows: Tensor, kind: Kind, one_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, width) as values of the same shape in eight bits, and the scales in float32 that give it back: (rows, 1),
    each taken from its row's largest value, or the one that is given."""
    wide = rows.float()
    scales = one_scale
    if scales is None:
        scales = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST_MAXIMUM) / kind.largest
    ratio = wide / scales
    return (ratio if kind.dtype.is_floating_point else (ratio + 0.5).floor()).to(kind.dtype), scales


def one_scale_of(rows: Tensor, kind: Kind) -> Tensor:
    """(1, 1), in float32: the scale for all rows that their largest value asks for."""
    return (largest_of(rows).clamp_min(SMALLEST_MAXIMUM) / kind.largest).view(1, 1)
