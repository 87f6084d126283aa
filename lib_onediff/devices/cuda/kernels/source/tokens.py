"""Layer norm of a residual stream with a deferred bias, and GEGLU, over rows of tokens."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def deferred_vector(deferred_bias, addend, column, inside, has_deferred, has_addend):
    """The sum of two vectors, either of which may not be there."""
    vector = tl.load(deferred_bias + column, inside & (has_deferred != 0), 0.0).to(tl.float32)
    return vector + tl.load(addend + column, inside & (has_addend != 0), 0.0).to(tl.float32)


@triton.jit
def normalized(values, inside, width, eps):
    """Rows, (rows, columns), less their mean, by their deviation."""
    mean = tl.sum(values, 1) / width
    distance = tl.where(inside, values - mean[:, None], 0.0)
    return distance * tl.rsqrt(tl.sum(distance * distance, 1) / width + eps)[:, None]


@triton.jit
def norm_of(values, weight, bias, column, inside, width, has_bias, eps):
    """The layer norm of rows, (rows, columns), and the vectors by which it is made of a deviation from the mean."""
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    return normalized(values, inside, width, eps) * factor + offset, factor, offset


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_bias"])
def layer_norm_rows(
    tokens, deferred_bias, addend, weight, bias, deferred_now, output, rows, width, has_deferred, has_addend, has_bias,
    eps, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """The layer norm of tokens + deferred_bias + addend, and their sum without the tokens into deferred_now."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    valid = (row < rows) & inside
    place = row * width + column
    vector = deferred_vector(deferred_bias, addend, column, inside, has_deferred, has_addend)
    tl.store(deferred_now + column, vector, inside & (tl.program_id(0) == 0))
    values = tl.load(tokens + place, valid, 0.0).to(tl.float32) + vector
    normed, _, _ = norm_of(values, weight, bias, column, inside, width, has_bias, eps)
    tl.store(output + place, normed.to(output.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["rows", "has_addend"])
def materialize_rows(
    tokens, deferred_bias, addend, output, rows, width, has_addend, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    valid = (row < rows) & inside
    place = row * width + column
    values = tl.load(tokens + place, valid, 0.0).to(tl.float32)
    values += deferred_vector(deferred_bias, addend, column, inside, 1, has_addend)
    tl.store(output + place, values.to(output.dtype.element_ty), valid)


@triton.jit
def gelu(number):
    """In its erf form, by erfc of Abramowitz and Stegun (7.1.26), whose relative error is 1e-5 at most: tl.erf takes
    longer than the memory that is read and written."""
    distance = tl.abs(number) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * distance)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    half = 0.5 * series * t * tl.exp2(distance * distance * -1.4426950408889634)
    return number * tl.where(number < 0, half, 1.0 - half)


@triton.jit
def gelu_block(numbers, count, BLOCK: tl.constexpr):
    """In place."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers + place, place < count, 0.0).to(tl.float32)
    tl.store(numbers + place, gelu(number).to(numbers.dtype.element_ty), place < count)


@triton.jit
def gated(source, width, column, inside):
    """The first half of a row times the GELU (erf form) of the second, at these columns."""
    value = tl.load(source + column, inside, 0.0).to(tl.float32)
    gate = tl.load(source + width + column, inside, 0.0).to(tl.float32)
    return value * gelu(gate)


@triton.jit
def geglu_row(tokens, output, width, BLOCK: tl.constexpr):
    # Rows and their blocks on one axis: the other two end at 65535, and a batch of large images has more rows.
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = gated(tokens + row * 2 * width, width, column, inside)
    tl.store(output + row * width + column, values.to(output.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens_of_image", "has_turns"])
def normed_heads_row(
    projected, first_weight, second_weight, cosines, sines, row_stride, tokens_of_image, heads, has_turns, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):
    """The heads of the first parts of one token, in place: their root mean square norm, and turned by the token's
    angles."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside, angle = head < heads, row % tokens_of_image * HALF + column
    # Where nothing is turned, by nothing.
    cosine = tl.load(cosines + angle, has_turns != 0, 1.0)
    sine = tl.load(sines + angle, has_turns != 0, 0.0)
    for part in tl.static_range(PARTS):
        place = projected + row * row_stride + (part * heads + head) * 2 * HALF + column
        first, second = tl.load(place, inside, 0.0).to(tl.float32), tl.load(place + HALF, inside, 0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        weight = first_weight if part == 0 else second_weight
        first *= scale * tl.load(weight + column).to(tl.float32)
        second *= scale * tl.load(weight + HALF + column).to(tl.float32)
        tl.store(place, (cosine * first - sine * second).to(projected.dtype.element_ty), inside)
        tl.store(place + HALF, (sine * first + cosine * second).to(projected.dtype.element_ty), inside)
