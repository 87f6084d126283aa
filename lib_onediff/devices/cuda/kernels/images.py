"""Additions to channels-last images, measured on the way, and their enlargement.

What is measured are means and squared deviations of strips of pixels, the first half of a group norm, which then need
not read the image for that; and the lowest and the highest numbers, which bound what a norm in eight bits gives. The
number of strips depends on sizes alone, and needs no other kernel.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch_config import ADDITION, STATISTICS, LaunchConfig
from .launching import ceil_div, launch

CHANNEL_BLOCK, ROWS = 64, 64
STRIPS_PER_PROCESSOR = 20
MOST_STRIPS = 128


@dataclass(frozen=True)
class PartialStatistics:
    """statistics: (batch, count, mean then squared deviations, channels) in float32, each over so many pixels, but the
    last over what is left. bounds: the lowest numbers, then the highest, in the same shape; None where those were not
    asked for."""

    statistics: Tensor
    count: int
    pixels: int
    bounds: Tensor | None = None


def measure(
    image: Tensor, config: LaunchConfig = STATISTICS.candidates[0], bounded: bool = False,
    known: PartialStatistics | None = None,
) -> PartialStatistics:
    """The statistics of an image (batch, channels, height, width) in channels-last memory, or those that are known
    where they have what is asked for."""
    if known is not None and (known.bounds is not None or not bounded):
        return known
    return add_and_measure(None, image, None, None, config, bounded)


def add_and_measure(
    image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor | None,
    config: LaunchConfig = ADDITION.candidates[0], bounded: bool = False,
) -> PartialStatistics:
    """output = image + update + bias (channels) in channels-last memory, and its statistics. output may be update;
    None: of nothing but update."""
    batch, channels, height, width = update.shape
    pixels, (rows, warps) = height * width, config
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
    return PartialStatistics(statistics, count, tiles * rows, bounds)


def wanted_strips(device: torch.device, programs_per_strip: int) -> int:
    """Into how many strips to cut an image so that every processor of the GPU has work; more only cost joining."""
    return min(MOST_STRIPS, max(1, STRIPS_PER_PROCESSOR * processors(device) // programs_per_strip))


@functools.lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """Nearest neighbour, as torch.nn.functional.interpolate defines it, of an image in channels-last memory."""
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
