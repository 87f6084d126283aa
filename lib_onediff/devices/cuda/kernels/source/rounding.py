"""Rows of tokens in eight bits: of norms, gated units, and plain rows. Norms with modulation come in 16 bits too.

Rows of int8 are rounded by a RULE: OURS, for a weight that Low-bit rounded, once, from float32; or as a host rounds
them, see hosts_rule.py.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .hosts_rule import OURS, as_hosts_have, hosts_scale_of, store_as_hosts
from .tokens import deferred_vector, gated, gelu, norm_of, normalized

# Of rows of a residual: see norm_row.
NO_NORM, LAYER, RMS = (tl.constexpr(norm) for norm in range(3))
# A row of zeros has this for its largest value.
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def scale_of(numbers, valid, largest):
    """(rows, 1): by what values of eight bits are multiplied to give these rows of numbers. A row with a NaN or an
    infinity has NaN."""
    inside = tl.where(valid, numbers, 0.0)
    # A maximum passes over a NaN, and int8 has none.
    strange = tl.sum(inside * 0.0, 1)
    return (tl.maximum(tl.max(tl.abs(inside), 1), SMALLEST) / largest + strange)[:, None]


@triton.jit
def bounded_scale(factor, offset, farthest, largest):
    """(1, 1): a scale for all rows that a layer norm of these vectors, (1, columns), may give. No number of a row is
    farther from its mean than so many deviations. A power of two: float8 keeps the same digits by any other that is
    large enough."""
    return power_of_two_scale(tl.max(farthest * tl.abs(factor) + tl.abs(offset), 1), largest)[:, None]


@triton.jit
def power_of_two_scale(farthest_number, largest):
    exponent = (tl.maximum(farthest_number, SMALLEST) / largest).to(tl.int32, bitcast=True) & 0x7F800000
    return 2.0 * exponent.to(tl.float32, bitcast=True)


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
    """Store numbers as multiples of a scale."""
    store_nearest(values, place, numbers * (1.0 / scale), valid)


@triton.jit
def store_nearest(values, place, ratio, valid):
    """Store numbers rounded to the nearest that the type of values has."""
    if values.dtype.element_ty == tl.int8:
        ratio = tl.floor(ratio + 0.5)
    tl.store(values + place, ratio.to(values.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_update", "has_scales", "has_bias"])
def layer_norm_rows(
    tokens, update, update_scales, deferred_bias, addend, weight, bias, deferred_now, values, scales, plain, rows,
    width, has_deferred, has_addend, has_update, has_scales, has_bias, eps, farthest, largest, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RULE: tl.constexpr, PLAIN: tl.constexpr,
):
    """The layer norm of tokens + update * update_scales + deferred_bias + addend.

    Writes its first two summands into tokens, and deferred_bias + addend into deferred_now. farthest: see
    bounded_scale. PLAIN: by a host's rule, and as it is in plain."""
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
    """One row in two pieces, BLOCK <= width < 2 * BLOCK: a piece has a power of two of columns, and the error function
    of columns that are not there costs as much as of others. PLAIN: by a host's rule, and as it is in plain."""
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
    """ONE_SCALE: for all rows, by the largest number of all, one; otherwise that is the unit, which is written. GELU:
    of that of the tokens."""
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
    """The GELU of tokens: in their place, and rounded by a host's rule."""
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
    """One program: the scale of all rows that norm_row may give for so many images, as bounded_scale."""
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
    """Rows, (rows, columns), by their root mean square. Numbers that are not there are zeros."""
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
    """A row of tokens + update * update_scales * gate, which is written into tokens, and its NORM times factor plus
    shift: a LAYER norm; the root mean square norm (RMS), times weight + weight_offset; or none (NO_NORM), without an
    output.

    But for a layer norm, the update may have a root mean square norm behind it, before its gate, with a weight of its
    own: behind + behind_offset. gate, factor and shift are the image's, each image's so many numbers after the last
    one's. The output is in eight bits (float8: by the scale that is there), or as it is. PLAIN: by a host's rule, and
    as it is in plain, whose type is the model's."""
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
