"""Layer norm with the residual before it, and GEGLU, over rows of tokens."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import GEGLU, LAYER_NORM, Cut


@triton.jit(do_not_specialize=["has_residual", "has_bias"])
def layer_norm_row(
    tokens, residual, weight, bias, summed, output, width, has_residual, has_bias, eps, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(tokens + start + column, inside, 0.0).to(tl.float32)
    if has_residual != 0:
        values += tl.load(residual + start + column, inside, 0.0).to(tl.float32)
        tl.store(summed + start + column, values.to(summed.dtype.element_ty), inside)
    mean = tl.sum(values, 0) / width
    distance = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(distance * distance, 0) / width + eps)
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    tl.store(output + start + column, (distance * scale * factor + offset).to(output.dtype.element_ty), inside)


@triton.jit
def geglu_row(tokens, output, width, BLOCK: tl.constexpr):
    # Rows and their blocks on one axis: the other two end at 65535, and a batch of large pictures has more rows.
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tokens + row * 2 * width + column
    value = tl.load(source, inside, 0.0).to(tl.float32)
    gate = tl.load(source + width, inside, 0.0).to(tl.float32)
    gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(output + row * width + column, (value * gate).to(output.dtype.element_ty), inside)


def layer_norm(
    tokens: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None,
    cut: Cut = LAYER_NORM.candidates[0],
) -> tuple[Tensor, Tensor]:
    """(tokens + residual, its layer norm); all (..., width) and contiguous. Norms the sum before it is rounded."""
    width = tokens.shape[-1]
    output = torch.empty_like(tokens)
    summed = tokens if residual is None else torch.empty_like(tokens)
    layer_norm_row[(tokens.numel() // width,)](
        tokens, tokens if residual is None else residual, weight, weight if bias is None else bias, summed, output,
        width, int(residual is not None), int(bias is not None), eps, triton.next_power_of_2(width), num_warps=cut[0],
    )
    return summed, output


def geglu(tokens: Tensor, cut: Cut = GEGLU.candidates[0]) -> Tensor:
    """(..., 2 n) -> (..., n), contiguous: the first half times the GELU (erf form) of the second."""
    width = tokens.shape[-1] // 2
    block, warps = cut
    output = tokens.new_empty((*tokens.shape[:-1], width))
    rows = tokens.numel() // (2 * width)
    geglu_row[(rows * triton.cdiv(width, block),)](tokens, output, width, block, num_warps=warps)
    return output
