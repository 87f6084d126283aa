"""Matrix products in int8; products with a GEGLU in half precision and float8; products with the down matrices of
LoRAs; and 3x3 convolutions in int8, float8 and float16.

The parameters that the kernels share:
M, N, K: the rows and the columns of the tile of the output that a program computes, and how many products of each of
    the tile's numbers are summed at once. A grid has one axis, with one program for each tile.
GROUP: how many rows of tiles make a group; see tile_at.
weight_scales: float32 scales of the weight. has_scales: 1: one scale for each row of the weight, which is a column of
    the output; 0: one scale for all.
has_bias: 0 if there is no bias; bias is then any tensor of the output's dtype.
"""
from __future__ import annotations

import triton
import triton.language as tl

# The number of ranks of LoRAs that are multiplied at once.
RANKS = tl.constexpr(16)


@triton.jit
def tile_at(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """The row and the column of the tile with this number, counted in tiles. Tiles are numbered column by column inside
    a group of GROUP rows of tiles, and group after group, so that programs that run at the same time read the same
    parts of the inputs, from the cache."""
    in_group = GROUP * tiles_across
    first = tile // in_group * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def scaled(sums, scales, weight_scales, bias, row, column, rows, out, has_bias, has_scales):
    """A tile (M, N) of an int8 product in float32: the sums times the scales of the tile's rows and columns, plus the
    bias. row, column: the indices of the tile's rows and columns in the output (rows, out). scales: float32 (rows,)."""
    row_scale = tl.load(scales + row, row < rows, 0.0)
    column_scale = tl.load(weight_scales + column * has_scales, column < out, 0.0)
    offset = tl.load(bias + column, (column < out) & (has_bias != 0), 0.0).to(tl.float32)
    return sums.to(tl.float32) * row_scale[:, None] * column_scale[None, :] + offset[None, :]


@triton.jit(do_not_specialize=["rows", "has_bias", "has_scales"])
def tile_by_tile(
    values, scales, weight, weight_scales, bias, output, hidden, up, rows, width, out, ranks, own_rows, own_ranks,
    has_bias, has_scales, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, RANKED: tl.constexpr,
):
    """Write one tile of an int8 product to output (rows, out): values (rows, width) times weight (out, width), each
    scaled, plus bias (out,), and plus the product of LoRAs if RANKED. scales: float32 (rows,).

    LoRAs: hidden (rows, ranks), the tokens times the down matrices, and up (out, own_ranks). For a layer of n fused
    ones, own_rows is out / n and own_ranks is ranks / n: the first own_rows columns of the output read the first
    own_ranks ranks, the next own_rows columns read the next own_ranks ranks, and so on. For any other layer, own_rows
    is out, and own_ranks is ranks. own_ranks is a multiple of RANKS. Without RANKED, hidden and up are not read.
    """
    down, across = tile_at(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(out, N), GROUP)
    step = tl.arange(0, K)
    # Rows and columns beyond the edge are replaced by the last one. Their sums are not stored.
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
    numbers = scaled(sums, scales, weight_scales, bias, row, column, rows, out, has_bias, has_scales)
    if RANKED:
        lane = tl.arange(0, RANKS)
        first = across * N // own_rows
        last = tl.minimum(across * N + N, out) - 1
        for done in tl.range(first * own_ranks, (last // own_rows + 1) * own_ranks, RANKS, num_stages=1):
            layer = done // own_ranks
            mine = (column >= layer * own_rows) & (column < (layer + 1) * own_rows)
            of_rows = hidden + row.to(tl.int64)[:, None] * ranks + (done + lane)[None, :]
            rank = done - layer * own_ranks + lane
            of_columns = up + column.to(tl.int64)[None, :] * own_ranks + rank[:, None]
            added = tl.load(of_rows, (row < rows)[:, None], 0.0)
            numbers = tl.dot(added, tl.load(of_columns, mine[None, :], 0.0), numbers)
    place = output + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(place, numbers.to(output.dtype.element_ty), (row < rows)[:, None] & (column < out)[None, :])


@triton.jit(do_not_specialize=["rows"])
def narrow_tile(
    tokens, weight, output, rows, width, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """Write one tile of a product in half precision to output (rows, out), where out is small, such as the ranks of
    LoRAs: tokens (rows, width) times weight (out, width). Tiles are numbered row by row: neighbours read the same
    tokens."""
    across = tl.cdiv(out, N)
    row = tl.program_id(0) // across * M + tl.arange(0, M)
    column = tl.program_id(0) % across * N + tl.arange(0, N)
    step = tl.arange(0, K)
    # Rows and columns beyond the edge are replaced by the last one. Their sums are not stored.
    left = tokens + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * width + step[None, :]
    right = weight + tl.minimum(column, out - 1).to(tl.int64)[None, :] * width + step[:, None]
    sums = tl.zeros((M, N), tl.float32)
    for done in range(0, width, K):
        there = step < width - done
        sums = tl.dot(tl.load(left, there[None, :], 0.0), tl.load(right, there[:, None], 0.0), sums)
        left += K
        right += K
    place = output + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(place, sums.to(output.dtype.element_ty), (row < rows)[:, None] & (column < out)[None, :])


@triton.jit
def scale_of_columns(scales, weight_scales, column, out, has_scales):
    """(1, N): the one scale of all tokens, scales[0], times the scales of these columns of the output. Columns from
    `out` on have 0. weight_scales, has_scales: see the top of this file."""
    return (tl.load(scales) * tl.load(weight_scales + column * has_scales, column < out, 0.0))[None, :]


@triton.jit
def tile_of(tensor, row, rows, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr):
    """The tile (ROWS, COLUMNS) of a tensor (rows, columns) that begins at this row and column. COPIED: the tensor is a
    descriptor, by which the GPU copies the tile; otherwise a pointer. Columns beyond the tensor's edge are zero. Rows
    beyond its edge have any values: their products must not be stored."""
    if COPIED:
        tile = tensor.load([row, column])
    else:
        down = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        across = column + tl.arange(0, COLUMNS)
        tile = tl.load(tensor + down[:, None] * columns + across[None, :], (across < columns)[None, :], 0.0)
    return tile


@triton.jit(do_not_specialize=["rows", "has_scales"])
def gated_tile(
    values, weight, output, bias, scales, weight_scales, output_scale, rows, width, half, has_scales,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, COPIED: tl.constexpr,
):
    """Write one tile of a product with its GEGLU (erf form) to output (rows, half): value * gelu(gate), where value and
    gate are the first and the second half of values (rows, width) times weight (2 * half, width) plus bias (2 * half,).

    SCALED: values, weight and output are in float8. The products are multiplied by scales[0], which is the scale of all
    tokens, and by the weight's scales; the output is divided by output_scale[0]. Otherwise values, weight and output
    are in half precision, and no scale is read.

    COPIED: values, weight and output are descriptors of tensors, whose tiles the GPU copies by itself (compute
    capability 9.0); otherwise they are pointers.
    """
    down, across = tile_at(tl.program_id(0), tl.cdiv(rows, M), tl.cdiv(half, N), GROUP)
    value = tl.zeros((M, N), tl.float32)
    gate = tl.zeros((M, N), tl.float32)
    for done in range(0, width, K):
        tokens = tile_of(values, down * M, rows, done, width, M, K, COPIED)
        value = tl.dot(tokens, tile_of(weight, across * N, 2 * half, done, width, N, K, COPIED).T, value)
        gate = tl.dot(tokens, tile_of(weight, half + across * N, 2 * half, done, width, N, K, COPIED).T, gate)
    column = across * N + tl.arange(0, N)
    factor = 0.5
    if SCALED:
        value *= scale_of_columns(scales, weight_scales, column, half, has_scales)
        gate *= scale_of_columns(scales, weight_scales, half + column, 2 * half, has_scales)
        factor = 0.5 / tl.load(output_scale)
    inside = column < half
    value += tl.load(bias + column, inside, 0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + half + column, inside, 0.0).to(tl.float32)[None, :]
    mixed = value * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * factor
    if COPIED:
        output.store([down * M, across * N], mixed.to(output.dtype))
    else:
        row = down * M + tl.arange(0, M)
        place = output + row.to(tl.int64)[:, None] * half + column[None, :]
        tl.store(place, mixed.to(output.dtype.element_ty), (row < rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["batch", "height", "width", "has_scales"])
def convolution_tile(
    image, scales, weight, weight_scales, output, batch, height, width, channels, out_channels, has_scales,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    COPIED: tl.constexpr,
):
    """Write DOWN x ACROSS pixels and N channels of a 3x3 convolution, padded with zeros, to output (batch, height,
    width, out_channels). Adds no bias. Sums are in int32 for int8, and in float32 for float8; in float16, K products at
    a time are summed in float16, and these sums in float32.

    image: (batch, height, width, channels). weight: (out_channels, 9 * channels): all channels for the first of the
        nine pixels, then all channels for the next.
    scales: float32 (batch,): of each image. In float16, neither scales nor weight_scales are read.
    COPIED: as in gated_tile, for image, weight and output.
    """
    tiles_across, tiles_down = tl.cdiv(width, ACROSS), tl.cdiv(height, DOWN)
    tiles = tiles_across * tiles_down
    tile, place = tile_at(tl.program_id(0), tiles * batch, tl.cdiv(out_channels, N), GROUP)
    sample, tile = tile // tiles, tile % tiles
    top, left = tile // tiles_across * DOWN, tile % tiles_across * ACROSS
    parts = tl.cdiv(channels, K)
    y, x = top + tl.arange(0, DOWN * ACROSS) // ACROSS, left + tl.arange(0, DOWN * ACROSS) % ACROSS
    kind: tl.constexpr = image.dtype if COPIED else image.dtype.element_ty
    sums = tl.zeros((DOWN * ACROSS, N), tl.int32 if kind == tl.int8 else tl.float32)
    for step in range(0, 9 * parts):
        tap, channel = step // parts, step % parts * K
        # Beyond the last channel, the image is zero, so the weight may have any values there.
        if COPIED:
            pixels = image.load([sample, top + tap // 3 - 1, left + tap % 3 - 1, channel]).reshape(DOWN * ACROSS, K)
        else:
            above, beside, lane = y + (tap // 3 - 1), x + (tap % 3 - 1), channel + tl.arange(0, K)
            there = (above >= 0) & (above < height) & (beside >= 0) & (beside < width)
            pixel = ((sample * height + above).to(tl.int64) * width + beside) * channels
            pixels = tl.load(image + pixel[:, None] + lane[None, :], there[:, None] & (lane < channels)[None, :], 0.0)
        taps = tile_of(weight, place * N, out_channels, tap * channels + channel, 9 * channels, N, K, COPIED)
        if kind == tl.float16:
            sums += tl.dot(pixels, taps.T, out_dtype=tl.float16).to(tl.float32)
        else:
            sums = tl.dot(pixels, taps.T, sums, out_dtype=sums.dtype)
    column = place * N + tl.arange(0, N)
    numbers = sums.to(tl.float32)
    if kind != tl.float16:
        numbers *= scale_of_columns(scales + sample, weight_scales, column, out_channels, has_scales)
    if COPIED:
        output.store([sample, top, left, place * N], numbers.to(output.dtype).reshape(1, DOWN, ACROSS, N))
    else:
        pixel = ((sample * height + y).to(tl.int64) * width + x) * out_channels
        inside = ((y < height) & (x < width))[:, None] & (column < out_channels)[None, :]
        tl.store(output + pixel[:, None] + column[None, :], numbers.to(output.dtype.element_ty), inside)
