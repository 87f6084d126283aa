"""Matrix products and convolutions by our own kernels.

- int8 products, with a scale for every row of the input, and one for every row of the weight or for all. Sums are exact
  in int32. From compute capability 7.5 on, tensor cores multiply int8 at two to four times the rate of float16.
  PyTorch's own product (torch._int_mm) applies no scales, and was slower than float16 on an H200.
- A feed-forward's first product together with its GEGLU, in half precision and in float8. In float8, the scale of the
  GEGLU's output is known beforehand (weights.low_bit.gated_scale). One scale for every row could only be computed when
  the whole row is known.
- 3x3 convolutions in int8, in float8, and in float16 with float16 sums. On GeForce cards, tensor cores multiply float16
  at twice the rate if they also sum in float16. A few dozen products at a time are summed in float16, and these sums in
  float32: the error is not larger than that of rounding the output.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ....core.layer_weights import RANKS, LowRank, QuantizedWeight
from ....core.operators import QuantizedImage, QuantizedTokens
from ....weights.joining import joined
from . import launch_config as configs
from .archive import Tiles
from .launch_config import Kernel, LaunchConfig
from .launching import ceil_div, launch

# The compute capability of the GPUs that copy tiles by themselves.
HOPPER = (9, 0)


def int8_product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype,
    config: LaunchConfig = configs.INT8_PRODUCT.candidates[0], added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """tokens (rows, in) times weight (out, in), plus bias (out,): (rows, out) in the dtype `result`. bias may be None.

    in and out are multiples of 16. config: see configs.INT8_PRODUCT. Raises what a launch raises.

    added: (hidden, up) of LoRAs, whose product is added before the output is rounded: hidden (rows, ranks), and up
    (out, ranks). For a layer of n fused ones, up is (out, ranks / n): each nth of its rows reads the corresponding nth
    of the ranks. hidden and up are contiguous and in the dtype `result`, and ranks / n is a multiple of RANKS. None: no
    LoRAs.
    """
    m, n, k, group, warps, stages = config
    rows, width = tokens.values.shape
    out = len(weight.values)
    output = torch.empty((rows, out), device=tokens.values.device, dtype=result)
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype replaces a missing bias.
    offset, has_bias = (output, 0) if bias is None else (bias.to(result), 1)
    hidden, up = added or (output, output)
    ranks = hidden.shape[1]
    own_ranks = up.shape[1]
    own_rows = out * own_ranks // ranks
    launch(
        "products.tile_by_tile", (ceil_div(rows, m) * ceil_div(out, n),), tokens.values, tokens.scales, weight.values,
        weight.scales, offset, output, hidden, up, rows, width, out, ranks, own_rows, own_ranks,
        has_bias, int(weight.scales.numel() > 1), warps=warps, stages=stages, M=m, N=n, K=k, GROUP=group,
        RANKED=added is not None,
    )
    return output


def joint_loras(low_rank: LowRank, out: int) -> tuple[Tensor, Tensor]:
    """The LoRAs of a layer as (down, up) for int8_product: down (ranks, in) is for down_product, whose result is
    `hidden` there; up is `up` there.

    up is (out, ranks / n) if the layer is n fused ones of equal sizes and ranks, and both are multiples of RANKS;
    otherwise (out, ranks), with ranks rounded up to a multiple of RANKS by zeros. out: the layer's number of outputs.
    down and up are contiguous. up is a view if the ups are adjacent in memory.
    """
    down = low_rank.down.flatten(1)
    ups = [up for _, up in low_rank.ups]
    own_rows, own_ranks = ups[0].shape
    are_equal = len({up.shape for up in ups}) == 1 and own_rows * len(ups) == out
    up = joined(ups) if are_equal and own_rows % RANKS == own_ranks % RANKS == 0 else None
    if up is not None:
        return down, up
    ranks = RANKS * ceil_div(len(down), RANKS)
    together = ups[0].new_zeros((out, ranks))
    rank = 0
    for row, up in low_rank.ups:
        together[row:row + len(up), rank:rank + up.shape[1]] = up
        rank += up.shape[1]
    return functional.pad(down, (0, 0, 0, ranks - len(down))), together


def down_product(tokens: Tensor, down: Tensor, config: LaunchConfig) -> Tensor:
    """tokens (rows, in) times the down matrices of LoRAs (ranks, in): (rows, ranks).

    tokens and down are contiguous and in half precision. config: see configs.DOWN_PRODUCT. With LIBRARY, torch computes
    the product; with any other config, in and ranks must be multiples of 16. Raises what a launch raises.
    """
    if config == configs.LIBRARY:
        return functional.linear(tokens, down)
    m, n, k, warps, stages = config
    rows, width = tokens.shape
    output = tokens.new_empty((rows, len(down)))
    programs = ceil_div(rows, m) * ceil_div(len(down), n)
    launch(
        "products.narrow_tile", (programs,), tokens, down, output, rows, width, len(down), warps=warps, stages=stages,
        M=m, N=n, K=k,
    )
    return output


def gated_product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor, output_scale: Tensor,
    config: LaunchConfig = configs.GATED_PRODUCT.candidates[1],
) -> QuantizedTokens:
    """The GEGLU (erf form) of tokens (rows, in) times a weight (2 n, in) plus bias (2 n,): (rows, n) in float8.

    output_scale: float32 (1, 1), known beforehand, by which the output is divided before it is rounded; it becomes the
    output's scale. The tokens have one scale for all rows. Raises what a launch raises.
    """
    half = len(weight.values) // 2
    output = torch.empty((len(tokens.values), half), device=tokens.values.device, dtype=tokens.values.dtype)
    launch_gated(tokens.values, weight.values, output, bias, (tokens.scales, weight.scales, output_scale), config)
    return QuantizedTokens(output, output_scale, tokens.shape)


def exact_gated_product(tokens: Tensor, weight: Tensor, bias: Tensor, config: LaunchConfig) -> Tensor:
    """The GEGLU (erf form) of tokens (rows, in) times a weight (2 n, in) plus bias (2 n,): (rows, n).

    All tensors are in half precision and contiguous. Only the output is rounded, not the product before the GEGLU.
    config: see configs.EXACT_GATED_PRODUCT, but not LIBRARY. Raises what a launch raises.
    """
    output = tokens.new_empty((len(tokens), len(weight) // 2))
    launch_gated(tokens, weight, output, bias, (), config)
    return output


def launch_gated(
    tokens: Tensor, weight: Tensor, output: Tensor, bias: Tensor, scales: tuple[Tensor, ...], config: LaunchConfig
) -> None:
    """Launch the kernel of gated_product and exact_gated_product, which writes to output (rows, n).

    scales: (scale of the tokens, scales of the weight, scale of the output); () in half precision. config: see
    configs.GATED_PRODUCT, but not LIBRARY.
    """
    copied, m, n, k, group, warps, stages = config
    rows, width = tokens.shape
    half = output.shape[1]
    matrices: Any = tokens, weight, output
    if copied:
        matrices = map(Tiles, matrices, ((m, k), (n, k), (m, n)))
    launch(
        "products.gated_tile", (ceil_div(rows, m) * ceil_div(half, n),), *matrices, bias, *(scales or (output,) * 3),
        rows, width, half, int(bool(scales) and scales[1].numel() > 1), warps=warps, stages=stages, M=m, N=n, K=k,
        GROUP=group, SCALED=bool(scales), COPIED=copied,
    )


def convolution(
    image: QuantizedImage, weight: QuantizedWeight, result: torch.dtype, config: LaunchConfig
) -> Tensor:
    """The 3x3 convolution of an 8-bit image, padded with one pixel of zeros at each side: (batch, out channels, height,
    width) in the dtype `result` and in channels-last memory.

    Adds no bias. Sums are in float32, or for int8 in int32. Numbers of channels are multiples of 16. config: see
    configs.CONVOLUTIONS. Raises what a launch raises.
    """
    return launch_convolution(image.values, weight.values, (image.scales, weight.scales), result, config)


def half_sums_convolution(image: Tensor, weight: Tensor, config: LaunchConfig) -> Tensor:
    """The 3x3 convolution of an image (batch, channels, height, width) and a weight (out channels, channels, 3, 3) in
    float16 and channels-last memory, padded with one pixel of zeros at each side: (batch, out channels, height, width)
    in float16 and channels-last memory. Adds no bias.

    As many products as the tile of `config` is deep are summed in float16, and these sums in float32. Numbers of
    channels are multiples of 16. config: see configs.CONVOLUTIONS, but not LIBRARY. Raises what a launch raises.
    """
    taps = weight.permute(0, 2, 3, 1).flatten(1)
    return launch_convolution(image.permute(0, 2, 3, 1), taps, (), image.dtype, config)


def launch_convolution(
    image: Tensor, weight: Tensor, scales: tuple[Tensor, ...], result: torch.dtype, config: LaunchConfig
) -> Tensor:
    """Launch the kernel of convolution and half_sums_convolution, and return its output (batch, out channels, height,
    width), in channels-last memory.

    image: (batch, height, width, channels). weight: (out channels, 9 * channels). scales: (scales of the images, scales
    of the weight); () in float16. result: the output's dtype.
    """
    copied, down, across, n, k, group, warps, stages = config
    batch, height, width, channels = image.shape
    output = torch.empty((batch, height, width, len(weight)), device=image.device, dtype=result)
    tiles = batch * ceil_div(height, down) * ceil_div(width, across) * ceil_div(len(weight), n)
    given: Any = image, weight, output
    if copied:
        given = map(Tiles, given, ((1, down, across, k), (n, k), (1, down, across, n)))
    pixels, taps, target = given
    of_image, of_weight = scales or (output, output)
    launch(
        "products.convolution_tile", (tiles,), pixels, of_image, taps, of_weight, target, batch, height, width,
        channels, len(weight), int(of_weight.numel() > 1), warps=warps, stages=stages, DOWN=down, ACROSS=across,
        N=n, K=k, GROUP=group, COPIED=copied,
    )
    return output.permute(0, 3, 1, 2)


def of_card(kernel: Kernel, device: torch.device) -> Kernel:
    """The same Kernel with only those candidates that can be fast on a device: on GPUs of compute capability 9.0, which
    copy tiles by themselves, the candidates that use that (they begin with 1); on other GPUs, the candidates that do
    not (they begin with 0). LIBRARY stays on all GPUs. A device that is no GPU keeps all candidates."""
    if device.type != "cuda":
        return kernel
    copies = torch.cuda.get_device_capability(device) == HOPPER
    mine = (config for config in kernel.candidates if config == configs.LIBRARY or bool(config[0]) == copies)
    return replace(kernel, candidates=tuple(mine))


def product_class(rows: int, out: int, width: int) -> str:
    """The class of shapes (Launches.of) of a product of tokens (rows, width) and a weight (out, width): each size is a
    class of its own."""
    return f"{rows}x{width}x{out}"


def convolution_class(image: Tensor, out_channels: int) -> str:
    """The class of shapes (Launches.of) of a convolution: each size is a class of its own. image: (batch, height,
    width, channels)."""
    return "x".join(map(str, (*image.shape, out_channels)))
