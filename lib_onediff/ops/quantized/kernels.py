"""Rows of tokens in eight bits, made where they are computed: layer norm, GEGLU, and plain rows."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...model.low_bit import KINDS, Kind
from ...model.operators import QuantizedTokens, Stream
from ..triton.launch_config import LAYER_NORM, LaunchConfig
from ..triton.tokens import deferred_vector
from .scaled_mm import SMALLEST_MAXIMUM

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
def store_rounded(values, place, numbers, scale, valid):
    """Store numbers as multiples of a scale, rounded to the nearest that the type of values has."""
    ratio = numbers / scale
    if values.dtype.element_ty == tl.int8:
        ratio = tl.floor(ratio + 0.5)
    tl.store(values + place, ratio.to(values.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_update", "has_bias"])
def layer_norm_rows(
    tokens, update, deferred_bias, addend, weight, bias, deferred_now, values, scales, rows, width, has_deferred,
    has_addend, has_update, has_bias, eps,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):
    """The layer norm of tokens + update + deferred_bias + addend.

    Writes tokens + update into tokens, and deferred_bias + addend into deferred_now."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    valid = (row < rows) & inside
    place = row * width + column
    vector = deferred_vector(deferred_bias, addend, column, inside, has_deferred, has_addend)
    tl.store(deferred_now + column, vector, inside & (tl.program_id(0) == 0))
    numbers = tl.load(tokens + place, valid, 0.0).to(tl.float32)
    numbers += tl.load(update + place, valid & (has_update != 0), 0.0).to(tl.float32)
    tl.store(tokens + place, numbers.to(tokens.dtype.element_ty), valid & (has_update != 0))
    numbers += vector
    mean = tl.sum(numbers, 1) / width
    distance = tl.where(inside, numbers - mean[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(distance * distance, 1) / width + eps)
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    normed = distance * deviation[:, None] * factor + offset
    scale = scale_of(normed, valid, SMALLEST, LARGEST)
    store_rounded(values, place, normed, scale, valid)
    tl.store(scales + row, scale, row < rows)


@triton.jit
def gated(source, width, column, inside):
    value = tl.load(source + column, inside, 0.0).to(tl.float32)
    gate = tl.load(source + width + column, inside, 0.0).to(tl.float32)
    return value * 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def geglu_row(
    tokens, values, scales, width, BLOCK: tl.constexpr, REST: tl.constexpr, LARGEST: tl.constexpr,
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
    tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)


@triton.jit
def plain_row(
    tokens, values, scales, width, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(tokens + row * width + column, column < width, 0.0).to(tl.float32)
    scale = scale_of(numbers, column < width, SMALLEST, LARGEST)
    store_rounded(values, row * width + column, numbers, scale, column < width)
    tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)


def layer_norm(
    stream: Stream, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind,
    config: LaunchConfig = LAYER_NORM.candidates[0],
) -> tuple[Stream, QuantizedTokens]:
    """The stream, deferred_bias one vector in float32 and no update, and its layer norm in a kind of eight bits.

    Writes the update into the stream's tokens, where there is one. Tokens and update must be contiguous.
    """
    tokens, deferred_bias, addend, update = stream
    width, (rows_together, warps) = tokens.shape[-1], config
    normed = empty_rows(tokens, width, kind)
    rows = len(normed.values)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # Triton compiles a kernel for each set of types: what is not there is stood for by something of its type.
    layer_norm_rows[(triton.cdiv(rows, rows_together),)](
        tokens, tokens if update is None else update, deferred_now if deferred_bias is None else deferred_bias,
        weight if addend is None else addend, weight, weight if bias is None else bias, deferred_now, normed.values,
        normed.scales, rows, width, int(deferred_bias is not None), int(addend is not None), int(update is not None),
        int(bias is not None), eps, triton.next_power_of_2(width), rows_together, kind.largest, SMALLEST_MAXIMUM,
        num_warps=warps,
    )
    return Stream(tokens, deferred_now), normed


def geglu(tokens: Tensor, kind: Kind) -> QuantizedTokens:
    """(..., 2 n) -> (..., n) in a kind of eight bits: the first half times the GELU (erf form) of the second."""
    width = tokens.shape[-1] // 2
    output = empty_rows(tokens, width, kind)
    block = 1 << (width.bit_length() - 1)
    rest = 0 if block == width else triton.next_power_of_2(width - block)
    geglu_row[(len(output.values),)](
        tokens, output.values, output.scales, width, block, rest, kind.largest, SMALLEST_MAXIMUM,
        num_warps=warps_for(width),
    )
    return output


def rounded(tokens: Tensor, kind: Kind) -> QuantizedTokens:
    """Tokens (..., n) in a kind of eight bits."""
    output = empty_rows(tokens, tokens.shape[-1], kind)
    rounded_rows(tokens.contiguous().flatten(0, -2), output.values, output.scales)
    return output


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """As scaled_mm.rounded_rows, into tensors that are there: values (rows, width), whose type is the kind, and scales
    of as many numbers as rows."""
    kind = next(kind for kind in KINDS if kind.dtype == values.dtype)
    width = rows.shape[1]
    plain_row[(len(rows),)](
        rows, values, scales, width, triton.next_power_of_2(width), kind.largest, SMALLEST_MAXIMUM,
        num_warps=warps_for(width),
    )


def warps_for(width: int) -> int:
    return 4 if width <= FEW_COLUMNS else 8


def empty_rows(tokens: Tensor, width: int, kind: Kind) -> QuantizedTokens:
    """As many rows as there are tokens, of another width."""
    shape = tokens.shape[:-1]
    values = torch.empty((shape.numel(), width), device=tokens.device, dtype=kind.dtype)
    scales = torch.empty((len(values), 1), device=tokens.device, dtype=torch.float32)
    return QuantizedTokens(values, scales, tuple(shape))
