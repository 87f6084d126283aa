"""How each kernel cuts its work into programs: a choice for each class of shapes, measured once on a GPU.

This knows no Triton: what was measured lies in the store, by names.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ....core.card import current_card, named
from ....core.tuning_cache import TuningCache

LaunchConfig = tuple[int, ...]
SMALL, LARGE = "small", "large"
LARGE_IMAGE_PIXELS = 48 * 48
# How many times wider than its tokens a feed-forward is.
FEED_FORWARD = 4
WIDEST_SMALL_HEAD = 64


@dataclass(frozen=True)
class Kernel:
    """candidates: what can be chosen; the first was the best on most shapes of an H200."""

    name: str
    candidates: tuple[LaunchConfig, ...]


# (rows of pixels, warps)
STATISTICS = Kernel("group norm statistics", ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4)))
APPLICATION = Kernel("group norm application", ((32, 4), (16, 1), (32, 2), (64, 4), (64, 8)))
MEASURED_ADDITION = Kernel("measured addition", ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4)))
ADDITION = Kernel("addition", ((64, 4), (32, 4), (32, 2), (128, 8)))
# (tokens, warps)
LAYER_NORM = Kernel("layer norm", ((2, 2), (1, 1), (1, 4), (4, 4)))
# (queries, keys, warps, stages), or what ops.attention has chosen. Wide heads may not fit into a processor's memory.
LIBRARY: LaunchConfig = (0,)
ATTENTION = Kernel("attention over few keys", ((64, 64, 4, 2), (64, 128, 4, 1), (128, 128, 8, 1), LIBRARY))
WIDE_ATTENTION = Kernel("attention over few keys", (LIBRARY, (64, 64, 4, 2), (64, 64, 4, 1), (64, 128, 8, 1)))
# (columns, warps)
GEGLU = Kernel("geglu", ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 8)))
# (way, rows, columns, depth of a tile, tiles of a group, warps, stages, programs a processor or 0 for one a tile): see
# quantized/int8_mm. The first fits into the memory of any processor that multiplies int8.
INT8_PRODUCT = Kernel("int8 product", (
    (0, 128, 128, 64, 8, 8, 3, 0), (0, 64, 128, 64, 8, 4, 4, 0), (0, 128, 64, 64, 8, 4, 4, 0),
    (0, 128, 128, 128, 8, 8, 3, 0), (0, 64, 256, 64, 8, 8, 3, 0), (0, 64, 64, 128, 8, 4, 3, 0),
    (0, 128, 256, 64, 8, 8, 3, 0), (0, 128, 128, 128, 8, 4, 3, 0), (0, 64, 128, 128, 8, 4, 3, 0),
))
INT8_PRODUCT_HOPPER = Kernel("int8 product", (
    (0, 128, 128, 128, 8, 4, 3, 0), (0, 64, 128, 128, 8, 4, 3, 0), (1, 128, 128, 64, 8, 4, 4, 2),
    (1, 128, 128, 64, 8, 4, 6, 2), (1, 128, 128, 128, 8, 4, 3, 0), (1, 128, 128, 64, 8, 4, 4, 0),
    (1, 64, 128, 128, 8, 4, 3, 0), (1, 64, 128, 64, 8, 4, 3, 4), (1, 128, 256, 128, 8, 8, 4, 1),
    (1, 256, 128, 128, 8, 8, 3, 1), (0, 64, 64, 128, 8, 4, 3, 0),
))
# (rows, columns of the output, depth of a tile, tiles of a group, warps, stages), or the library's product and a GEGLU.
GATED_PRODUCT = Kernel("gated fp8 product", (
    LIBRARY, (128, 128, 128, 8, 8, 3), (128, 64, 128, 8, 4, 3), (128, 64, 128, 16, 4, 3), (128, 128, 64, 8, 8, 5),
    (64, 64, 128, 8, 4, 4),
))
# (pixels down and across, channels of the output, depth of a tile, tiles of a group, warps, stages): see
# quantized/convolution.
CONVOLUTION = Kernel("fp8 convolution", (
    (8, 16, 128, 128, 8, 4, 3), (16, 16, 128, 128, 8, 8, 3), (16, 16, 64, 128, 8, 8, 3), (8, 16, 64, 128, 8, 4, 4),
    (8, 16, 128, 64, 8, 4, 4), (8, 8, 128, 128, 8, 4, 3),
))


class Launches:
    """The launch configuration of every kernel on the card that computes, by its class of shapes: an image's size, or a
    token's width."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache
        self._known: dict[tuple[str, str, torch.dtype, int], LaunchConfig] = {}

    def of(self, kernel: Kernel, shape_class: str, dtype: torch.dtype) -> LaunchConfig:
        """The configuration that was chosen, or the kernel's first."""
        known = self._known.get((kernel.name, shape_class, dtype, current_card()))
        return known or self.chosen(kernel, shape_class, dtype) or kernel.candidates[0]

    def chosen(self, kernel: Kernel, shape_class: str, dtype: torch.dtype) -> LaunchConfig | None:
        """The configuration that was chosen; None where nothing was measured."""
        value = self._tuning_cache.get(choice_name(kernel, shape_class, dtype))
        config = tuple(value) if isinstance(value, list) else None
        if config not in kernel.candidates:
            return None
        self._known[kernel.name, shape_class, dtype, current_card()] = config
        return config

    def forget(self) -> None:
        """Ask for every choice again."""
        self._known = {}

    def choose(self, kernel: Kernel, shape_class: str, dtype: torch.dtype, config: LaunchConfig) -> None:
        """Cut it so from now on; graphs that were captured before stay as they are."""
        self._known.pop((kernel.name, shape_class, dtype, current_card()), None)
        self._tuning_cache.set(choice_name(kernel, shape_class, dtype), list(config))


def image_class(pixels: int) -> str:
    return LARGE if pixels >= LARGE_IMAGE_PIXELS else SMALL


def attention_kernel(head_width: int) -> Kernel:
    """The kernel by which heads of this width attend to few keys."""
    return ATTENTION if head_width <= WIDEST_SMALL_HEAD else WIDE_ATTENTION


def row_class(width: int) -> str:
    """The next power of two: rows of one class are done by the same kernel."""
    return str(1 << (width - 1).bit_length())


def choice_name(kernel: Kernel, shape_class: str, dtype: torch.dtype) -> str:
    return named(f"kernel {kernel.name}, {shape_class}, {str(dtype).removeprefix('torch.')}")
