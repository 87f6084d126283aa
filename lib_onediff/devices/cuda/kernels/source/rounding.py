"""Kernels that write rows of tokens in eight bits: norms, gated units, and the quantization of existing rows. norm_row
writes 16 bits too.

A number is stored as value * scale: value in int8 or float8, scale in float32. In float8, all rows of a norm share one
scale; all other rows have one each, unless plain_row has ONE_SCALE.

The parameters that the kernels share:
RULE: how int8 rows are rounded. OURS, for weights that Low-bit quantized: once, from float32. The other rules: see
    hosts_rule.py; their KIND is the dtype of weight in layer_norm_rows, of plain in norm_row, and of the inputs
    elsewhere. In float8, OURS.
PLAIN: also write the same numbers in the model's dtype to `plain`; not for OURS. Otherwise, plain is any tensor of the
    model's dtype.
largest: the largest number of the 8-bit format. unit: float32 (1,), to which 1.0 is written for float8.
BLOCK: the number of columns that are processed at once: width rounded up to a power of two, except in gated_row.
has_update, has_bias and so on: 0 if there is no update or no bias, which is then any tensor of a valid dtype.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .hosts_rule import OURS, as_hosts_have, hosts_scale_of, store_as_hosts
from .tokens import deferred_vector, gated, gelu, norm_of, normalized

# The norms of norm_row; kernels.rounding.Norm has the same numbers.
NO_NORM, LAYER, RMS = (tl.constexpr(norm) for norm in range(3))
# The smallest magnitude from which a scale is computed: that of a row of zeros.
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def scale_of(numbers, valid, largest):
    """The scale of each row of numbers, float32 (rows, 1): its largest magnitude, but at least SMALLEST, divided by
    `largest`; NaN for a row with a NaN or an infinity."""
    inside = tl.where(valid, numbers, 0.0)
    # tl.max ignores NaN, and int8 has none, so the scale must be NaN.
    strange = tl.sum(inside * 0.0, 1)
    return (tl.maximum(tl.max(tl.abs(inside), 1), SMALLEST) / largest + strange)[:, None]


@triton.jit
def bounded_scale(factor, offset, farthest, largest):
    """One scale, (1, 1), that is large enough for every row of a layer norm with this weight (factor) and bias
    (offset), each (1, columns), whatever the tokens. farthest: how many standard deviations a number of a row can
    differ from the row's mean, which is sqrt(width - 1). The scale is a power of two: a scale that is larger than
    necessary by such a factor costs float8 no digits."""
    return power_of_two_scale(tl.max(farthest * tl.abs(factor) + tl.abs(offset), 1), largest)[:, None]


@triton.jit
def power_of_two_scale(farthest_number, largest):
    """The smallest power of two above farthest_number / largest."""
    exponent = (tl.maximum(farthest_number, SMALLEST) / largest).to(tl.int32, bitcast=True) & 0x7F800000
    return 2.0 * exponent.to(tl.float32, bitcast=True)


@triton.jit
def store_once(target, number):
    """Store a number (1, 1) at target, in the first program of the grid alone."""
    nothing = tl.zeros((1, 1), tl.int32)
    tl.store(target + nothing, number, nothing == tl.program_id(0))


@triton.jit
def store_row_scale(values, scales, unit, row, scale):
    """Store the scale (1, 1) of a row in scales; if values are in float8, the first program also stores 1.0 in unit."""
    tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
    if values.dtype.element_ty != tl.int8:
        store_once(unit, tl.full((1, 1), 1.0, tl.float32))


@triton.jit
def store_rounded(values, place, numbers, scale, valid):
    """Store numbers / scale at values + place, rounded as by store_nearest."""
    store_nearest(values, place, numbers * (1.0 / scale), valid)


@triton.jit
def store_nearest(values, place, ratio, valid):
    """Store ratio at values + place, rounded to the nearest value of the dtype of values; to int8, halves are rounded
    up."""
    if values.dtype.element_ty == tl.int8:
        ratio = tl.floor(ratio + 0.5)
    tl.store(values + place, ratio.to(values.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_update", "has_scales", "has_bias"])
def layer_norm_rows(
    tokens, update, update_scales, deferred_bias, addend, weight, bias, deferred_now, values, scales, plain, rows,
    width, has_deferred, has_addend, has_update, has_scales, has_bias, eps, farthest, largest, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RULE: tl.constexpr, PLAIN: tl.constexpr,
):
    """Write the layer norm of tokens + update * update_scales + deferred_bias + addend, for ROWS rows, in eight bits.
    If there is an update, also write tokens + update * update_scales to tokens. Also write deferred_bias + addend to
    deferred_now.

    Grid: (blocks of ROWS rows,).
    tokens, update, values, plain: (rows, width). deferred_bias, addend, weight, bias, deferred_now: (width,).
    update_scales: float32 (rows,). scales: float32 (rows,) for int8, (1,) for float8; written.
    farthest: see bounded_scale.
    """
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
    if RULE != OURS:
        KIND: tl.constexpr = weight.dtype.element_ty
        if PLAIN:
            tl.store(plain + place, normed.to(KIND), valid)
        normed = as_hosts_have(normed, valid, KIND, RULE)
        scale = hosts_scale_of(normed)
        tl.store(scales + row, scale, row < rows)
        store_as_hosts(values, place, normed, scale, valid, KIND, RULE)
    else:
        if values.dtype.element_ty == tl.int8:
            scale = scale_of(normed, valid, largest)
            tl.store(scales + row, scale, row < rows)
        else:
            scale = bounded_scale(factor, offset, farthest, largest)
            store_once(scales, scale)
        store_rounded(values, place, normed, scale, valid)


@triton.jit
def gated_row(
    numbers, gates, values, scales, unit, plain, width, numbers_stride, gates_stride, largest, BLOCK: tl.constexpr,
    REST: tl.constexpr, RULE: tl.constexpr, PLAIN: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """Write one row of numbers * activation(gates) in eight bits, with a scale of its own.

    Grid: (rows,). The row is processed in two pieces: the first BLOCK columns, where BLOCK is a power of two and BLOCK
    <= width < 2 * BLOCK; and the remaining ones, where REST is their number rounded up to a power of two, or 0 if there
    are none. In one piece of 2 * BLOCK, the columns beyond the width would take as long as the others.
    numbers, gates: rows of width, numbers_stride and gates_stride apart, in numbers. values, plain: (rows, width).
    scales: float32 (rows,); written. ACTIVATION: see tokens.py.
    """
    row = tl.program_id(0).to(tl.int64)
    numbers += row * numbers_stride
    gates += row * gates_stride
    KIND: tl.constexpr = numbers.dtype.element_ty
    first = tl.arange(0, BLOCK)[None, :]
    number = gated(numbers, gates, first, first < width, ACTIVATION)
    if PLAIN:
        tl.store(plain + row * width + first, number.to(KIND), first < width)
    if RULE != OURS:
        number = as_hosts_have(number, first < width, KIND, RULE)
        scale = hosts_scale_of(number)
    else:
        scale = scale_of(number, first < width, largest)
    if REST:
        second = BLOCK + tl.arange(0, REST)[None, :]
        further = gated(numbers, gates, second, second < width, ACTIVATION)
        if PLAIN:
            tl.store(plain + row * width + second, further.to(KIND), second < width)
        if RULE != OURS:
            further = as_hosts_have(further, second < width, KIND, RULE)
            scale = tl.maximum(scale, hosts_scale_of(further), tl.PropagateNan.ALL)
            store_as_hosts(values, row * width + second, further, scale, second < width, KIND, RULE)
        else:
            scale = tl.maximum(scale, scale_of(further, second < width, largest), tl.PropagateNan.ALL)
            store_rounded(values, row * width + second, further, scale, second < width)
    if RULE != OURS:
        store_as_hosts(values, row * width + first, number, scale, first < width, KIND, RULE)
    else:
        store_rounded(values, row * width + first, number, scale, first < width)
    store_row_scale(values, scales, unit, row, scale)


@triton.jit
def plain_row(
    tokens, values, scales, one, width, largest, BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr, GELU: tl.constexpr,
    RULE: tl.constexpr,
):
    """Quantize one row of tokens (rows, width) to values, or with GELU the row's GELU (erf form). Grid: (rows,).

    ONE_SCALE: all rows have the scale one / largest, where `one` is the largest magnitude of all rows, which is read;
    the first program writes the scale to scales (1,). Only for OURS. Otherwise each row's own scale is written to
    scales (rows,), and `one` is the unit, which is written for float8.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(tokens + row * width + column, column < width, 0.0).to(tl.float32)
    if GELU:
        numbers = gelu(numbers)
    if RULE != OURS:
        KIND: tl.constexpr = tokens.dtype.element_ty
        numbers = as_hosts_have(numbers, column < width, KIND, RULE)
        scale = hosts_scale_of(numbers)
        store_row_scale(values, scales, one, row, scale)
        store_as_hosts(values, row * width + column, numbers, scale, column < width, KIND, RULE)
    else:
        if ONE_SCALE:
            scale = tl.maximum(tl.load(one + tl.zeros((1, 1), tl.int32)), SMALLEST) / largest
            store_once(scales, scale)
        else:
            scale = scale_of(numbers, column < width, largest)
            store_row_scale(values, scales, one, row, scale)
        store_rounded(values, row * width + column, numbers, scale, column < width)


@triton.jit
def gelu_and_rounded_row(tokens, values, scales, width, BLOCK: tl.constexpr, RULE: tl.constexpr):
    """Overwrite one row of tokens (rows, width) with its GELU (erf form), and write the GELU to values in int8, rounded
    by a host's RULE, and its scale to scales (rows,). Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    place = row * width + column
    KIND: tl.constexpr = tokens.dtype.element_ty
    numbers = gelu(tl.load(tokens + place, column < width, 0.0).to(tl.float32))
    tl.store(tokens + place, numbers.to(KIND), column < width)
    numbers = as_hosts_have(numbers, column < width, KIND, RULE)
    scale = hosts_scale_of(numbers)
    tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
    store_as_hosts(values, place, numbers, scale, column < width, KIND, RULE)


@triton.jit(do_not_specialize=["images", "has_factor", "has_shift"])
def scale_of_norms(
    weight, factor, shift, scale, images, width, factor_stride, shift_stride, has_factor, has_shift, weight_offset,
    farthest, largest, BLOCK: tl.constexpr, NORM: tl.constexpr,
):
    """Write one scale (1,) that is large enough for every row that norm_row computes, whatever the tokens, as
    bounded_scale does. Grid: one program. images: the number of rows of factor and shift. weight is read for the NORM
    RMS alone. The other parameters: see norm_row."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    bound = tl.zeros((1,), tl.float32)
    for image in range(images):
        size = tl.load(factor + image * factor_stride + column, inside & (has_factor != 0), 1.0).to(tl.float32)
        if NORM == RMS:
            size *= tl.load(weight + column, inside, 0.0).to(tl.float32) + weight_offset
        further = farthest * tl.abs(size)
        place = shift + image * shift_stride + column
        further += tl.abs(tl.load(place, inside & (has_shift != 0), 0.0).to(tl.float32))
        bound = tl.maximum(bound, tl.max(tl.where(inside, further, 0.0), 1))
    store_once(scale, power_of_two_scale(bound, largest)[:, None])


@triton.jit
def root_mean_squared(numbers, width, eps):
    """Rows (rows, columns) divided by their root mean square. eps is added to the mean square. Columns beyond the width
    must be zero."""
    return numbers * tl.rsqrt(tl.sum(numbers * numbers, 1) / width + eps)[:, None]


@triton.jit(do_not_specialize=[
    "tokens_of_image", "has_update", "has_scales", "has_gate", "has_behind", "has_factor", "has_shift"
])
def norm_row(
    tokens, update, update_scales, behind, gate, weight, factor, shift, values, scales, plain, width, tokens_of_image,
    gate_stride, factor_stride, shift_stride, has_update, has_scales, has_gate, has_behind, has_factor, has_shift,
    behind_eps, behind_offset, weight_offset, eps, largest, BLOCK: tl.constexpr, RULE: tl.constexpr,
    PLAIN: tl.constexpr, NORM: tl.constexpr,
):
    """Add update * update_scales * gate to one row of tokens, in place, and write the norm of the sum to values. Grid:
    (rows,).

    NORM: LAYER, a layer norm without a weight; RMS, the root mean square norm, times weight + weight_offset; or
    NO_NORM, which only adds the update. The norm is multiplied by factor, and shift is added. If has_behind is 1, the
    update has a norm of its own before its gate: the root mean square norm of update * update_scales, times behind +
    behind_offset; not for LAYER.
    tokens, update, values, plain: (rows, width). update_scales: float32 (rows,). weight, behind: (width,).
    gate, factor, shift: one row for each image, gate_stride, factor_stride and shift_stride apart, in numbers; the
        image of a token is its row // tokens_of_image.
    values: in int8, with the row's scale written to scales (rows,); in float8, by the scale that scale_of_norms wrote
        to scales (1,); or in another dtype, without scales.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    image = row // tokens_of_image
    place = row * width + column
    updated = inside & (has_update != 0)
    numbers = tl.load(tokens + place, inside, 0.0).to(tl.float32)
    further = tl.load(update + place, updated, 0.0).to(tl.float32) * tl.load(update_scales + row, has_scales != 0, 1.0)
    if NORM != LAYER:
        factor_behind = tl.load(behind + column, inside & (has_behind != 0), 0.0).to(tl.float32) + behind_offset
        if has_behind != 0:
            further = root_mean_squared(further, width, behind_eps) * factor_behind
    numbers += further * tl.load(gate + image * gate_stride + column, updated & (has_gate != 0), 1.0).to(tl.float32)
    tl.store(tokens + place, numbers.to(tokens.dtype.element_ty), updated)
    if NORM != NO_NORM:
        if NORM == RMS:
            normed = root_mean_squared(numbers, width, eps)
            normed *= tl.load(weight + column, inside, 0.0).to(tl.float32) + weight_offset
        else:
            normed = normalized(numbers, inside, width, eps)
        normed *= tl.load(factor + image * factor_stride + column, inside & (has_factor != 0), 1.0).to(tl.float32)
        normed += tl.load(shift + image * shift_stride + column, inside & (has_shift != 0), 0.0).to(tl.float32)
        if RULE != OURS:
            KIND: tl.constexpr = plain.dtype.element_ty
            if PLAIN:
                tl.store(plain + place, normed.to(KIND), inside)
            normed = as_hosts_have(normed, inside, KIND, RULE)
            scale = hosts_scale_of(normed)
            tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
            store_as_hosts(values, place, normed, scale, inside, KIND, RULE)
        elif values.dtype.element_ty == tl.int8:
            scale = scale_of(normed, inside, largest)
            tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
            store_rounded(values, place, normed, scale, inside)
        elif values.dtype.element_ty == tl.float8e4nv:
            store_rounded(values, place, normed, tl.load(scales), inside)
        else:
            tl.store(values + place, normed.to(values.dtype.element_ty), inside)
