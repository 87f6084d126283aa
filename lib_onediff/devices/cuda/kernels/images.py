"""Kernels over channels-last images: addition, group norm, and resizing.

An addition also measures the statistics of its output, so that the group norm after it need not read the image for
them. The statistics are the mean and the squared deviations of every channel in strips of pixels, and, for a norm that
writes eight bits, the lowest and highest values, from which its scale is computed. The number of strips depends on
sizes, but the kernel is the same for any number.

A group norm includes a shift per channel before it, a second image concatenated to the first one, and SiLU after it.
One kernel computes the norm of a small image, with a program for each group. A large image takes three kernels: they
measure the strips, join strips and channels to one scale and offset per channel (Chan, Golub, LeVeque 1979), and apply
these. Deviations are summed around a value near the mean, so that a large mean costs no precision.

Triton does not specialise the kernels for the sizes, so all resolutions share them.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.operators import QuantizedImage
from ....weights.low_bit import Kind
from .launch_config import ADDITION, APPLICATION, STATISTICS, LaunchConfig
from .launching import ceil_div, launch, power_of_two

# How many channels a program processes, and how many pixels when it resizes.
CHANNEL_BLOCK = 64
ROWS = 64
# How many programs are wanted for each multiprocessor when an image is divided into strips, and the largest number of
# strips of an image.
STRIPS_PER_PROCESSOR = 20
MOST_STRIPS = 128
# How many numbers the joining kernel loads at once. With more, the driver would translate it for half a second.
JOINED_NUMBERS = 2048
# The largest image of the kernel for small images, in pixels, and how many pixels it loads at once.
SMALL_IMAGE_PIXELS = 256
SMALL_ROWS = 64
# The narrowest groups of the kernel for small images, in channels. It would read narrower ones in too small pieces, and
# each width needs a kernel of its own.
SMALL_IMAGE_GROUP_WIDTH = 40
# The largest number of groups of a norm that writes eight bits.
MOST_GROUPS = 32


@dataclass(frozen=True)
class PartialStatistics:
    """The statistics of an image, measured in strips of pixels.

    statistics: float32 (batch, strips, 2, channels): each channel's mean in the strip, and its sum of squared
        deviations from that mean.
    pixels: the number of pixels in a strip; the last strip has the remaining ones.
    bounds: each channel's lowest and highest value in the strip, in the shape of statistics; None if not measured.
    """

    statistics: Tensor
    pixels: int
    bounds: Tensor | None = None


def measure(
    image: Tensor, config: LaunchConfig = STATISTICS.candidates[0], bounded: bool = False,
    known: PartialStatistics | None = None,
) -> PartialStatistics:
    """The statistics of an image (batch, channels, height, width) in channels-last memory. bounded: with bounds.

    known: earlier statistics of this image, or None. They are returned, and nothing is measured, except if bounded and
    they have no bounds: then everything is measured again.
    """
    if known is not None and (known.bounds is not None or not bounded):
        return known
    return add_and_measure(None, image, None, None, config, bounded)


def add_and_measure(
    image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor | None,
    config: LaunchConfig = ADDITION.candidates[0], bounded: bool = False,
) -> PartialStatistics:
    """Write image + update + bias to output, and return the output's statistics.

    image, update, output: (batch, channels, height, width) in channels-last memory, of one dtype. image and bias
    (channels,) may be None. output may be the same tensor as update. output None: only measure update. bounded: with
    bounds.
    """
    batch, channels, height, width = update.shape
    pixels = height * width
    rows, warps = config
    channel_blocks = ceil_div(channels, CHANNEL_BLOCK)
    tiles = ceil_div(ceil_div(pixels, rows), wanted_strips(update.device, channel_blocks * batch))
    count = ceil_div(pixels, tiles * rows)
    statistics = torch.empty((batch, count, 2, channels), device=update.device, dtype=torch.float32)
    bounds = torch.empty_like(statistics) if bounded else None
    launch(
        "images.strip_statistics", (count, channel_blocks, batch), update if image is None else image, update,
        update if bias is None else bias, update if output is None else output, statistics,
        statistics if bounds is None else bounds, pixels, count, tiles, channels, int(output is not None),
        int(image is not None), int(bias is not None), warps=warps, BLOCK=CHANNEL_BLOCK, ROWS=rows, BOUNDED=bounded,
    )
    return PartialStatistics(statistics, tiles * rows, bounds)


def wanted_strips(device: torch.device, programs_per_strip: int) -> int:
    """The number of strips into which an image is divided, from 1 to MOST_STRIPS, so that every multiprocessor of the
    GPU has work. More strips would only make joining slower. programs_per_strip: how many programs of the kernel
    process one strip."""
    return min(MOST_STRIPS, max(1, STRIPS_PER_PROCESSOR * processors(device) // programs_per_strip))


@functools.lru_cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, measured: tuple[PartialStatistics | None, PartialStatistics | None] = (None, None),
    statistics_config: LaunchConfig = STATISTICS.candidates[0],
    application_config: LaunchConfig = APPLICATION.candidates[0],
    kind: Kind | None = None, at_once: bool | None = None,
) -> Any:
    """The group norm of concatenate(first, second) + shift, followed by SiLU if silu; sums are in float32.

    first, second: (batch, channels, height, width) in channels-last memory; second may be None. weight, bias: (channels
        of both images,). shift: (batch, channels of both images) or None.
    measured: the statistics of first and of second, each None if they must be measured here. The kernel for small
        images does not use them.
    kind: return a QuantizedImage in this 8-bit format, for at most MOST_GROUPS groups; None: return a tensor of first's
        dtype in channels-last memory.
    at_once: True: use the single kernel for small images, which is correct for all sizes, but cannot write eight bits,
        so kind must be None. False: use the three kernels. None: use the single kernel where it is faster, which is for
        at most SMALL_IMAGE_PIXELS pixels with groups of at least SMALL_IMAGE_GROUP_WIDTH channels; for these sizes,
        kind must be None.
    """
    batch, here, height, width = first.shape
    there = 0 if second is None else second.shape[1]
    channels = here + there
    pixels = height * width
    group_width = channels // groups
    dtype = first.dtype if kind is None else kind.dtype
    shape = batch, channels, height, width
    output = torch.empty(shape, device=first.device, dtype=dtype, memory_format=torch.channels_last)
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype replaces each one that is missing.
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
    one = measure(first, statistics_config, bounded, measured[0])
    other = one if second is None else measure(second, statistics_config, bounded, measured[1])
    # The scale and the offset of each channel.
    scales = torch.empty((batch, 2, channels), device=first.device, dtype=torch.float32)
    largest = scales if kind is None else scales.new_empty((batch, groups))
    launch(
        "group_norm.join_statistics", (groups, batch), one.statistics, other.statistics,
        *(part.statistics if part.bounds is None else part.bounds for part in (one, other)), added, weight, bias,
        scales, largest, pixels, one.statistics.shape[1], other.statistics.shape[1], one.pixels, other.pixels,
        added_stride, has_shift, eps, here, there, group_width, int(silu), warps=8, BLOCK=join_block(group_width),
        STRIPS=JOINED_NUMBERS // join_block(group_width), BOUNDED=bounded,
    )
    rows, warps = application_config
    output_scales = scales if kind is None else scales.new_empty((batch, 1))
    launch(
        "group_norm.scale_and_shift", (ceil_div(pixels, rows), ceil_div(channels, CHANNEL_BLOCK), batch), *images,
        scales, output, largest, output_scales, pixels, here, there, int(silu), groups,
        1.0 if kind is None else kind.largest, warps=warps, BLOCK=CHANNEL_BLOCK, ROWS=rows, ROUNDED=kind is not None,
    )
    return output if kind is None else QuantizedImage(output.permute(0, 2, 3, 1), output_scales)


def join_block(group_width: int) -> int:
    """The block size of the joining kernel for groups of this many channels: a power of two, at least 32, because the
    kernel is compiled for each block size."""
    return max(32, power_of_two(group_width))


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """An image (batch, channels, height, width) in channels-last memory, resized by nearest neighbour as
    torch.nn.functional.interpolate defines it."""
    batch, channels, old_height, old_width = image.shape
    output = torch.empty(
        (batch, channels, height, width), device=image.device, dtype=image.dtype, memory_format=torch.channels_last
    )
    launch(
        "images.nearest", (ceil_div(height * width, ROWS), ceil_div(channels, CHANNEL_BLOCK), batch), image, output,
        old_height, old_width, height, width, old_height / height, old_width / width, channels, warps=4,
        BLOCK=CHANNEL_BLOCK, ROWS=ROWS,
    )
    return output
