"""A convolution of 3x3 in float8, as one product over the nine places of its kernel, and the group norm that writes
what it reads.

The GPU copies tiles of an image by itself (compute capability 9.0), and gives zeros for what lies beyond an edge. The
image has one scale, known beforehand (model.low_bit.normed_scale); the weight may have one for every output channel.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedImage
from ....weights.low_bit import FP8, deviations
from ..kernels.group_norm import scaled_and_shifted
from ..kernels.launch_config import APPLICATION, CONVOLUTION, LaunchConfig
from ..kernels.partial_statistics import CHANNEL_BLOCK
from .int8_mm import TensorDescriptor, tile_at


@triton.jit(do_not_specialize=["pixels", "silu", "farthest"])
def scale_and_shift_rounded(
    first, second, scales, output, normed_scale, output_scale, pixels, first_channels, second_channels, silu, farthest,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """As group_norm.scale_and_shift, in float8. output_scale: is written, normed_scale * farthest."""
    sample = tl.program_id(2).to(tl.int64)
    channels = first_channels + second_channels
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    valid = (row < pixels) & inside
    pixel = sample * pixels + row
    values = scaled_and_shifted(
        first, second, scales, sample, pixel, channel, inside, valid, first_channels, second_channels, silu
    )
    nothing = tl.zeros((1, 1), tl.int32)
    unit = tl.load(normed_scale + nothing) * farthest
    is_first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
    tl.store(output_scale + nothing, unit, nothing == tl.where(is_first, 0, 1))
    tl.store(output + pixel * channels + channel, (values / unit).to(output.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["batch", "height", "width", "has_scales"])
def convolution_tile(
    image, scale, weight, weight_scales, output, batch, height, width, channels, out_channels, has_scales,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):
    """A program for each DOWN x ACROSS pixels and N channels of the output. image, weight, output: descriptors of
    tensors: (batch, height, width, channels), (out_channels, 9 * channels), (batch, height, width, out_channels)."""
    tiles_across, tiles_down = tl.cdiv(width, ACROSS), tl.cdiv(height, DOWN)
    tiles = tiles_across * tiles_down
    tile, place = tile_at(tl.program_id(0), tiles * batch, tl.cdiv(out_channels, N), GROUP)
    sample, tile = tile // tiles, tile % tiles
    top, left = tile // tiles_across * DOWN, tile % tiles_across * ACROSS
    parts = tl.cdiv(channels, K)
    sums = tl.zeros((DOWN * ACROSS, N), tl.float32)
    for step in range(0, 9 * parts):
        tap, channel = step // parts, step % parts * K
        # What lies beyond the last channel is zero in the image, whatever the weight has there.
        pixels = image.load([sample, top + tap // 3 - 1, left + tap % 3 - 1, channel]).reshape(DOWN * ACROSS, K)
        sums = tl.dot(pixels, weight.load([place * N, tap * channels + channel]).T, sums)
    column = place * N + tl.arange(0, N)
    factor = tl.load(scale) * tl.load(weight_scales + column * has_scales, column < out_channels, 0.0)
    numbers = (sums * factor[None, :]).to(output.dtype)
    output.store([sample, top, left, place * N], numbers.reshape(1, DOWN, ACROSS, N))


def normed(
    first: Tensor, second: Tensor | None, scales: Tensor, normed_scale: Tensor, groups: int, silu: bool,
    config: LaunchConfig = APPLICATION.candidates[0],
) -> QuantizedImage:
    """What group_norm.scale_and_shift gives, in float8. first, second: channels-last images, side by side. scales: see
    group_norm.channel_scales. normed_scale: of the convolution that reads it."""
    batch, first_channels, height, width = first.shape
    second_channels = 0 if second is None else second.shape[1]
    channels, pixels, (rows, warps) = first_channels + second_channels, height * width, config
    output = torch.empty((batch, height, width, channels), device=first.device, dtype=FP8.dtype)
    output_scale = torch.empty((1, 1), device=first.device, dtype=torch.float32)
    scale_and_shift_rounded[(triton.cdiv(pixels, rows), triton.cdiv(channels, CHANNEL_BLOCK), batch)](
        first, first if second is None else second, scales, output, normed_scale, output_scale, pixels, first_channels,
        second_channels, int(silu), deviations(pixels * channels // groups), CHANNEL_BLOCK, rows, num_warps=warps,
    )
    return QuantizedImage(output, output_scale)


def convolution(
    image: QuantizedImage, weight: QuantizedWeight, result: torch.dtype,
    config: LaunchConfig = CONVOLUTION.candidates[0],
) -> Tensor:
    """3x3, padded with a pixel of zeros at each side: (batch, out channels, height, width) in the result's dtype, in
    channels-last memory, summed in float32. Channels are multiples of 16. Raises what Triton raises."""
    down, across, n, k, group, warps, stages = config
    batch, height, width, channels = image.values.shape
    out_channels = len(weight.values)
    output = torch.empty((batch, height, width, out_channels), device=image.values.device, dtype=result)
    tiles = batch * triton.cdiv(height, down) * triton.cdiv(width, across) * triton.cdiv(out_channels, n)
    convolution_tile[(tiles,)](
        TensorDescriptor.from_tensor(image.values, [1, down, across, k]), image.scale,
        TensorDescriptor.from_tensor(weight.values, [n, k]), weight.scales,
        TensorDescriptor.from_tensor(output, [1, down, across, n]), batch, height, width, channels, out_channels,
        int(weight.scales.numel() > 1), down, across, n, k, group, num_warps=warps, num_stages=stages,
    )
    return output.permute(0, 3, 1, 2)


def shape_class(image: QuantizedImage, out_channels: int) -> str:
    """The class of shapes of a convolution, for which its launch configuration is chosen."""
    return "x".join(map(str, (*image.values.shape, out_channels)))
