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
    """In its erf form."""
    return 0.5 * number * (1.0 + tl.erf(number * 0.7071067811865476))


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


@triton.jit
def part_of(first, second, place, part):
    """Of the first vector for part 0, of the second for part 1."""
    number = tl.load(first + place, (place >= 0) & (part == 0), 0.0).to(tl.float32)
    return number + tl.load(second + place, (place >= 0) & (part == 1), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["row_stride", "tokens_of_image", "has_turns"])
def normed_heads_row(
    projected, first_weight, second_weight, cosines, sines, row_stride, tokens_of_image, heads, has_turns, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):
    """The heads of one part of one token, in place: their root mean square norm, and turned by the token's angles."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = head < heads
    place = projected + row * row_stride + (part * heads + head) * 2 * HALF + column
    first, second = tl.load(place, inside, 0.0).to(tl.float32), tl.load(place + HALF, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first *= scale * part_of(first_weight, second_weight, column, part)
    second *= scale * part_of(first_weight, second_weight, HALF + column, part)
    angle = row % tokens_of_image * HALF + column
    # Where nothing is turned, by nothing.
    cosine = tl.load(cosines + angle, (column < HALF) & (has_turns != 0), 1.0)
    sine = tl.load(sines + angle, (column < HALF) & (has_turns != 0), 0.0)
    tl.store(place, (cosine * first - sine * second).to(projected.dtype.element_ty), inside)
    tl.store(place + HALF, (sine * first + cosine * second).to(projected.dtype.element_ty), inside)
