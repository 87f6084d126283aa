"""Matrix products in int8 with a scale for every row and every column, summed exactly in int32.

Tensor cores multiply int8 at two to four times the rate of float16 from compute capability 7.5 on. PyTorch's own
product (torch._int_mm) knows no scales, and was slower than float16 on an H200.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedTokens
from ..kernels.launch_config import INT8_PRODUCT, INT8_PRODUCT_HOPPER, Kernel, LaunchConfig

try:
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ImportError:
    TensorDescriptor = None
# The first number of a launch configuration.
TILE_BY_TILE, PERSISTENT = range(2)
HOPPER = (9, 0)
ALIGNED = 16


@triton.jit
def tile_at(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles are gone through column by column, so that what neighbours read
    is still in the cache."""
    in_group = GROUP * tiles_across
    first = tile // in_group * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def scaled(sums, scales, weight_scales, bias, row, column, rows, out, has_bias):
    """(M, N) in float32: the sums of a tile times the scales of its rows and columns, plus the bias."""
    row_scale = tl.load(scales + row, row < rows, 0.0)
    column_scale = tl.load(weight_scales + column, column < out, 0.0)
    offset = tl.load(bias + column, (column < out) & (has_bias != 0), 0.0).to(tl.float32)
    return sums.to(tl.float32) * row_scale[:, None] * column_scale[None, :] + offset[None, :]


@triton.jit(do_not_specialize=["rows", "has_bias"])
def tile_by_tile(
    values, scales, weight, weight_scales, bias, output, rows, width, out, has_bias,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """One program for each tile of the output, (M, N)."""
    down, across = tile_at(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(out, N), GROUP)
    step = tl.arange(0, K)
    # Rows that are not there stand for others, whose sums nobody stores.
    local_row = tl.minimum(tl.arange(0, M), rows - 1 - down * M)
    local_column = tl.minimum(tl.arange(0, N), out - 1 - across * N)
    left = values + (down * M).to(tl.int64) * width + (local_row[:, None] * width + step[None, :])
    right = weight + (across * N).to(tl.int64) * width + (local_column[None, :] * width + step[:, None])
    sums = tl.zeros((M, N), tl.int32)
    for done in range(0, width, K):
        there = step < width - done
        sums = tl.dot(tl.load(left, there[None, :], 0), tl.load(right, there[:, None], 0), sums, out_dtype=tl.int32)
        left += K
        right += K
    row, column = down * M + tl.arange(0, M), across * N + tl.arange(0, N)
    numbers = scaled(sums, scales, weight_scales, bias, row, column, rows, out, has_bias)
    place = output + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(place, numbers.to(output.dtype.element_ty), (row < rows)[:, None] & (column < out)[None, :])


@triton.jit(do_not_specialize=["rows", "has_bias"])
def persistent(
    values, scales, weight, weight_scales, bias, output, rows, width, out, has_bias,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """Each program does one tile after the other: while a tile is scaled and stored, the next one's rows are on their
    way. values, weight, output: descriptors of tensors, which the GPU copies by itself (compute capability 9.0 and
    newer)."""
    tiles_down, tiles_across = tl.cdiv(rows, M), tl.cdiv(out, N)
    tiles = tiles_down * tiles_across
    # Counted by itself: what is loaded for the next tile must not wait for this one.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        down, across = tile_at(tile, tiles_down, tiles_across, GROUP)
        sums = tl.zeros((M, N), tl.int32)
        for done in range(0, tl.cdiv(width, K)):
            left, right = values.load([down * M, done * K]), weight.load([across * N, done * K])
            sums = tl.dot(left, right.T, sums, out_dtype=tl.int32)
        stored += tl.num_programs(0)
        down, across = tile_at(stored, tiles_down, tiles_across, GROUP)
        row = down * M + tl.arange(0, M)
        # Half of the columns after the other: the copy of a whole tile would take the room of what is loaded.
        first, second = tl.split(tl.permute(tl.reshape(sums, (M, 2, N // 2)), (0, 2, 1)))
        column = across * N + tl.arange(0, N // 2)
        numbers = scaled(first, scales, weight_scales, bias, row, column, rows, out, has_bias)
        output.store([down * M, across * N], numbers.to(output.dtype))
        numbers = scaled(second, scales, weight_scales, bias, row, column + N // 2, rows, out, has_bias)
        output.store([down * M, across * N + N // 2], numbers.to(output.dtype))


def product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype,
    config: LaunchConfig = INT8_PRODUCT.candidates[0],
) -> Tensor:
    """(rows, in) times (out, in), plus bias (out,): (rows, out) in the result's dtype. in and out are multiples of 16.

    config: as INT8_PRODUCT has them. Raises what Triton raises.
    """
    way, m, n, k, group, warps, stages, programs = config
    (rows, width), out = tokens.values.shape, len(weight.values)
    output = torch.empty((rows, out), device=tokens.values.device, dtype=result)
    # Triton compiles a kernel for each set of types: a bias that is not there is stood for by something of its type.
    offset, has_bias = (output, 0) if bias is None else (bias.to(result), 1)
    tiles = triton.cdiv(rows, m) * triton.cdiv(out, n)
    if way == TILE_BY_TILE:
        tile_by_tile[(tiles,)](
            tokens.values, tokens.scales, weight.values, weight.scales, offset, output, rows, width, out, has_bias,
            m, n, k, group, num_warps=warps, num_stages=stages,
        )
        return output
    count = programs * processors(tokens.values.device) if programs else tiles
    persistent[(min(tiles, count),)](
        TensorDescriptor.from_tensor(tokens.values, [m, k]), tokens.scales,
        TensorDescriptor.from_tensor(weight.values, [n, k]), weight.scales, offset,
        TensorDescriptor.from_tensor(output, [m, n // 2]), rows, width, out, has_bias,
        m, n, k, group, num_warps=warps, num_stages=stages,
    )
    return output


def copies_tiles(device: torch.device) -> bool:
    """Whether a GPU copies tiles by itself: there alone, kernels that need it were measured to be worth trying."""
    is_there = TensorDescriptor is not None and device.type == "cuda"
    return is_there and torch.cuda.get_device_capability(device) == HOPPER


def kernel_for(device: torch.device) -> Kernel:
    """How a product can be launched on a device."""
    return INT8_PRODUCT_HOPPER if copies_tiles(device) else INT8_PRODUCT


def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    found: Any = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count)


def shape_class(rows: int, out: int, width: int) -> str:
    """The class of shapes of a product, for which its launch configuration is chosen. out, width: the weight's shape.
    """
    return f"{rows}x{width}x{out}"
