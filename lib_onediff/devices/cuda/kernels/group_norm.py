"""Group norm of channels-last images, with what surrounds it: a shift per channel before, a second image beside the
first, SiLU after.

A small image is done by one kernel, a program for each group. A large one takes three: means and squared deviations
of strips of pixels (images), the joining of strips and channels to one scale and offset per channel (Chan,
Golub, LeVeque 1979), and their application. Deviations are summed around a value near the mean, so that a large mean
costs no digits.

Sizes are arguments that Triton does not specialise on: another resolution compiles nothing.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.operators import QuantizedImage
from .images import CHANNEL_BLOCK, PartialStatistics, measure
from .launch_config import APPLICATION, STATISTICS, LaunchConfig

JOINED_STRIPS = 64
SMALL_IMAGE_PIXELS = 256
# Narrower groups make one kernel for all read too scattered, and each width is a kernel to compile.
SMALL_IMAGE_GROUP_WIDTH = 40
SMALL_ROWS = 64


class Rounding(NamedTuple):
    """Into which eight bits a norm is written, in a type of float8. normed_scale: of the convolution that reads it,
    (1, 1), for each deviation that a number may be from its mean. farthest: how many those may be."""

    normed_scale: Tensor
    farthest: float
    dtype: torch.dtype


@triton.jit
def beside(first, second, pixel, channel, first_channels, second_channels):
    """Where the channels of two images that lie side by side are."""
    here = first + pixel * first_channels + channel
    there = second + pixel * second_channels + (channel - first_channels)
    return tl.where(channel < first_channels, here, there)


@triton.jit
def with_strips(
    total, squares, place, partial_statistics, strip_pixels, channels, pixels, offset, inside, STRIPS: tl.constexpr
):
    """The sums of distances from a centre and of their squares, with an image's strips added. offset: from centre."""
    strip = tl.arange(0, STRIPS)[:, None]
    for chunk in range(0, partial_statistics, STRIPS):
        number = tl.minimum(pixels - (chunk + strip) * strip_pixels, strip_pixels).to(tl.float32)
        valid = (chunk + strip < partial_statistics) & inside
        means = place + (chunk + strip) * 2 * channels
        distance = tl.load(means, valid, 0.0) + offset
        deviations = tl.load(means + channels, valid, 0.0)
        total += tl.where(valid, number * distance, 0.0)
        squares += tl.where(valid, deviations + number * distance * distance, 0.0)
    return total, squares


@triton.jit(do_not_specialize=[
    "pixels", "first_strips", "second_strips", "first_strip_pixels", "second_strip_pixels", "shift_stride", "has_shift",
    "width",
])
def join_statistics(
    first, second, shift, weight, bias, scales, pixels, first_strips, second_strips, first_strip_pixels,
    second_strip_pixels, shift_stride, has_shift, eps, first_channels, second_channels, width, BLOCK: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """scales (sample, scale then offset, channels): what the norm does to each channel of the unshifted image.

    first, second: the statistics of two images that lie side by side.
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
    here = first + sample * first_strips * 2 * first_channels + channel
    there = second + sample * second_strips * 2 * second_channels + (channel - first_channels)
    some = tl.load(here, in_first, 0.0) + tl.load(there, in_second, 0.0) + added
    centre = tl.sum(tl.sum(some, 1), 0) / width
    total = tl.zeros((STRIPS, BLOCK), tl.float32)
    squares = tl.zeros((STRIPS, BLOCK), tl.float32)
    if group * width < first_channels:
        total, squares = with_strips(
            total, squares, here, first_strips, first_strip_pixels, first_channels, pixels, added - centre, in_first,
            STRIPS,
        )
    if (group + 1) * width > first_channels:
        total, squares = with_strips(
            total, squares, there, second_strips, second_strip_pixels, second_channels, pixels, added - centre,
            in_second, STRIPS,
        )
    members = pixels.to(tl.float32) * width
    moved = tl.sum(tl.sum(total, 1), 0) / members
    variance = tl.sum(tl.sum(squares, 1), 0) / members - moved * moved
    scale = tl.rsqrt(variance + eps) * factor
    target = scales + sample * 2 * channels + channel
    tl.store(target, scale, inside)
    tl.store(target + channels, addend + (added - centre - moved) * scale, inside)


@triton.jit(do_not_specialize=["pixels", "silu", "farthest"])
def scale_and_shift(
    first, second, scales, output, normed_scale, output_scale, pixels, first_channels, second_channels, silu, farthest,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ROUNDED: tl.constexpr,
):
    """What the norm and the SiLU make of two images that lie side by side. scales: see join_statistics. ROUNDED: in
    float8, as multiples of output_scale, which is written: normed_scale * farthest."""
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
        nothing = tl.zeros((1, 1), tl.int32)
        unit = tl.load(normed_scale + nothing) * farthest
        is_first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
        tl.store(output_scale + nothing, unit, nothing == tl.where(is_first, 0, 1))
        values = values / unit
    tl.store(output + pixel * channels + channel, values.to(output.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["pixels", "shift_stride", "has_shift", "silu"])
def small_group_norm(
    first, second, shift, weight, bias, output, pixels, shift_stride, has_shift, silu, eps, first_channels,
    second_channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """The whole norm of one group of one sample; the second reading of the image comes from the cache."""
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


def group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, measured: tuple[PartialStatistics | None, PartialStatistics | None] = (None, None),
    small_pixels: int = SMALL_IMAGE_PIXELS,
    statistics_cut: LaunchConfig = STATISTICS.candidates[0], application_cut: LaunchConfig = APPLICATION.candidates[0],
) -> Tensor:
    """Group norm of (first beside second) + shift, then SiLU if silu.

    first, second: (batch, channels, height, width) in channels-last memory; shift: (batch, channels) or None. Returns
    the dtype of first, in channels-last memory; sums in float32. measured: see large_group_norm. small_pixels: up
    to which size one kernel does it all. statistics_cut, application_cut: of large_group_norm.
    """
    arguments = first, second, weight, bias, groups, eps, silu, shift
    channels = first.shape[1] + (0 if second is None else second.shape[1])
    if first.shape[2] * first.shape[3] <= small_pixels and channels >= groups * SMALL_IMAGE_GROUP_WIDTH:
        return small_image_group_norm(*arguments)
    return large_group_norm(*arguments, measured, statistics_cut, application_cut)


def small_image_group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None,
) -> Tensor:
    """As group_norm, by one kernel: right for any image, and fast for small ones."""
    output, images, of_channels = arrange(first, second)
    batch, channels, height, width = output.shape
    group_width = channels // groups
    small_group_norm[(groups, batch)](
        *images, *shifting(first, shift)[:1], weight, bias, output, height * width, *shifting(first, shift)[1:],
        int(silu), eps, *of_channels, group_width, max(16, triton.next_power_of_2(group_width)), SMALL_ROWS,
        num_warps=8,
    )
    return output


def large_group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, measured: tuple[PartialStatistics | None, PartialStatistics | None] = (None, None),
    statistics_cut: LaunchConfig = STATISTICS.candidates[0], application_cut: LaunchConfig = APPLICATION.candidates[0],
    rounding: Rounding | None = None,
) -> Any:
    """As group_norm, by kernels that keep a whole GPU busy. measured: of the images, where whoever made them has.
    rounding: to have a QuantizedImage."""
    output, images, of_channels = arrange(first, second, None if rounding is None else rounding.dtype)
    batch, channels, height, width = output.shape
    pixels, group_width = height * width, channels // groups
    here = measured[0] or measure(first, statistics_cut)
    there = here if second is None else measured[1] or measure(second, statistics_cut)
    # What the norm does to each channel.
    scales = torch.empty((batch, 2, channels), device=first.device, dtype=torch.float32)
    added, added_stride, has_shift = shifting(first, shift)
    join_statistics[(groups, batch)](
        here.statistics, there.statistics, added, weight, bias, scales, pixels, here.count, there.count, here.pixels,
        there.pixels, added_stride, has_shift, eps, *of_channels, group_width, join_block(group_width), JOINED_STRIPS,
        num_warps=8,
    )
    rows, warps = application_cut
    output_scale = scales if rounding is None else torch.empty((1, 1), device=first.device, dtype=torch.float32)
    scale_and_shift[(triton.cdiv(pixels, rows), triton.cdiv(channels, CHANNEL_BLOCK), batch)](
        *images, scales, output, scales if rounding is None else rounding.normed_scale, output_scale, pixels,
        *of_channels, int(silu), 1.0 if rounding is None else rounding.farthest, CHANNEL_BLOCK, rows,
        rounding is not None, num_warps=warps,
    )
    return output if rounding is None else QuantizedImage(output.permute(0, 2, 3, 1), output_scale)


def arrange(
    first: Tensor, second: Tensor | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """The output to be filled, by default in the images' type, the two images, and the channels of each."""
    batch, channels, height, width = first.shape
    others = 0 if second is None else second.shape[1]
    output = torch.empty(
        (batch, channels + others, height, width), device=first.device, dtype=dtype or first.dtype,
        memory_format=torch.channels_last,
    )
    return output, (first, first if second is None else second), (channels, others)


def shifting(image: Tensor, shift: Tensor | None) -> tuple[Tensor, int, int]:
    """The shift or something in its place, from sample to sample, and whether it is one."""
    return (image, 0, 0) if shift is None else (shift, shift.stride(0), 1)


def join_block(group_width: int) -> int:
    """Each is a kernel to compile, so there are few."""
    return max(32, int(triton.next_power_of_2(group_width)))
