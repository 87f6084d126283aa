"""Group norm of channels-last images. small_group_norm computes the norm of a small image. The norm of a large image
takes three kernels: images.strip_statistics, join_statistics and scale_and_shift.

The parameters that the kernels share:
first, second: two images (batch, pixels, channels), which are normed as if the channels of second followed those of
    first. Without a second image, second is any tensor of first's dtype, and second_channels is 0.
pixels: height * width of an image.
shift: (batch, channels), added to the image before the norm, in which shift_stride is the distance of rows, in numbers.
    has_shift: 0 if there is none; shift is then any tensor of the images' dtype.
weight, bias: (channels,). silu: 1 if SiLU follows the norm, else 0.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .rounding import SMALLEST, store_nearest

# The lowest value of SiLU is the negative of this.
LOWEST_SILU = tl.constexpr(0.2785)
# The largest number of groups of a norm in eight bits.
MOST_GROUPS = tl.constexpr(32)


@triton.jit
def beside(first, second, pixel, channel, first_channels, second_channels):
    """Pointers to these channels of these pixels: into first for channels below first_channels, into second for the
    channels from first_channels on. pixel: the index among the pixels of the whole batch."""
    here = first + pixel * first_channels + channel
    there = second + pixel * second_channels + (channel - first_channels)
    return tl.where(channel < first_channels, here, there)


@triton.jit
def with_strips(
    total, squares, lowest, highest, statistics, bounds, place, partial_statistics, strip_pixels, channels, pixels,
    offset, inside, STRIPS: tl.constexpr, BOUNDED: tl.constexpr,
):
    """The given (total, squares, lowest, highest) with all strips of one image included. Each is (STRIPS, BLOCK), with
    a column for each channel of a group.

    total and squares are the sums of the distances of the image's values from the group's centre, and of the squares of
    these distances. lowest and highest are the image's lowest and highest values, without the shift; they change only
    if BOUNDED.
    statistics, bounds: see images.strip_statistics; bounds is read only if BOUNDED.
    place: for each channel, the index in statistics of its mean in the first strip.
    partial_statistics: the number of strips. strip_pixels: the pixels in a strip; the last strip has the remaining
        ones.
    offset: for each channel, its shift minus the group's centre.
    inside: whether a column is a channel of this image. STRIPS: how many strips are loaded at once.
    """
    strip = tl.arange(0, STRIPS)[:, None]
    for chunk in range(0, partial_statistics, STRIPS):
        number = tl.minimum(pixels - (chunk + strip) * strip_pixels, strip_pixels).to(tl.float32)
        valid = (chunk + strip < partial_statistics) & inside
        means = place + (chunk + strip) * 2 * channels
        distance = tl.load(statistics + means, valid, 0.0) + offset
        deviations = tl.load(statistics + means + channels, valid, 0.0)
        total += tl.where(valid, number * distance, 0.0)
        squares += tl.where(valid, deviations + number * distance * distance, 0.0)
        if BOUNDED:
            lowest = tl.minimum(lowest, tl.load(bounds + means, valid, float("inf")))
            highest = tl.maximum(highest, tl.load(bounds + means + channels, valid, float("-inf")))
    return total, squares, lowest, highest


@triton.jit(do_not_specialize=[
    "pixels", "first_strips", "second_strips", "first_strip_pixels", "second_strip_pixels", "shift_stride", "has_shift",
    "width", "silu",
])
def join_statistics(
    first, second, first_bounds, second_bounds, shift, weight, bias, scales, largest, pixels, first_strips,
    second_strips, first_strip_pixels, second_strip_pixels, shift_stride, has_shift, eps, first_channels,
    second_channels, width, silu, BLOCK: tl.constexpr, STRIPS: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Join the statistics of one group of one image to a scale and an offset for each of its channels: the norm of the
    image is image * scale + offset. The offset includes the shift.

    Grid: (groups, batch). shift, weight, bias, pixels, silu: see the top of this file.
    first, second: the statistics of the two images, as images.strip_statistics writes them. first_bounds,
        second_bounds: their bounds, which are read only if BOUNDED.
    first_strips, second_strips: the number of strips of each image. first_strip_pixels, second_strip_pixels: the pixels
        in a strip.
    scales: float32 (batch, 2, channels): the scale and the offset of each channel; written.
    largest: float32 (batch, groups), written only if BOUNDED: for each group, an upper bound for the magnitude of the
        norm, or of its SiLU if silu; NaN if a scale in the group is NaN or infinite.
    width: the number of channels in a group. BLOCK: width rounded up to a power of two. STRIPS: how many strips are
        loaded at once.
    """
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = first_channels + second_channels
    lane = tl.arange(0, BLOCK)[None, :]
    inside = lane < width
    channel = group * width + lane
    in_first = inside & (channel < first_channels)
    in_second = inside & (channel >= first_channels)
    added = tl.load(shift + sample * shift_stride + channel, inside & (has_shift != 0), 0.0).to(tl.float32)
    factor = tl.load(weight + channel, inside, 0.0).to(tl.float32)
    addend = tl.load(bias + channel, inside, 0.0).to(tl.float32)
    here = sample * first_strips * 2 * first_channels + channel
    there = sample * second_strips * 2 * second_channels + (channel - first_channels)
    some = tl.load(first + here, in_first, 0.0) + tl.load(second + there, in_second, 0.0) + added
    centre = tl.sum(tl.sum(some, 1), 0) / width
    total = tl.zeros((STRIPS, BLOCK), tl.float32)
    squares = tl.zeros((STRIPS, BLOCK), tl.float32)
    lowest = tl.full((STRIPS, BLOCK), float("inf"), tl.float32)
    highest = tl.full((STRIPS, BLOCK), float("-inf"), tl.float32)
    if group * width < first_channels:
        total, squares, lowest, highest = with_strips(
            total, squares, lowest, highest, first, first_bounds, here, first_strips, first_strip_pixels,
            first_channels, pixels, added - centre, in_first, STRIPS, BOUNDED,
        )
    if (group + 1) * width > first_channels:
        total, squares, lowest, highest = with_strips(
            total, squares, lowest, highest, second, second_bounds, there, second_strips, second_strip_pixels,
            second_channels, pixels, added - centre, in_second, STRIPS, BOUNDED,
        )
    members = pixels.to(tl.float32) * width
    moved = tl.sum(tl.sum(total, 1), 0) / members
    variance = tl.sum(tl.sum(squares, 1), 0) / members - moved * moved
    scale = tl.rsqrt(variance + eps) * factor
    offset = addend + (added - centre - moved) * scale
    target = scales + sample * 2 * channels + channel
    tl.store(target, scale, inside)
    tl.store(target + channels, offset, inside)
    if BOUNDED:
        ends = scale * tl.min(lowest, 0)[None, :] + offset, scale * tl.max(highest, 0)[None, :] + offset
        high = tl.maximum(ends[0], ends[1])
        farthest = tl.maximum(high, tl.where(silu != 0, LOWEST_SILU, -tl.minimum(ends[0], ends[1])))
        # tl.max ignores NaN, so the second summand brings it back.
        farthest = tl.max(tl.where(inside, farthest, SMALLEST), 1) + tl.sum(tl.where(inside, scale * 0.0, 0.0), 1)
        tl.store(largest + sample * (channels // width) + group + tl.zeros((1,), tl.int32), farthest)


@triton.jit(do_not_specialize=["pixels", "silu", "groups", "most"])
def scale_and_shift(
    first, second, scales, output, largest, output_scale, pixels, first_channels, second_channels, silu, groups, most,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUNDED: tl.constexpr,
):
    """Write image * scale + offset, or its SiLU if silu, to output (batch, pixels, channels).

    Grid: (blocks of ROWS pixels, blocks of BLOCK channels, batch). first, second: see the top of this file. scales: as
    join_statistics wrote them.

    ROUNDED: output is in int8 or float8, with one scale for each image: the largest number in `largest` (batch, groups)
    for this image, divided by `most`, the largest number of the 8-bit format. The values are divided by this scale,
    which is written to output_scale, float32 (batch,). Otherwise largest, output_scale, groups and most are not read.
    """
    sample = tl.program_id(2).to(tl.int64)
    channels = first_channels + second_channels
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    valid = (row < pixels) & inside
    pixel = sample * pixels + row
    scale = tl.load(scales + sample * 2 * channels + channel, inside, 0.0)
    offset = tl.load(scales + sample * 2 * channels + channels + channel, inside, 0.0)
    place = beside(first, second, pixel, channel, first_channels, second_channels)
    values = tl.load(place, valid, 0.0).to(tl.float32) * scale + offset
    if silu != 0:
        values = values * tl.sigmoid(values)
    if ROUNDED:
        group = tl.arange(0, MOST_GROUPS)[None, :]
        bounds = tl.load(largest + sample * groups + group, group < groups, 0.0)
        # The bits of positive floats, as integers, have the same order, with NaN above all. GPUs have one instruction
        # for the maximum of integers.
        bits = tl.max(bounds.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]
        farthest = bits.to(tl.float32, bitcast=True)
        nothing = tl.zeros((1, 1), tl.int32)
        is_first = tl.program_id(0) + tl.program_id(1) == 0
        tl.store(output_scale + sample + nothing, farthest / most, nothing == tl.where(is_first, 0, 1))
        store_nearest(output, pixel * channels + channel, values * (most / farthest), valid)
    else:
        tl.store(output + pixel * channels + channel, values.to(output.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["pixels", "shift_stride", "has_shift", "silu"])
def small_group_norm(
    first, second, shift, weight, bias, output, pixels, shift_stride, has_shift, silu, eps, first_channels,
    second_channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """Write the group norm of one group of one image, or its SiLU if silu, to output (batch, pixels, channels).

    Grid: (groups, batch). It reads the image three times, the second and third time from the cache. The other
    parameters: see the top of this file.
    WIDTH: the number of channels in a group. BLOCK: WIDTH rounded up to a power of two. ROWS: how many pixels are
        processed at once.
    """
    group, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels = first_channels + second_channels
    lane = tl.arange(0, BLOCK)[None, :]
    inside = lane < WIDTH
    channel = group * WIDTH + lane
    added = tl.load(shift + sample * shift_stride + channel, inside & (has_shift != 0), 0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = (row < pixels) & inside
        place = beside(first, second, sample * pixels + row, channel, first_channels, second_channels)
        total += tl.where(valid, tl.load(place, valid, 0.0).to(tl.float32) + added, 0.0)
    members = pixels.to(tl.float32) * WIDTH
    mean = tl.sum(tl.sum(total, 1), 0) / members
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = (row < pixels) & inside
        place = beside(first, second, sample * pixels + row, channel, first_channels, second_channels)
        distance = tl.where(valid, tl.load(place, valid, 0.0).to(tl.float32) + added - mean, 0.0)
        squares += distance * distance
    variance = tl.sum(tl.sum(squares, 1), 0) / members
    scale = tl.rsqrt(variance + eps) * tl.load(weight + channel, inside, 0.0).to(tl.float32)
    offset = tl.load(bias + channel, inside, 0.0).to(tl.float32) + (added - mean) * scale
    for start in range(0, pixels, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        valid = (row < pixels) & inside
        pixel = sample * pixels + row
        place = beside(first, second, pixel, channel, first_channels, second_channels)
        values = tl.load(place, valid, 0.0).to(tl.float32) * scale + offset
        if silu != 0:
            values = values * tl.sigmoid(values)
        tl.store(output + pixel * channels + channel, values.to(output.dtype.element_ty), valid)
