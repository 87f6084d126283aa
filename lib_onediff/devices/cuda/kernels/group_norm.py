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
from torch import Tensor

from ....core.operators import QuantizedImage
from .images import CHANNEL_BLOCK, PartialStatistics, measure
from .launch_config import APPLICATION, STATISTICS, LaunchConfig
from .launching import ceil_div, launch, power_of_two

# At once; more make a kernel that a driver translates for half a second.
JOINED_NUMBERS = 2048
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


def group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, measured: tuple[PartialStatistics | None, PartialStatistics | None] = (None, None),
    statistics_cut: LaunchConfig = STATISTICS.candidates[0], application_cut: LaunchConfig = APPLICATION.candidates[0],
    rounding: Rounding | None = None,
) -> Any:
    """Group norm of (first beside second) + shift, then SiLU if silu.

    first, second: (batch, channels, height, width) in channels-last memory; shift: (batch, channels) or None. Returns
    the dtype of first, in channels-last memory; sums in float32. measured, statistics_cut, application_cut, rounding:
    of large_group_norm, for an image that is not small.
    """
    arguments = first, second, weight, bias, groups, eps, silu, shift
    channels = first.shape[1] + (0 if second is None else second.shape[1])
    if first.shape[2] * first.shape[3] <= SMALL_IMAGE_PIXELS and channels >= groups * SMALL_IMAGE_GROUP_WIDTH:
        return small_image_group_norm(*arguments)
    return large_group_norm(*arguments, measured, statistics_cut, application_cut, rounding)


def small_image_group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None,
) -> Tensor:
    """As group_norm, by one kernel: right for any image, and fast for small ones."""
    output, images, of_channels = arrange(first, second)
    batch, channels, height, width = output.shape
    group_width = channels // groups
    launch(
        "group_norm.small_group_norm", (groups, batch), *images, *shifting(first, shift)[:1], weight, bias, output,
        height * width, *shifting(first, shift)[1:], int(silu), eps, *of_channels, warps=8, WIDTH=group_width,
        BLOCK=max(16, power_of_two(group_width)), ROWS=SMALL_ROWS,
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
    launch(
        "group_norm.join_statistics", (groups, batch), here.statistics, there.statistics, added, weight, bias, scales,
        pixels, here.count, there.count, here.pixels, there.pixels, added_stride, has_shift, eps, *of_channels,
        group_width, warps=8, BLOCK=join_block(group_width), STRIPS=JOINED_NUMBERS // join_block(group_width),
    )
    rows, warps = application_cut
    output_scale = scales if rounding is None else torch.empty((1, 1), device=first.device, dtype=torch.float32)
    launch(
        "group_norm.scale_and_shift", (ceil_div(pixels, rows), ceil_div(channels, CHANNEL_BLOCK), batch), *images,
        scales, output, scales if rounding is None else rounding.normed_scale, output_scale, pixels, *of_channels,
        int(silu), 1.0 if rounding is None else rounding.farthest, warps=warps, BLOCK=CHANNEL_BLOCK, ROWS=rows,
        ROUNDED=rounding is not None,
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
    return max(32, power_of_two(group_width))
