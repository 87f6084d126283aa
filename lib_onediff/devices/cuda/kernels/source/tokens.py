"""Kernels over rows of tokens: layer norm of a residual with a deferred bias, gated units, and norms of heads.

has_deferred, has_bias and so on: 0 if there is no such vector, which is then any tensor of a valid dtype. BLOCK: the
number of columns that are processed at once; unless said otherwise, width rounded up to a power of two.
"""
from __future__ import annotations

import triton
import triton.language as tl

# The activations of gates, in the order of kernels.tokens.ACTIVATIONS.
GELU, SILU, SIGMOID = (tl.constexpr(activation) for activation in range(3))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def deferred_vector(deferred_bias, addend, column, inside, has_deferred, has_addend):
    """deferred_bias + addend, float32 (1, columns), in which a vector that does not exist counts as zero."""
    vector = tl.load(deferred_bias + column, inside & (has_deferred != 0), 0.0).to(tl.float32)
    return vector + tl.load(addend + column, inside & (has_addend != 0), 0.0).to(tl.float32)


@triton.jit
def normalized(values, inside, width, eps):
    """Rows (rows, columns) minus their mean, divided by their standard deviation. eps is added to the variance."""
    mean = tl.sum(values, 1) / width
    distance = tl.where(inside, values - mean[:, None], 0.0)
    return distance * tl.rsqrt(tl.sum(distance * distance, 1) / width + eps)[:, None]


@triton.jit
def norm_of(values, weight, bias, column, inside, width, has_bias, eps):
    """(the layer norm of rows (rows, columns), its weight, its bias); weight and bias are float32 (1, columns)."""
    factor = tl.load(weight + column, inside, 0.0).to(tl.float32)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    return normalized(values, inside, width, eps) * factor + offset, factor, offset


@triton.jit(do_not_specialize=["rows", "has_deferred", "has_addend", "has_bias"])
def layer_norm_rows(
    tokens, deferred_bias, addend, weight, bias, deferred_now, output, rows, width, has_deferred, has_addend, has_bias,
    eps, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """Write the layer norm of tokens + deferred_bias + addend to output, for ROWS rows, and deferred_bias + addend to
    deferred_now, float32 (width,). Grid: (blocks of ROWS rows,). tokens, output: (rows, width). deferred_bias, addend,
    weight, bias: (width,)."""
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
    """Write tokens + deferred_bias + addend to output (rows, width), for ROWS rows. Grid: (blocks of ROWS rows,)."""
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
    """GELU (erf form). erfc is computed by the formula 7.1.26 of Abramowitz and Stegun, with a relative error of at
    most 1e-5: tl.erf takes longer than reading and writing the memory."""
    distance = tl.abs(number) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * distance)
    series = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
    half = 0.5 * series * t * tl.exp2(distance * distance * -1.4426950408889634)
    return number * tl.where(number < 0, half, 1.0 - half)


@triton.jit
def gelu_block(numbers, count, BLOCK: tl.constexpr):
    """Overwrite BLOCK of `count` numbers with their GELU. Grid: (blocks of BLOCK numbers,)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers + place, place < count, 0.0).to(tl.float32)
    tl.store(numbers + place, gelu(number).to(numbers.dtype.element_ty), place < count)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of gates, float32: GELU in its erf form, SiLU, or the sigmoid function, by the constants at the
    top of this file."""
    if ACTIVATION == GELU:
        factor = gelu(gate)
    else:
        factor = 1.0 / (1.0 + tl.exp2(gate * -LOG2_E))
        if ACTIVATION == SILU:
            factor = gate * factor
    return factor


@triton.jit
def gated(numbers, gates, column, inside, ACTIVATION: tl.constexpr):
    """numbers * activation(gates) of one row at these columns, in float32. numbers, gates: pointers to the row's
    beginning."""
    number = tl.load(numbers + column, inside, 0.0).to(tl.float32)
    gate = tl.load(gates + column, inside, 0.0).to(tl.float32)
    return number * activated(gate, ACTIVATION)


@triton.jit
def gated_row(
    numbers, gates, output, width, numbers_stride, gates_stride, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Write BLOCK columns of one row of numbers * activation(gates) to output (rows, width). numbers, gates: rows of
    width, numbers_stride and gates_stride apart, in numbers.

    Grid: one axis, with the blocks of the first row, then those of the next, because the other axes of a grid end at
    65535, and a batch of large images has more rows.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    product = gated(numbers + row * numbers_stride, gates + row * gates_stride, column, inside, ACTIVATION)
    tl.store(output + row * width + column, product.to(output.dtype.element_ty), inside)


@triton.jit
def weight_of_heads(first_weight, second_weight, column, is_second, offset):
    """The weight of the norm of the first part's heads, or of the second part's if is_second, at these columns, plus
    offset."""
    first = tl.load(first_weight + column).to(tl.float32)
    second = tl.load(second_weight + column).to(tl.float32)
    return tl.where(is_second, second, first) + offset


@triton.jit(do_not_specialize=["angle_rows", "heads", "second_heads", "has_turns"])
def normed_heads_row(
    projected, first_weight, second_weight, cosines, sines, row_stride, angle_rows, heads, second_heads, has_turns, eps,
    offset, HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Apply the root mean square norm and the rotary embedding to HEADS heads of one token, in place.

    Grid: one axis, with the blocks of HEADS heads of the first token: first those of the first part, then those of the
    second; then the blocks of the next token.
    projected: rows of tokens, row_stride apart, in numbers. A row begins with `heads` heads of the first part and
        second_heads of the second, such as queries and keys, each of 2 * HALF numbers. second_heads is 0 if there is
        one part.
    first_weight, second_weight: (2 * HALF,), the weights of the parts' norms, to which offset is added.
    cosines, sines: (angle_rows, HALF): the angles of a row are those in row % angle_rows. has_turns: 0 if there is no
        rotary embedding.
    INTERLEAVED: the numbers 2 i and 2 i + 1 of a head are rotated together; otherwise i and i + HALF.
    """
    blocks_of_first = tl.cdiv(heads, HEADS)
    blocks = blocks_of_first + tl.cdiv(second_heads, HEADS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    is_second = block >= blocks_of_first
    head = tl.where(is_second, block - blocks_of_first, block) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = head < tl.where(is_second, second_heads, heads)
    head += tl.where(is_second, heads, 0)
    column = tl.arange(0, HALF)[None, :]
    angle = row % angle_rows * HALF + column
    # Without a rotary embedding, the angle is zero.
    cosine = tl.load(cosines + angle, has_turns != 0, 1.0)
    sine = tl.load(sines + angle, has_turns != 0, 0.0)
    place = projected + row * row_stride + head * 2 * HALF
    if INTERLEAVED:
        whole = place + tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.reshape(tl.load(whole, inside, 0.0).to(tl.float32), (HEADS, HALF, 2))
        first, second = tl.split(pairs)
        first_column = 2 * column
        second_column = 2 * column + 1
    else:
        first = tl.load(place + column, inside, 0.0).to(tl.float32)
        second = tl.load(place + HALF + column, inside, 0.0).to(tl.float32)
        first_column = column
        second_column = HALF + column
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first *= scale * weight_of_heads(first_weight, second_weight, first_column, is_second, offset)
    second *= scale * weight_of_heads(first_weight, second_weight, second_column, is_second, offset)
    turned_first = (cosine * first - sine * second).to(projected.dtype.element_ty)
    turned_second = (sine * first + cosine * second).to(projected.dtype.element_ty)
    if INTERLEAVED:
        tl.store(whole, tl.reshape(tl.join(turned_first, turned_second), (HEADS, 2 * HALF)), inside)
    else:
        tl.store(place + column, turned_first, inside)
        tl.store(place + HALF + column, turned_second, inside)
