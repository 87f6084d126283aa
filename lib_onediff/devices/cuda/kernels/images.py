"""Additions to channels-last images, measured on the way, and their enlargement.

What is measured are means and squared deviations of strips of pixels, the first half of a group norm, which then need
not read the image for that. The number of strips depends on sizes alone, and compiles nothing.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_config import ADDITION, STATISTICS, LaunchConfig

CHANNEL_BLOCK, ROWS = 64, 64
STRIPS_PER_PROCESSOR = 20
MOST_STRIPS = 128


@dataclass(frozen=True)
class PartialStatistics:
    """statistics: (batch, count, mean then squared deviations, channels) in float32, each over so many pixels, but the
    last over what is left."""

    statistics: Tensor
    count: int
    pixels: int


@triton.jit(do_not_specialize=["pixels", "strips", "tiles", "adds", "has_image", "has_bias"])
def strip_statistics(
    image, update, bias, output, statistics, pixels, strips, tiles, channels, adds, has_image, has_bias,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """The statistics of update, each strip over tiles * ROWS pixels; or, if adds, of output = image + update + bias."""
    strip, sample = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    addend = tl.load(bias + channel, inside & (has_bias != 0), 0.0).to(tl.float32)
    start = strip * tiles * ROWS
    corner = (sample * pixels + start) * channels + channel
    # A pixel of the strip is at most sqrt(pixels) standard deviations from the strip's mean: near enough.
    centre = tl.load(update + corner, inside, 0.0).to(tl.float32) + addend
    centre += tl.load(image + corner, inside & (has_image != 0), 0.0).to(tl.float32)
    # The output may be the update itself, and everybody must have read the centre before it is written.
    tl.debug_barrier()
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(0, tiles):
        row = start + tile * ROWS + tl.arange(0, ROWS)[:, None]
        valid = (row < pixels) & inside
        place = (sample * pixels + row) * channels + channel
        values = tl.load(update + place, valid, 0.0).to(tl.float32)
        values += tl.load(image + place, valid & (has_image != 0), 0.0).to(tl.float32)
        rounded = (values + addend).to(output.dtype.element_ty)
        tl.store(output + place, rounded, valid & (adds != 0))
        distance = tl.where(valid, rounded.to(tl.float32) - centre, 0.0)
        total += distance
        squares += distance * distance
    number = tl.minimum(pixels - start, tiles * ROWS).to(tl.float32)
    moved = tl.sum(total, 0)[None, :]
    target = statistics + (sample * strips + strip) * 2 * channels + channel
    tl.store(target, centre + moved / number, inside)
    tl.store(target + channels, tl.sum(squares, 0)[None, :] - moved * moved / number, inside)


@triton.jit(do_not_specialize=["height", "width", "new_height", "new_width", "down", "across"])
def nearest(
    image, output, height, width, new_height, new_width, down, across, channels, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """down, across: old size over new, in float32 as torch rounds it."""
    sample = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = (row < new_height * new_width) & (channel < channels)
    y = tl.minimum(((row // new_width).to(tl.float32) * down).to(tl.int32), height - 1)
    x = tl.minimum(((row % new_width).to(tl.float32) * across).to(tl.int32), width - 1)
    source = (sample * height * width + y * width + x) * channels + channel
    target = (sample * new_height * new_width + row) * channels + channel
    tl.store(output + target, tl.load(image + source, valid), valid)


def measure(image: Tensor, config: LaunchConfig = STATISTICS.candidates[0]) -> PartialStatistics:
    """The statistics of an image (batch, channels, height, width) in channels-last memory."""
    return measure_sum(None, image, None, None, config)


def add_and_measure(
    image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor,
    config: LaunchConfig = ADDITION.candidates[0],
) -> PartialStatistics:
    """output = image + update + bias (channels) in channels-last memory, and its statistics. output may be update."""
    return measure_sum(image, update, bias, output, config)


def measure_sum(
    image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor | None, config: LaunchConfig
) -> PartialStatistics:
    batch, channels, height, width = update.shape
    pixels, (rows, warps) = height * width, config
    channel_blocks = triton.cdiv(channels, CHANNEL_BLOCK)
    tiles = triton.cdiv(triton.cdiv(pixels, rows), wanted_strips(update.device, channel_blocks * batch))
    count = triton.cdiv(pixels, tiles * rows)
    statistics = torch.empty((batch, count, 2, channels), device=update.device, dtype=torch.float32)
    strip_statistics[(count, channel_blocks, batch)](
        update if image is None else image, update, update if bias is None else bias,
        update if output is None else output, statistics, pixels, count, tiles, channels, int(output is not None),
        int(image is not None), int(bias is not None), CHANNEL_BLOCK, rows, num_warps=warps,
    )
    return PartialStatistics(statistics, count, tiles * rows)


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
    nearest[(triton.cdiv(height * width, ROWS), triton.cdiv(channels, CHANNEL_BLOCK), batch)](
        image, output, old_height, old_width, height, width, old_height / height, old_width / width, channels,
        CHANNEL_BLOCK, ROWS, num_warps=4,
    )
    return output
