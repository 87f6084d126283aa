"""Rows of tokens in eight bits, made where they are computed: layer norm, GEGLU, and plain rows; and weights.

A layer norm's rows in float8 share one scale, all others have one each.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedTokens, Stream
from ....weights.low_bit import Kind, empty_like, kind_of, largest_of
from ..kernels.launch_config import LAYER_NORM, LaunchConfig
from ..kernels.tokens import deferred_vector, gated, norm_of
from .float8 import SMALLEST_MAXIMUM

# Columns that four warps hold in their registers.
FEW_COLUMNS = 2048


@triton.jit
def scale_of(numbers, valid, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """(rows, 1): by what values of eight bits are multiplied to give these rows of numbers. A row with a NaN or an
    infinity has NaN."""
    inside = tl.where(valid, numbers, 0.0)
    # A maximum passes over a NaN, and int8 has none.
    strange = tl.sum(inside * 0.0, 1)
    return (tl.maximum(tl.max(tl.abs(inside), 1), SMALLEST) / LARGEST + strange)[:, None]


@triton.jit
def bounded_scale(factor, offset, farthest, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """(1, 1): a scale for all rows that a layer norm of these vectors, (1, columns), may give. No number of a row is
    farther from its mean than so many deviations. A power of two: float8 keeps the same digits by any other that is
    large enough."""
    largest = tl.max(farthest * tl.abs(factor) + tl.abs(offset), 1)
    exponent = (tl.maximum(largest, SMALLEST) / LARGEST).to(tl.int32, bitcast=True) & 0x7F800000
    return (2.0 * exponent.to(tl.float32, bitcast=True))[:, None]


@triton.jit
def store_once(target, number):
    """One number, (1, 1), by the first program of all."""
    nothing = tl.zeros((1, 1), tl.int32)
    tl.store(target + nothing, number, nothing == tl.program_id(0))


@triton.jit
def store_row_scale(values, scales, unit, row, scale):
    """The scale (1, 1) of a row and, for values in float8, the number one."""
    tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
    if values.dtype.element_ty != tl.int8:
        store_once(unit, tl.full((1, 1), 1.0, tl.float32))


@triton.jit
def store_rounded(values, place, numbers, scale, valid):
    """Store numbers as multiples of a scale, rounded to the nearest that the type of values has."""
    ratio = numbers / scale
    if values.dtype.element_ty == tl.int8:
        ratio = tl.floor(ratio + 0.5)
    tl.store(values + place, ratio.to(values.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_update", "has_scales", "has_bias"])
def layer_norm_rows(
    tokens, update, update_scales, deferred_bias, addend, weight, bias, deferred_now, values, scales, rows, width,
    has_deferred, has_addend, has_update, has_scales, has_bias, eps, farthest,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):
    """The layer norm of tokens + update * update_scales + deferred_bias + addend.

    Writes its first two summands into tokens, and deferred_bias + addend into deferred_now. farthest: see
    bounded_scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    valid = (row < rows) & inside
    place = row * width + column
    vector = deferred_vector(deferred_bias, addend, column, inside, has_deferred, has_addend)
    tl.store(deferred_now + column, vector, inside & (tl.program_id(0) == 0))
    numbers = tl.load(tokens + place, valid, 0.0).to(tl.float32)
    further = tl.load(update + place, valid & (has_update != 0), 0.0).to(tl.float32)
    numbers += further * tl.load(update_scales + row, (row < rows) & (has_scales != 0), 1.0)
    tl.store(tokens + place, numbers.to(tokens.dtype.element_ty), valid & (has_update != 0))
    numbers += vector
    normed, factor, offset = norm_of(numbers, weight, bias, column, inside, width, has_bias, eps)
    if values.dtype.element_ty == tl.int8:
        scale = scale_of(normed, valid, SMALLEST, LARGEST)
        tl.store(scales + row, scale, row < rows)
    else:
        scale = bounded_scale(factor, offset, farthest, SMALLEST, LARGEST)
        store_once(scales, scale)
    store_rounded(values, place, normed, scale, valid)


@triton.jit
def geglu_row(
    tokens, values, scales, unit, width, BLOCK: tl.constexpr, REST: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One row in two pieces, BLOCK <= width < 2 * BLOCK: a piece has a power of two of columns, and the error function
    of columns that are not there costs as much as of others."""
    row = tl.program_id(0).to(tl.int64)
    source = tokens + row * 2 * width
    first = tl.arange(0, BLOCK)[None, :]
    number = gated(source, width, first, first < width)
    scale = scale_of(number, first < width, SMALLEST, LARGEST)
    if REST:
        second = BLOCK + tl.arange(0, REST)[None, :]
        further = gated(source, width, second, second < width)
        scale = tl.maximum(scale, scale_of(further, second < width, SMALLEST, LARGEST))
        store_rounded(values, row * width + second, further, scale, second < width)
    store_rounded(values, row * width + first, number, scale, first < width)
    store_row_scale(values, scales, unit, row, scale)


@triton.jit
def plain_row(
    tokens, values, scales, one, width, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """ONE_SCALE: for all rows, by the largest number of all, one; otherwise that is the unit, which is written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(tokens + row * width + column, column < width, 0.0).to(tl.float32)
    if ONE_SCALE:
        scale = tl.maximum(tl.load(one + tl.zeros((1, 1), tl.int32)), SMALLEST) / LARGEST
        store_once(scales, scale)
    else:
        scale = scale_of(numbers, column < width, SMALLEST, LARGEST)
        store_row_scale(values, scales, one, row, scale)
    store_rounded(values, row * width + column, numbers, scale, column < width)


def layer_norm(
    stream: Stream, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind,
    config: LaunchConfig = LAYER_NORM.candidates[0],
) -> tuple[Stream, QuantizedTokens]:
    """The stream, deferred_bias one vector in float32 and no update, and its layer norm in a kind of eight bits: in
    float8 by one scale, which weight and bias alone decide.

    Writes the update into the stream's tokens, where there is one. Tokens, update and its scales must be contiguous.
    """
    tokens, deferred_bias, addend, update, update_scales = stream
    width, (rows_together, warps) = tokens.shape[-1], config
    normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
    rows = len(normed.values)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # Triton compiles a kernel for each set of types: what is not there is stood for by something of its type.
    layer_norm_rows[(triton.cdiv(rows, rows_together),)](
        tokens, tokens if update is None else update, deferred_now if update_scales is None else update_scales,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, normed.values, normed.scales, rows, width,
        int(deferred_bias is not None), int(addend is not None), int(update is not None),
        int(update_scales is not None), int(bias is not None), eps, (width - 1) ** 0.5, triton.next_power_of_2(width),
        rows_together, kind.largest, SMALLEST_MAXIMUM, num_warps=warps,
    )
    return Stream(tokens, deferred_now), normed


def geglu(tokens: Tensor, kind: Kind) -> QuantizedTokens:
    """(..., 2 n) -> (..., n) in a kind of eight bits: the first half times the GELU (erf form) of the second."""
    width = tokens.shape[-1] // 2
    output = empty_rows(tokens, width, kind)
    block = 1 << (width.bit_length() - 1)
    rest = 0 if block == width else triton.next_power_of_2(width - block)
    geglu_row[(len(output.values),)](
        tokens, output.values, output.scales, output.scales if output.unit is None else output.unit, width, block, rest,
        kind.largest, SMALLEST_MAXIMUM, num_warps=warps_for(width),
    )
    return output


def rounded(tokens: Tensor, kind: Kind) -> QuantizedTokens:
    """Tokens (..., n) in a kind of eight bits."""
    output = empty_rows(tokens, tokens.shape[-1], kind)
    launch_rows(tokens.contiguous().flatten(0, -2), output.values, output.scales, output.unit)
    return output


def rounded_weight(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """A weight (out, in) in a kind of eight bits."""
    room = empty_like(weight, kind)
    rounded_rows(weight, *room)
    return room


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Round rows, (rows, width), into tensors that are there: values of the same shape, whose type is the kind, and
    scales in float32 that give them back, of as many numbers as rows, or of one."""
    one_scale = scales.numel() < len(rows)
    launch_rows(rows, values, scales, largest_of(rows) if one_scale else torch.empty_like(scales[:1, :1]), one_scale)


def launch_rows(rows: Tensor, values: Tensor, scales: Tensor, one: Tensor | None, one_scale: bool = False) -> None:
    """one: see plain_row; None for int8, which has no unit."""
    kind, width = kind_of(values), rows.shape[1]
    plain_row[(len(rows),)](
        rows, values, scales, scales if one is None else one, width, triton.next_power_of_2(width), kind.largest,
        SMALLEST_MAXIMUM, one_scale, num_warps=warps_for(width),
    )


def warps_for(width: int) -> int:
    return 4 if width <= FEW_COLUMNS else 8


def empty_rows(tokens: Tensor, width: int, kind: Kind, one_scale: bool = False) -> QuantizedTokens:
    """As many rows as there are tokens, of another width."""
    shape = tokens.shape[:-1]
    values = torch.empty((shape.numel(), width), device=tokens.device, dtype=kind.dtype)
    scales = torch.empty((1 if one_scale else len(values), 1), device=tokens.device, dtype=torch.float32)
    unit = None if one_scale or not kind.dtype.is_floating_point else torch.empty_like(scales[:1])
    return QuantizedTokens(values, scales, tuple(shape), unit)
