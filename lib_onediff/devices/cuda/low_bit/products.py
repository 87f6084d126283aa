"""Matrix products in eight bits by kernels of our own: in int8; in float8 a feed-forward's first with its GEGLU, and
convolutions of 3x3.

int8 has a scale for every row and every column, and is summed exactly in int32. Tensor cores multiply it at two to four
times the rate of float16 from compute capability 7.5 on; PyTorch's own product (torch._int_mm) knows no scales, and was
slower than float16 on an H200. In float8, the scale of what comes out is known beforehand (weights.low_bit.gated_scale
and normed_scale): one for every row would have to wait for the whole row.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedImage, QuantizedTokens
from ..kernels import launch_config as cuts
from ..kernels.images import processors
from ..kernels.launch_config import Kernel, LaunchConfig

try:
    from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor
except ImportError:
    TensorDescriptor = None
# The first number of a launch configuration.
TILE_BY_TILE, PERSISTENT = range(2)
HOPPER = (9, 0)


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


@triton.jit
def biased(sums, scales, weight_scales, bias, column, out, has_bias, has_scales):
    """(M, N) in float32: the sums of a tile times the scales of tokens and weight, plus the bias."""
    inside = column < out
    scale = tl.load(scales) * tl.load(weight_scales + column * has_scales, inside, 0.0)
    offset = tl.load(bias + column, inside & (has_bias != 0), 0.0).to(tl.float32)
    return sums * scale[None, :] + offset[None, :]


@triton.jit(do_not_specialize=["rows", "has_bias", "has_scales"])
def gated_tile(
    values, scales, weight, weight_scales, bias, output, output_scale, rows, width, half, has_bias, has_scales,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """A program for each tile of the output, (M, N). values, weight, output: descriptors of tensors. half: the rows of
    weight that give values; as many that give gates follow."""
    down, across = tile_at(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(half, N), GROUP)
    value = tl.zeros((M, N), tl.float32)
    gate = tl.zeros((M, N), tl.float32)
    for done in range(0, tl.cdiv(width, K)):
        tokens = values.load([down * M, done * K])
        value = tl.dot(tokens, weight.load([across * N, done * K]).T, value)
        gate = tl.dot(tokens, weight.load([half + across * N, done * K]).T, gate)
    column = across * N + tl.arange(0, N)
    value = biased(value, scales, weight_scales, bias, column, half, has_bias, has_scales)
    gate = biased(gate, scales, weight_scales, bias, half + column, 2 * half, has_bias, has_scales)
    mixed = value * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * (0.5 / tl.load(output_scale))
    output.store([down * M, across * N], mixed.to(output.dtype))


@triton.jit(do_not_specialize=["batch", "height", "width", "has_scales"])
def convolution_tile(
    image, scale, weight, weight_scales, output, batch, height, width, channels, out_channels, has_scales,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """A program for each DOWN x ACROSS pixels and N channels of the output. image, weight, output: descriptors of
    tensors: (batch, height, width, channels), (out_channels, 9 * channels), (batch, height, width, out_channels)."""
    tiles_across, tiles_down = tl.cdiv(width, ACROSS), tl.cdiv(height, DOWN)
    tiles = tiles_across * tiles_down
    tile, place = tile_at(tl.program_id(0), tiles * batch, tl.cdiv(out_channels, N), GROUP)
    sample, tile = tile // tiles, tile % tiles
    top, left = tile // tiles_across * DOWN, tile % tiles_across * ACROSS
    parts = tl.cdiv(channels, K)
    sums = tl.zeros((DOWN * ACROSS, N), tl.float32)
    for step in range(0, 9 * parts):
        tap, channel = step // parts, step % parts * K
        # What lies beyond the last channel is zero in the image, whatever the weight has there.
        pixels = image.load([sample, top + tap // 3 - 1, left + tap % 3 - 1, channel]).reshape(DOWN * ACROSS, K)
        sums = tl.dot(pixels, weight.load([place * N, tap * channels + channel]).T, sums)
    column = place * N + tl.arange(0, N)
    factor = tl.load(scale) * tl.load(weight_scales + column * has_scales, column < out_channels, 0.0)
    numbers = (sums * factor[None, :]).to(output.dtype)
    output.store([sample, top, left, place * N], numbers.reshape(1, DOWN, ACROSS, N))


def int8_product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype,
    config: LaunchConfig = cuts.INT8_PRODUCT.candidates[0],
) -> Tensor:
    """(rows, in) times (out, in), plus bias (out,): (rows, out) in the result's dtype. in and out are multiples of 16.

    config: as cuts.INT8_PRODUCT has them. Raises what Triton raises.
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


def gated_product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, output_scale: Tensor,
    config: LaunchConfig = cuts.GATED_PRODUCT.candidates[1],
) -> QuantizedTokens:
    """The GEGLU (erf form) of tokens (rows, in), which have one scale, times a weight (2 n, in) plus bias (2 n,):
    (rows, n) in float8, with one scale, output_scale (1, 1).

    Raises what Triton raises.
    """
    m, n, k, group, warps, stages = config
    (rows, width), half = tokens.values.shape, len(weight.values) // 2
    output = torch.empty((rows, half), device=tokens.values.device, dtype=tokens.values.dtype)
    # Triton compiles a kernel for each set of types: a bias that is not there is stood for by something.
    offset, has_bias = (weight.scales, 0) if bias is None else (bias, 1)
    gated_tile[(triton.cdiv(rows, m) * triton.cdiv(half, n),)](
        TensorDescriptor.from_tensor(tokens.values, [m, k]), tokens.scales,
        TensorDescriptor.from_tensor(weight.values, [n, k]), weight.scales, offset,
        TensorDescriptor.from_tensor(output, [m, n]), output_scale, rows, width, half, has_bias,
        int(weight.scales.numel() > 1), m, n, k, group, num_warps=warps, num_stages=stages,
    )
    return QuantizedTokens(output, output_scale, tokens.shape)


def convolution(
    image: QuantizedImage, weight: QuantizedWeight, result: torch.dtype,
    config: LaunchConfig = cuts.CONVOLUTION.candidates[0],
) -> Tensor:
    """3x3, padded with a pixel of zeros at each side: (batch, out channels, height, width) in the result's dtype, in
    channels-last memory, summed in float32. Channels are multiples of 16. Raises what Triton raises."""
    down, across, n, k, group, warps, stages = config
    batch, height, width, channels = image.values.shape
    out_channels = len(weight.values)
    output = torch.empty((batch, height, width, out_channels), device=image.values.device, dtype=result)
    tiles = batch * triton.cdiv(height, down) * triton.cdiv(width, across) * triton.cdiv(out_channels, n)
    convolution_tile[(tiles,)](
        TensorDescriptor.from_tensor(image.values, [1, down, across, k]), image.scale,
        TensorDescriptor.from_tensor(weight.values, [n, k]), weight.scales,
        TensorDescriptor.from_tensor(output, [1, down, across, n]), batch, height, width, channels, out_channels,
        int(weight.scales.numel() > 1), down, across, n, k, group, num_warps=warps, num_stages=stages,
    )
    return output.permute(0, 3, 1, 2)


def copies_tiles(device: torch.device) -> bool:
    """Whether a GPU copies tiles by itself: there alone, kernels that need it were measured to be worth trying."""
    is_there = TensorDescriptor is not None and device.type == "cuda"
    return is_there and torch.cuda.get_device_capability(device) == HOPPER


def kernel_for(device: torch.device) -> Kernel:
    """How an int8 product can be launched on a device."""
    return cuts.INT8_PRODUCT_HOPPER if copies_tiles(device) else cuts.INT8_PRODUCT


def product_class(rows: int, out: int, width: int) -> str:
    """The class of shapes of a product, for which its launch configuration is chosen. out, width: the weight's shape.
    """
    return f"{rows}x{width}x{out}"


def convolution_class(image: QuantizedImage, out_channels: int) -> str:
    """As product_class, of a convolution."""
    return "x".join(map(str, (*image.values.shape, out_channels)))
