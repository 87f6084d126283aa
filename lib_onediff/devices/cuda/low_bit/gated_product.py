"""A feed-forward's first product and its GEGLU by one kernel: the product, twice as wide as what is left of it, is
never stored.

In float8, whose scale for what comes out is known beforehand (model.low_bit.gated_scale); a scale for every row would
have to wait for the whole row.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedTokens
from ..kernels.launch_config import GATED_PRODUCT, LaunchConfig
from .int8_mm import TensorDescriptor, tile_at


@triton.jit
def biased(sums, scales, weight_scales, bias, column, out, has_bias, has_scales):
    """(M, N) in float32: the sums of a tile times the scales of tokens and weight, plus the bias."""
    inside = column < out
    scale = tl.load(scales) * tl.load(weight_scales + column * has_scales, inside, 0.0)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    return sums * scale[None, :] + offset[None, :]


@triton.jit(do_not_specialize=["rows", "has_bias", "has_scales"])
def gated_tile(
    values, scales, weight, weight_scales, bias, output, output_scale, rows, width, half, has_bias, has_scales,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """A program for each tile of the output, (M, N). values, weight, output: descriptors of tensors. half: the rows of
    weight that give values; as many that give gates follow."""
    down, across = tile_at(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(half, N), GROUP)
    value = tl.zeros((M, N), tl.float32)
    gate = tl.zeros((M, N), tl.float32)
    for done in range(0, tl.cdiv(width, K)):
        tokens = values.load([down * M, done * K])
        value = tl.dot(tokens, weight.load([across * N, done * K]).T, value)
        gate = tl.dot(tokens, weight.load([half + across * N, done * K]).T, gate)
    column = across * N + tl.arange(0, N)
    value = biased(value, scales, weight_scales, bias, column, half, has_bias, has_scales)
    gate = biased(gate, scales, weight_scales, bias, half + column, 2 * half, has_bias, has_scales)
    mixed = value * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * (0.5 / tl.load(output_scale))
    output.store([down * M, across * N], mixed.to(output.dtype))


def product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, output_scale: Tensor,
    config: LaunchConfig = GATED_PRODUCT.candidates[1],
) -> QuantizedTokens:
    """The GEGLU (erf form) of tokens (rows, in), which have one scale, times a weight (2 n, in) plus bias (2 n,):
    (rows, n) in float8, with one scale, output_scale (1, 1).

    Raises what Triton raises.
    """
    m, n, k, group, warps, stages = config
    (rows, width), half = tokens.values.shape, len(weight.values) // 2
    output = torch.empty((rows, half), device=tokens.values.device, dtype=tokens.values.dtype)
    # Triton compiles a kernel for each set of types: a bias that is not there is stood for by something.
    offset, has_bias = (weight.scales, 0) if bias is None else (bias, 1)
    gated_tile[(triton.cdiv(rows, m) * triton.cdiv(half, n),)](
        TensorDescriptor.from_tensor(tokens.values, [m, k]), tokens.scales,
        TensorDescriptor.from_tensor(weight.values, [n, k]), weight.scales, offset,
        TensorDescriptor.from_tensor(output, [m, n]), output_scale, rows, width, half, has_bias,
        int(weight.scales.numel() > 1), m, n, k, group, num_warps=warps, num_stages=stages,
    )
    return QuantizedTokens(output, output_scale, tokens.shape)
