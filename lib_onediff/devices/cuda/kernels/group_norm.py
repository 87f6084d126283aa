"""Group norm of channels-last images, with what surrounds it: a shift per channel before, a second image beside the
first, SiLU after.

A small image is done by one kernel, a program for each group. A large one takes three: means and squared deviations
of strips of pixels (images), the joining of strips and channels to one scale and offset per channel (Chan,
Golub, LeVeque 1979), and their application. Deviations are summed around a value near the mean, so that a large mean
costs no digits.

Sizes are arguments that Triton does not specialise on: every resolution has the same kernels.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....core.operators import QuantizedImage
from ....weights.low_bit import Kind
from .images import CHANNEL_BLOCK, PartialStatistics, measure
from .launch_config import APPLICATION, STATISTICS, LaunchConfig
from .launching import ceil_div, launch, power_of_two

# At once; more make a kernel that a driver translates for half a second.
JOINED_NUMBERS = 2048
SMALL_IMAGE_PIXELS = 256
# Narrower groups make one kernel for all read too scattered, and each width is a kernel to compile.
SMALL_IMAGE_GROUP_WIDTH = 40
SMALL_ROWS = 64
# Of a norm in eight bits.
MOST_GROUPS = 32


def group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, measured: tuple[PartialStatistics | None, PartialStatistics | None] = (None, None),
    statistics_cut: LaunchConfig = STATISTICS.candidates[0], application_cut: LaunchConfig = APPLICATION.candidates[0],
    kind: Kind | None = None, at_once: bool | None = None,
) -> Any:
    """Group norm of (first beside second) + shift, then SiLU if silu.

    first, second: (batch, channels, height, width) in channels-last memory; shift: (batch, channels) or None. Returns
    the dtype of first, in channels-last memory; sums in float32. measured: of the images, where whoever made them has.
    kind: to have a QuantizedImage in it, of at most MOST_GROUPS. at_once: whether by the one kernel for small images,
    which is right for any and takes no kind; None: where it is the fastest.
    """
    batch, here, height, width = first.shape
    there = 0 if second is None else second.shape[1]
    channels, pixels = here + there, height * width
    group_width = channels // groups
    dtype = first.dtype if kind is None else kind.dtype
    shape = batch, channels, height, width
    output = torch.empty(shape, device=first.device, dtype=dtype, memory_format=torch.channels_last)
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
    images = first, first if second is None else second
    added, added_stride, has_shift = (first, 0, 0) if shift is None else (shift, shift.stride(0), 1)
    if at_once is None:
        at_once = pixels <= SMALL_IMAGE_PIXELS and group_width >= SMALL_IMAGE_GROUP_WIDTH
    if at_once:
        launch(
            "group_norm.small_group_norm", (groups, batch), *images, added, weight, bias, output, pixels, added_stride,
            has_shift, int(silu), eps, here, there, warps=8, WIDTH=group_width,
            BLOCK=max(16, power_of_two(group_width)), ROWS=SMALL_ROWS,
        )
        return output
    bounded = kind is not None
    one = measure(first, statistics_cut, bounded, measured[0])
    other = one if second is None else measure(second, statistics_cut, bounded, measured[1])
    # What the norm does to each channel.
    scales = torch.empty((batch, 2, channels), device=first.device, dtype=torch.float32)
    largest = scales if kind is None else scales.new_empty((batch, groups))
    launch(
        "group_norm.join_statistics", (groups, batch), one.statistics, other.statistics,
        *(part.statistics if part.bounds is None else part.bounds for part in (one, other)), added, weight, bias,
        scales, largest, pixels, one.count, other.count, one.pixels, other.pixels, added_stride, has_shift, eps, here,
        there, group_width, int(silu), warps=8, BLOCK=join_block(group_width),
        STRIPS=JOINED_NUMBERS // join_block(group_width), BOUNDED=bounded,
    )
    rows, warps = application_cut
    output_scales = scales if kind is None else scales.new_empty((batch, 1))
    launch(
        "group_norm.scale_and_shift", (ceil_div(pixels, rows), ceil_div(channels, CHANNEL_BLOCK), batch), *images,
        scales, output, largest, output_scales, pixels, here, there, int(silu), groups,
        1.0 if kind is None else kind.largest, warps=warps, BLOCK=CHANNEL_BLOCK, ROWS=rows, ROUNDED=kind is not None,
    )
    return output if kind is None else QuantizedImage(output.permute(0, 2, 3, 1), output_scales)


def join_block(group_width: int) -> int:
    """Each is a kernel to compile, so there are few."""
    return max(32, power_of_two(group_width))
