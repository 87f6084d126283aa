"""Additions to channels-last images, and their enlargement."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_config import ADDITION, LaunchConfig

CHANNEL_BLOCK = 64
ROWS = 64


@triton.jit(do_not_specialize=["pixels", "has_image", "has_bias"])
def add_with_bias(
    image, update, bias, output, pixels, channels, has_image, has_bias, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    valid = (row < pixels) & inside
    place = row * channels + channel
    values = tl.load(update + place, valid, 0.0).to(tl.float32)
    values += tl.load(image + place, valid & (has_image != 0), 0.0).to(tl.float32)
    values += tl.load(bias + channel, inside & (has_bias != 0), 0.0).to(tl.float32)
    tl.store(output + place, values.to(output.dtype.element_ty), valid)


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


def add(
    image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor,
    config: LaunchConfig = ADDITION.candidates[0],
) -> None:
    """output = image + update + bias (channels), of images in channels-last memory. output may be update."""
    batch, channels, height, width = output.shape
    pixels = batch * height * width
    rows, warps = config
    add_with_bias[(triton.cdiv(pixels, rows), triton.cdiv(channels, CHANNEL_BLOCK))](
        update if image is None else image, update, update if bias is None else bias, output, pixels, channels,
        int(image is not None), int(bias is not None), CHANNEL_BLOCK, rows, num_warps=warps,
    )


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
