"""Compile the kernels that a network needs side by side, before its first call waits for one after the other."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ...core.affine import QuantizedWeight
from ...core.leaves import CrossAttention, GroupNorm, LayerNorm
from ...core.operators import QuantizedImage, QuantizedTokens, Stream
from ...core.tuning_cache import TuningCache
from ...weights.low_bit import FP8, INT8, Kind
from .kernels import attention as triton_attention
from .kernels import group_norm as triton_group_norm
from .kernels import images as triton_images
from .kernels import partial_statistics as triton_strips
from .kernels import tokens as triton_tokens
from .kernels.launch_config import (
    ADDITION,
    APPLICATION,
    CONVOLUTION,
    FEED_FORWARD,
    GATED_PRODUCT,
    GEGLU,
    LARGE,
    LAYER_NORM,
    LIBRARY,
    MEASURED_ADDITION,
    SMALL,
    STATISTICS,
    Kernel,
    Launches,
    attention_kernel,
    row_class,
)
from .low_bit import convolution, gated_product, int8_mm
from .low_bit import kernels as low_bit_kernels

MOST_THREADS = 8
SIDE = 4
# Of a multiple of 16, as every network's: Triton compiles another kernel for others.
FEWEST_CHANNELS = 16


def compile_kernels(
    users: Iterable[Any], dtype: torch.dtype, device: torch.device, configs: Launches | None = None,
    low_bit: Collection[Kind] = (),
) -> None:
    """Launch every kernel that a network with these layers (model.layout) needs once, on a few numbers.

    configs: how they are launched, None for each one's first candidate. low_bit: also those of ops.quantized, for these
    kinds. What was compiled before costs a millisecond. Raises what Triton raises.
    """
    network, chosen = list(users), configs or Launches(TuningCache())
    first, *others = launches(network, dtype, device, chosen)
    for kind in low_bit:
        others += low_bit_launches(network, dtype, device, chosen, kind)
    if INT8 in low_bit:
        others += int8_products(dtype, device)
    if FP8 in low_bit and int8_mm.copies_tiles(device):
        others += float8_products(dtype, device)
    # Triton sets itself up in the first launch of all, and not for several threads at once.
    launch(first, device)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "onediff-kernels") as pool:
        for done in [pool.submit(launch, other, device) for other in others]:
            done.result()


def launch(work: Callable[[], object], device: torch.device) -> None:
    with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
        work()
        torch.cuda.current_stream().synchronize()


def launches(
    users: list[Any], dtype: torch.dtype, device: torch.device, configs: Launches
) -> list[Callable[[], object]]:
    """One launch for each kernel as Triton specialises it: by block sizes, not by sizes of images or layers."""

    def image(channels: int) -> torch.Tensor:
        return torch.zeros((1, channels, SIDE, SIDE), dtype=dtype, device=device).to(memory_format=torch.channels_last)

    def of_channels(channels: int) -> torch.Tensor:
        return torch.zeros(channels, dtype=dtype, device=device)

    def large(norm: GroupNorm, shape_class: str) -> object:
        return triton_group_norm.large_group_norm(
            *of_norm(norm), statistics_cut=configs.of(STATISTICS, shape_class, dtype),
            application_cut=configs.of(APPLICATION, shape_class, dtype),
        )

    def of_norm(
        norm: GroupNorm
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, int, float, bool, None]:
        count = norm.channels
        return image(count), None, of_channels(count), of_channels(count), norm.groups, norm.eps, False, None

    def small(norm: GroupNorm) -> object:
        return triton_group_norm.small_image_group_norm(*of_norm(norm))

    def add(shape_class: str) -> object:
        of_sum = image(channels), image(channels), of_channels(channels), image(channels)
        triton_images.add(*of_sum, configs.of(ADDITION, shape_class, dtype))
        return triton_strips.add_and_measure(*of_sum, configs.of(MEASURED_ADDITION, shape_class, dtype))

    def layer_norm(width: int) -> object:
        tokens = torch.zeros((SIDE, width), dtype=dtype, device=device)
        config = configs.of(LAYER_NORM, row_class(width), dtype)
        stream, _ = triton_tokens.layer_norm(Stream(tokens), of_channels(width), of_channels(width), 1e-5, config)
        return triton_tokens.materialize(stream, config)

    def geglu(width: int) -> object:
        hidden = torch.zeros((SIDE, 2 * width), dtype=dtype, device=device)
        return triton_tokens.geglu(hidden, configs.of(GEGLU, row_class(width), dtype))

    def attend(head_width: int) -> object:
        config = configs.of(attention_kernel(head_width), str(head_width), dtype)
        tokens = tokens_of_heads(head_width, dtype, device)
        query, key, value = (tokens[:, :, part] for part in range(3))
        return None if config == LIBRARY else triton_attention.attention(query, key, value, config)

    norms = [leaf for leaf in users if isinstance(leaf, GroupNorm)]
    channels = norms[0].channels
    by_block = {triton_group_norm.join_block(found.channels // found.groups): found for found in norms}
    by_width = {
        found.channels // found.groups: found for found in norms
        if found.channels // found.groups >= triton_group_norm.SMALL_IMAGE_GROUP_WIDTH
    }
    widths = {row_class(leaf.width): leaf.width for leaf in users if isinstance(leaf, LayerNorm)}
    heads = {user.head_width for user in users if isinstance(user, CrossAttention)}
    any_norm = norms[0]
    return [
        lambda: add(SMALL),
        lambda: add(LARGE),
        lambda: triton_images.resize(image(channels), 2 * SIDE, 2 * SIDE),
        lambda: large(any_norm, LARGE),
        *(partial(large, norm, SMALL) for norm in by_block.values()),
        *(partial(small, norm) for norm in by_width.values()),
        *(partial(layer_norm, width) for width in widths.values()),
        *(partial(geglu, FEED_FORWARD * width) for width in widths.values()),
        *(partial(attend, width) for width in sorted(heads) if dtype in triton_attention.DTYPES),
    ]


def low_bit_launches(
    users: list[Any], dtype: torch.dtype, device: torch.device, configs: Launches, kind: Kind
) -> list[Callable[[], object]]:
    """As launches, for what makes tokens of a kind of eight bits."""

    def of_width(width: int) -> None:
        tokens, weight = (torch.zeros(shape, dtype=dtype, device=device) for shape in ((SIDE, width), (width,)))
        config = configs.of(LAYER_NORM, row_class(width), dtype)
        for update in (tokens.clone(), tokens.to(torch.bfloat16)):
            stream = Stream(tokens, None, weight, update)
            low_bit_kernels.layer_norm(stream, weight, weight, 1e-5, kind, config)
        hidden = torch.zeros((SIDE, 2 * FEED_FORWARD * width), dtype=dtype, device=device)
        low_bit_kernels.geglu(hidden, kind)
        low_bit_kernels.rounded(hidden[:, :FEED_FORWARD * width], kind)
        low_bit_kernels.rounded(hidden[:, :width], kind)
        if kind is FP8:
            for features in (FEED_FORWARD * width, width):
                rows = hidden[:, :features].contiguous()
                one_scale = torch.empty((1, 1), dtype=torch.float32, device=device)
                low_bit_kernels.rounded_rows(rows, torch.empty_like(rows, dtype=kind.dtype), one_scale)

    widths = {row_class(leaf.width): leaf.width for leaf in users if isinstance(leaf, LayerNorm)}
    return [partial(of_width, width) for width in widths.values()]


def int8_products(dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    """One launch for each way to cut a product in int8: which is the fastest is measured for each shape. A GPU need not
    have all but the first."""

    def work(config: tuple[int, ...]) -> None:
        tokens = low_bit_kernels.empty_rows(torch.zeros((SIDE, 1), device=device), int8_mm.ALIGNED, INT8)
        values = torch.zeros((int8_mm.ALIGNED, int8_mm.ALIGNED), dtype=INT8.dtype, device=device)
        weight = QuantizedWeight(values, torch.zeros((1, int8_mm.ALIGNED), device=device))
        int8_mm.product(tokens, weight, None, dtype, config)

    return launches_of(work, int8_mm.kernel_for(device))


def float8_products(dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    """As int8_products, for our own in float8: a feed-forward's first with its GEGLU, and convolutions."""
    size = FEWEST_CHANNELS

    def values(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(FP8.dtype)

    one = torch.ones((1, 1), device=device)

    def gate(config: tuple[int, ...]) -> None:
        if config == LIBRARY:
            return
        tokens, weight = QuantizedTokens(values(SIDE, size), one, (SIDE,)), QuantizedWeight(values(2 * size, size), one)
        gated_product.product(tokens, weight, torch.zeros(2 * size, dtype=dtype, device=device), one, config)

    def convolve(config: tuple[int, ...]) -> None:
        image, weight = QuantizedImage(values(1, SIDE, SIDE, size), one), QuantizedWeight(values(size, 9 * size), one)
        convolution.convolution(image, weight, dtype, config)

    def norm() -> None:
        image = torch.zeros((1, size, SIDE, SIDE), dtype=dtype, device=device).to(memory_format=torch.channels_last)
        convolution.normed(image, None, torch.zeros((1, 2, size), device=device), one, size, True)

    return [norm, *launches_of(gate, GATED_PRODUCT), *launches_of(convolve, CONVOLUTION)]


def tokens_of_heads(head_width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(batch, heads, 3 of query, key and value, tokens, width), with strides as they are in a network: Triton compiles
    another kernel for those that are no multiples of 16."""
    return torch.zeros((1, SIDE, 3, 16, head_width), dtype=dtype, device=device).transpose(1, 3)


def launches_of(work: Callable[[tuple[int, ...]], object], kernel: Kernel) -> list[Callable[[], object]]:
    """One launch for each of a kernel's candidates; all but the first may fail."""

    def attempt(config: tuple[int, ...]) -> None:
        with contextlib.suppress(Exception):
            work(config)

    first, *others = kernel.candidates
    return [partial(work, first), *(partial(attempt, config) for config in others)]
