"""Statistics of strips of channels-last images, additions of images, and resizing by nearest neighbour."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pixels", "strips", "tiles", "adds", "has_image", "has_bias"])
def strip_statistics(
    image, update, bias, output, statistics, bounds, pixels, strips, tiles, channels, adds, has_image, has_bias,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Write the statistics of one strip of image + update + bias, rounded to output's dtype; if adds, write the sum to
    output too.

    Grid: (strips, blocks of BLOCK channels, batch). A strip has tiles * ROWS pixels; the last strip has the remaining
    ones.
    image, update, output: (batch, pixels, channels). output may be update.
    bias: (channels,). has_image, has_bias: 0 if there is no image or no bias, which is then any tensor of that dtype.
    adds: 1 or 0. If 0, output is any tensor of that dtype, and is not written.
    statistics: float32 (batch, strips, 2, channels): each channel's mean in the strip, and its sum of squared
        deviations from that mean.
    bounds: of the same shape: each channel's lowest and highest value in the strip. Written only if BOUNDED.
    """
    strip, sample = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    addend = tl.load(bias + channel, inside & (has_bias != 0), 0.0).to(tl.float32)
    start = strip * tiles * ROWS
    corner = (sample * pixels + start) * channels + channel
    # Sums are taken around the strip's first pixel: it is at most sqrt(pixels) standard deviations from the mean.
    centre = tl.load(update + corner, inside, 0.0).to(tl.float32) + addend
    centre += tl.load(image + corner, inside & (has_image != 0), 0.0).to(tl.float32)
    # The output may be the update itself: all threads must have read the first pixel before it is written.
    tl.debug_barrier()
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    if BOUNDED:
        lowest = tl.zeros((ROWS, BLOCK), tl.float32)
        highest = tl.zeros((ROWS, BLOCK), tl.float32)
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
        if BOUNDED:
            lowest = tl.minimum(lowest, distance)
            highest = tl.maximum(highest, distance)
    number = tl.minimum(pixels - start, tiles * ROWS).to(tl.float32)
    moved = tl.sum(total, 0)[None, :]
    place = (sample * strips + strip) * 2 * channels + channel
    tl.store(statistics + place, centre + moved / number, inside)
    tl.store(statistics + place + channels, tl.sum(squares, 0)[None, :] - moved * moved / number, inside)
    if BOUNDED:
        tl.store(bounds + place, centre + tl.min(lowest, 0)[None, :], inside)
        tl.store(bounds + place + channels, centre + tl.max(highest, 0)[None, :], inside)


@triton.jit(do_not_specialize=["height", "width", "new_height", "new_width", "down", "across"])
def nearest(
    image, output, height, width, new_height, new_width, down, across, channels, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write ROWS pixels of an image, resized by nearest neighbour, to output.

    Grid: (blocks of ROWS output pixels, blocks of BLOCK channels, batch).
    image: (batch, height * width, channels). output: (batch, new_height * new_width, channels).
    down, across: height / new_height and width / new_width in float32, as torch computes them.
    """
    sample = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = (row < new_height * new_width) & (channel < channels)
    y = tl.minimum(((row // new_width).to(tl.float32) * down).to(tl.int32), height - 1)
    x = tl.minimum(((row % new_width).to(tl.float32) * across).to(tl.int32), width - 1)
    source = (sample * height * width + y * width + x) * channels + channel
    target = (sample * new_height * new_width + row) * channels + channel
    tl.store(output + target, tl.load(image + source, valid), valid)
