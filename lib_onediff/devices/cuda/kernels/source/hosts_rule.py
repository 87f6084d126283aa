"""Rounds rows to int8 as hosts round the input of a layer whose weight is stored in INT8: to the same integers, except
where a number is in the middle between two numbers of bfloat16, or where a rotation sums in another order.

KIND: the model's dtype, to which the rows are rounded first. RULE: one of

HOSTS: a row's scale is its largest magnitude / 127. The row is divided by the scale, both in KIND, and the quotient is
    rounded to KIND, and then to the nearest integer, half to even.
BUTTERFLIES, MATRIX: the row is rotated first (ConvRot): each group of GROUP numbers is multiplied by a Hadamard matrix
    in float32. BUTTERFLIES does this by sums and differences, MATRIX by matrix products, which GPUs before compute
    capability 8.0 compute slowly. The scale is that of the rotated row in float32, as in the hosts' CUDA kernel. Then
    the rotated row is rounded to KIND, and the rest is as for HOSTS.

OURS, the rule for weights that Low-bit quantized, is not computed here: see rounding.py. The numbers of the rules are
those of kernels.rounding.Rule.
"""
from __future__ import annotations

import triton
import triton.language as tl

OURS, HOSTS, BUTTERFLIES, MATRIX = (tl.constexpr(rule) for rule in range(4))
# The integer to which a row's largest magnitude is scaled, and the smallest scale of a row.
HOSTS_LARGEST, HOSTS_SMALLEST = tl.constexpr(127.0), tl.constexpr(1e-30)
# The smallest divisor of a row, as a part of its scale in float32: quotients are then at most 127.2.
SMALLEST_DIVISOR = tl.constexpr(127 / 127.2)
# The sum of this and a small number in float32 has the nearest integer, half to even, in its lowest bits.
TO_INTEGER = tl.constexpr(12582912.0)
# The numbers in a group that is rotated, and the side of the square matrix that they form.
GROUP, SIDE = tl.constexpr(256), tl.constexpr(16)


@triton.jit
def rounded_to(numbers, KIND: tl.constexpr):
    """float32 numbers rounded to KIND, returned in float32. For bfloat16, numbers in the middle between two are rounded
    away from zero, by two instructions on integers: the conversion is slow on GPUs. NaN is left as it is, because this
    rounding would turn a GPU's NaN, which has all bits set but the sign, into zero."""
    if tl.bfloat16 == KIND:
        found = cut_off((numbers.to(tl.int32, bitcast=True) + 0x8000).to(tl.float32, bitcast=True))
        found = tl.where(numbers == numbers, found, numbers)
    else:
        found = numbers.to(KIND).to(tl.float32)
    return found


@triton.jit
def cut_off(numbers):
    """float32 numbers truncated to the digits of bfloat16, returned in float32."""
    return (numbers.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def by_butterflies(numbers, STRIDE: tl.constexpr):
    """Rows (rows, columns), in which all four numbers that are STRIDE apart are multiplied by the Hadamard matrix (4,
    4). Its entries are -1/2 where the indices of row and column add up to 3, and 1/2 elsewhere. Four calls with the
    strides 1, 4, 16 and 64 rotate groups of 256."""
    rows: tl.constexpr = numbers.shape[0]
    columns: tl.constexpr = numbers.shape[1]
    fours = tl.reshape(numbers, (rows * columns // (4 * STRIDE), 4, STRIDE))
    return tl.reshape(0.5 * tl.sum(fours, 1)[:, None, :] - tl.flip(fours, 1), (rows, columns))


@triton.jit
def signs(KIND: tl.constexpr):
    """The Hadamard matrix (SIDE, SIDE) of ConvRot without its factor: its entries are 1 and -1, in KIND."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    low, high = (row & 3) + (column & 3) == 3, (row >> 2) + (column >> 2) == 3
    return tl.where(low != high, -1.0, 1.0).to(KIND)


@triton.jit
def by_matrix(numbers, KIND: tl.constexpr):
    """Rows (rows, columns), rounded to KIND and then rotated: each group of GROUP numbers, as a matrix (SIDE, SIDE), is
    multiplied by a Hadamard matrix from both sides. Returned in float32. The first product is exact in float32; its 24
    bits enter the second product as two numbers of KIND, one for the high and one for the low bits."""
    rows: tl.constexpr = numbers.shape[0]
    columns: tl.constexpr = numbers.shape[1]
    matrix = signs(KIND)
    # The first product has the factor 1 / SIDE, so that a sum of SIDE numbers cannot be too large for float16.
    half = turned(tl.dot(tl.reshape(numbers.to(KIND), (rows * columns // SIDE, SIDE)), matrix * (1.0 / SIDE)))
    most = cut_off(half) if tl.bfloat16 == KIND else half.to(KIND).to(tl.float32)
    whole = tl.dot((half - most).to(KIND), matrix, tl.dot(most.to(KIND), matrix))
    return tl.reshape(turned(whole), (rows, columns))


@triton.jit
def turned(sides):
    """Matrices (SIDE, SIDE), stacked to (rows, SIDE), each transposed."""
    rows: tl.constexpr = sides.shape[0]
    return tl.reshape(tl.trans(tl.reshape(sides, (rows // SIDE, SIDE, SIDE)), 0, 2, 1), (rows, SIDE))


@triton.jit
def as_hosts_have(numbers, valid, KIND: tl.constexpr, RULE: tl.constexpr):
    """Rows (rows, columns) in float32, rounded to KIND, and then rotated if the RULE rotates: the numbers of which
    hosts_scale_of takes the scale, and which store_as_hosts stores. Columns that are not valid are zero. The columns of
    rotated rows must be whole groups."""
    given = tl.where(valid, numbers, 0.0)
    if RULE == MATRIX:
        given = by_matrix(given, KIND)
    else:
        given = rounded_to(given, KIND)
        if RULE == BUTTERFLIES:
            for power in tl.static_range(4):
                given = by_butterflies(given, 4**power)
    return given


@triton.jit
def hosts_scale_of(numbers):
    """The scale of each row by the hosts' rules, float32 (rows, 1): the row's largest magnitude / HOSTS_LARGEST, but at
    least HOSTS_SMALLEST; NaN for a row with a NaN or an infinity. numbers: from as_hosts_have."""
    strange = tl.sum(numbers * 0.0, 1)
    return (tl.maximum(tl.max(tl.abs(numbers), 1) * (1.0 / HOSTS_LARGEST), HOSTS_SMALLEST) + strange)[:, None]


@triton.jit
def store_as_hosts(values, place, numbers, scale, valid, KIND: tl.constexpr, RULE: tl.constexpr):
    """Store numbers / scale at values + place, rounded to int8 by the hosts' RULE. numbers: from as_hosts_have. scale:
    from hosts_scale_of. valid: which numbers are stored."""
    # A scale in float16 may be rounded down so far that quotients are larger than 127, if no number of the row is above
    # 0.0003. The divisor is not smaller than SMALLEST_DIVISOR * scale.
    divisor = tl.maximum(scale.to(KIND).to(tl.float32), scale * SMALLEST_DIVISOR)
    given = numbers if RULE == HOSTS else rounded_to(numbers, KIND)
    ratio = (given * (1.0 / divisor)).to(KIND).to(tl.float32)
    # A rotated number is rounded to KIND after its scale was computed, so its quotient may be slightly above 127.
    ratio = tl.minimum(tl.maximum(ratio, -HOSTS_LARGEST - 1), HOSTS_LARGEST)
    # The lowest eight bits of a float32 of this size are those of the integer.
    tl.store(values + place, (ratio + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8), valid)
