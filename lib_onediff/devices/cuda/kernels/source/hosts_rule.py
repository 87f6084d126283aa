"""Rows of int8 as hosts round the input of a weight that is stored in INT8: to the same integers.

The input is rounded to the model's type, KIND, and so are the scale by which it is divided, and the quotient. By the
RULE, HOSTS, it is that; or it is rotated before (ConvRot): each group of 256 numbers is multiplied in float32 by a
Hadamard matrix, by BUTTERFLIES (sums and differences), or by a MATRIX product, which GPUs before compute capability 8.0
do slowly. The scale is taken of the rotated numbers in float32, as the hosts' CUDA kernel does.
"""
from __future__ import annotations

import triton
import triton.language as tl

OURS, HOSTS, BUTTERFLIES, MATRIX = (tl.constexpr(rule) for rule in range(4))
# As hosts have them: the largest and smallest scale are of what a row's largest number becomes.
HOSTS_LARGEST, HOSTS_SMALLEST = tl.constexpr(127.0), tl.constexpr(1e-30)
# Of a scale: what is divided by it is little more than 127.
SMALLEST_DIVISOR = tl.constexpr(127 / 127.2)
# Added to a number, this leaves the nearest integer, half to even, in the lowest bits.
TO_INTEGER = tl.constexpr(12582912.0)
GROUP, SIDE = tl.constexpr(256), tl.constexpr(16)


@triton.jit
def rounded_to(numbers, KIND: tl.constexpr):
    """Numbers in float32, rounded to a narrower type. To bfloat16 by two instructions on integers, for which a number
    in the middle between two goes away from zero: GPUs have a slow one. Theirs of NaN has every bit set but the sign:
    one more would make it zero."""
    if tl.bfloat16 == KIND:
        found = cut_off((numbers.to(tl.int32, bitcast=True) + 0x8000).to(tl.float32, bitcast=True))
        found = tl.where(numbers == numbers, found, numbers)
    else:
        found = numbers.to(KIND).to(tl.float32)
    return found


@triton.jit
def cut_off(numbers):
    """Numbers in float32 without the digits that bfloat16 does not have."""
    return (numbers.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def by_butterflies(numbers, STRIDE: tl.constexpr):
    """Rows (rows, columns) by the Hadamard matrix of 4, at each four numbers that are STRIDE apart. It is a half,
    negative where the indices add up to 3."""
    rows: tl.constexpr = numbers.shape[0]
    columns: tl.constexpr = numbers.shape[1]
    fours = tl.reshape(numbers, (rows * columns // (4 * STRIDE), 4, STRIDE))
    return tl.reshape(0.5 * tl.sum(fours, 1)[:, None, :] - tl.flip(fours, 1), (rows, columns))


@triton.jit
def signs(KIND: tl.constexpr):
    """The Hadamard matrix (16, 16) of ConvRot, of 1 and -1."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    low, high = (row & 3) + (column & 3) == 3, (row >> 2) + (column >> 2) == 3
    return tl.where(low != high, -1.0, 1.0).to(KIND)


@triton.jit
def by_matrix(numbers, KIND: tl.constexpr):
    """Groups of rows (rows, columns), as matrices (16, 16), between two Hadamard matrices of 16. The first product is
    exact in float32; its 24 bits go into the second one as two numbers of KIND."""
    rows: tl.constexpr = numbers.shape[0]
    columns: tl.constexpr = numbers.shape[1]
    matrix = signs(KIND)
    # No number of float16 becomes too large by the first product, a sixteenth of 16 numbers.
    half = turned(tl.dot(tl.reshape(numbers.to(KIND), (rows * columns // SIDE, SIDE)), matrix * (1.0 / SIDE)))
    most = cut_off(half) if tl.bfloat16 == KIND else half.to(KIND).to(tl.float32)
    whole = tl.dot((half - most).to(KIND), matrix, tl.dot(most.to(KIND), matrix))
    return tl.reshape(turned(whole), (rows, columns))


@triton.jit
def turned(sides):
    """Matrices of 16 rows each, one below the other, with rows as columns."""
    rows: tl.constexpr = sides.shape[0]
    return tl.reshape(tl.trans(tl.reshape(sides, (rows // SIDE, SIDE, SIDE)), 0, 2, 1), (rows, SIDE))


@triton.jit
def as_hosts_have(numbers, valid, KIND: tl.constexpr, RULE: tl.constexpr):
    """Rows (rows, columns) in float32 before they are rounded to int8. A rotated row has whole groups."""
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
    """As scale_of, by the hosts' rule."""
    strange = tl.sum(numbers * 0.0, 1)
    return (tl.maximum(tl.max(tl.abs(numbers), 1) * (1.0 / HOSTS_LARGEST), HOSTS_SMALLEST) + strange)[:, None]


@triton.jit
def store_as_hosts(values, place, numbers, scale, valid, KIND: tl.constexpr, RULE: tl.constexpr):
    """As store_rounded, by the hosts' rule."""
    # Rounded, a scale may be too small for a byte: in float16, that of a row without a number above 0.0003.
    divisor = tl.maximum(scale.to(KIND).to(tl.float32), scale * SMALLEST_DIVISOR)
    given = numbers if RULE == HOSTS else rounded_to(numbers, KIND)
    ratio = (given * (1.0 / divisor)).to(KIND).to(tl.float32)
    # A rotated number is rounded to KIND after the scale was taken, and so may be a little larger.
    ratio = tl.minimum(tl.maximum(ratio, -HOSTS_LARGEST - 1), HOSTS_LARGEST)
    # The lowest eight bits of a float32 of this size are those of the integer.
    tl.store(values + place, (ratio + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8), valid)
