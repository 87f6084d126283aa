"""The launch configs of kernels: the candidates of each, and which one was measured to be the fastest on this GPU.

A launch config says how a kernel divides its work into programs, or names an implementation of a library. It is chosen
for each class of shapes and dtype. The choices are kept in the store, by the kernel's name. This module does not need
Triton.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.card import TuningCache, current_card, name_on_this_card
from ....core.device import TimeMs
from ....weights.low_bit import FP8, INT8

log = logging.getLogger("onediff")
# The numbers that a kernel is launched with, in an order that each Kernel below has in a comment; or (name,) of an
# implementation of attention. (0,): see LIBRARY.
LaunchConfig = tuple[Any, ...]
# A candidate replaces the first one if it takes less than this part of its time: two measurements of the same kernel
# differ by less.
WORTH_CHANGING = 0.97
# The classes of shapes of images (see image_class), and the smallest large image, in pixels.
SMALL = "small"
LARGE = "large"
LARGE_IMAGE_PIXELS = 48 * 48
# The width of a feed-forward's hidden tokens, as a multiple of the width of its tokens.
FEED_FORWARD = 4
# The widest heads of ATTENTION; wider ones use WIDE_ATTENTION.
WIDEST_SMALL_HEAD = 64


@dataclass(frozen=True)
class Kernel:
    """A kernel, or an operator that several implementations compute.

    name: the kernel's name in the tuning cache. candidates: its launch configs; the first was the fastest at most
    shapes on an H200.
    """

    name: str
    candidates: tuple[LaunchConfig, ...]


# (rows of pixels, warps)
STATISTICS = Kernel("group norm statistics", ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4)))
APPLICATION = Kernel("group norm application", ((32, 4), (16, 1), (32, 2), (64, 4), (64, 8)))
ADDITION = Kernel("addition", ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4)))
# (tokens, warps)
LAYER_NORM = Kernel("layer norm", ((2, 2), (1, 1), (1, 4), (4, 4)))
# An implementation of a library, in place of our kernel.
LIBRARY: LaunchConfig = (0,)
# (queries, keys, warps, stages); or LIBRARY, for the implementation that devices/torch/attention.py chooses. Blocks of
# wide heads may not fit into the shared memory of a GPU.
ATTENTION = Kernel("attention over few keys", ((64, 64, 4, 2), (64, 128, 4, 1), (128, 128, 8, 1), LIBRARY))
WIDE_ATTENTION = Kernel("attention over few keys", (LIBRARY, (64, 64, 4, 2), (64, 64, 4, 1), (64, 128, 8, 1)))
# (columns, warps)
GEGLU = Kernel("geglu", ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 8)))
# (rows, columns, depth of a tile, tiles of a group, warps, stages): see kernels.products. The first fits into the
# shared memory of every GPU that multiplies int8.
INT8_PRODUCT = Kernel("int8 product", (
    (128, 128, 64, 8, 8, 3), (64, 128, 64, 8, 4, 4), (128, 64, 64, 8, 4, 4), (128, 128, 128, 8, 8, 3),
    (64, 256, 64, 8, 8, 3), (64, 64, 128, 8, 4, 3), (128, 256, 64, 8, 8, 3), (128, 128, 128, 8, 4, 3),
    (64, 128, 128, 8, 4, 3),
))
# The product with the down matrices of LoRAs: (rows of a tile, ranks of a tile, depth, warps, stages); or LIBRARY, for
# torch's product.
DOWN_PRODUCT = Kernel("LoRA product", (
    LIBRARY, (64, 32, 128, 4, 4), (64, 64, 128, 4, 4), (32, 32, 256, 4, 3), (64, 128, 64, 4, 4), (64, 16, 128, 4, 4),
))
# (1 if the GPU copies tiles by itself, which needs compute capability 9.0, else 0; rows, columns of the output, depth
# of a tile, tiles of a group, warps, stages); or LIBRARY, for the library's product and a GEGLU of ours. Candidates
# that begin with 0 fit into 99 KB of shared memory.
GATED_PRODUCT = Kernel("gated fp8 product", (
    LIBRARY, (1, 128, 128, 128, 8, 8, 3), (1, 128, 64, 128, 8, 4, 3), (1, 128, 64, 128, 16, 4, 3),
    (1, 128, 128, 64, 8, 8, 5), (1, 64, 64, 128, 8, 4, 4),
    (0, 128, 64, 128, 8, 4, 3), (0, 128, 128, 64, 8, 8, 4), (0, 64, 64, 128, 8, 4, 4),
))
# As GATED_PRODUCT, in half precision.
EXACT_GATED_PRODUCT = Kernel("gated product", (
    LIBRARY, (1, 128, 128, 64, 8, 8, 3), (1, 128, 128, 64, 16, 8, 4), (0, 128, 64, 64, 8, 4, 3),
    (0, 128, 128, 32, 8, 8, 4), (0, 64, 64, 64, 8, 4, 3),
))
# Of convolutions, by the dtype of image and weight: (1 or 0 as for GATED_PRODUCT; rows and columns of pixels, channels
# of the output, depth of a tile, tiles of a group, warps, stages); see kernels.products. In float16, as many products
# as the tile is deep are summed in float16; that took 1.3 to 2 times as long as cuDNN (LIBRARY) on an H200.
# COPIED_CONVOLUTIONS: the candidates in float8 and int8 that begin with 1.
COPIED_CONVOLUTIONS = (
    (1, 8, 8, 128, 128, 8, 4, 3), (1, 8, 16, 128, 128, 8, 4, 3), (1, 16, 16, 128, 128, 8, 8, 3),
    (1, 16, 16, 64, 128, 8, 8, 3), (1, 8, 16, 128, 64, 8, 4, 4),
)
CONVOLUTIONS = {
    FP8.dtype: Kernel("fp8 convolution", (
        (0, 8, 16, 128, 128, 8, 4, 3), *COPIED_CONVOLUTIONS, (0, 8, 16, 128, 128, 8, 8, 3),
        (0, 8, 16, 64, 128, 8, 4, 3), (0, 8, 16, 128, 64, 8, 8, 4),
    )),
    INT8.dtype: Kernel("int8 convolution", (
        (0, 8, 16, 128, 64, 8, 8, 3), *COPIED_CONVOLUTIONS, (0, 8, 16, 128, 128, 8, 8, 3),
        (0, 8, 16, 64, 128, 8, 4, 3), (0, 8, 16, 128, 64, 8, 4, 4), (0, 16, 16, 128, 64, 8, 8, 4),
        (0, 16, 16, 128, 128, 8, 8, 3),
    )),
    torch.float16: Kernel("convolution with float16 sums", (
        LIBRARY, (0, 8, 16, 128, 64, 8, 8, 3), (0, 8, 16, 64, 64, 8, 4, 3), (0, 8, 16, 128, 32, 8, 8, 4),
        (0, 16, 16, 64, 64, 8, 8, 3),
    )),
}


class Launches:
    """The chosen launch config of every kernel on the current card, by class of shapes and dtype.

    It also collects the sizes that calls have used, so that Native.tune can measure them later. The operators add to
    these sets:

    convolutions: (batch, height, width, input channels, output channels) of float16 convolutions that were computed
        while float16 sums were allowed.
    stored_products: (rows, out, width, dtype) of products with weights that the host stores in INT8.
    down_products: (rows, ranks, width, dtype) of products with the down matrices of LoRAs of such layers.

    tuning_cache: keeps the choices, between processes too.
    """

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache
        self.convolutions: set[tuple[int, ...]] = set()
        self.stored_products: set[tuple[int, int, int, torch.dtype]] = set()
        self.down_products: set[tuple[int, int, int, torch.dtype]] = set()
        self._known: dict[tuple[str, str, torch.dtype, int], LaunchConfig] = {}

    def of(self, kernel: Kernel, shape_class: str, dtype: torch.dtype) -> LaunchConfig:
        """The launch config to use on the current GPU: the one that was chosen, or the kernel's first candidate if none
        was. shape_class: a name, such as those of image_class and row_class. Called at every launch."""
        known = self._known.get((kernel.name, shape_class, dtype, current_card()))
        return known or self.chosen(kernel, shape_class, dtype) or kernel.candidates[0]

    def chosen(self, kernel: Kernel, shape_class: str, dtype: torch.dtype) -> LaunchConfig | None:
        """The launch config that was chosen for the current GPU; None if none was, or if the stored one is no longer a
        candidate. Always reads the tuning cache; of() reads it only until a choice was found."""
        value = self._tuning_cache.get(choice_name(kernel, shape_class, dtype))
        config = tuple(value) if isinstance(value, list) else None
        if config not in kernel.candidates:
            return None
        self._known[kernel.name, shape_class, dtype, current_card()] = config
        return config

    def forget(self) -> None:
        """Forget the choices in this process: each is read from the tuning cache again when it is used next."""
        self._known = {}

    def choose(self, kernel: Kernel, shape_class: str, dtype: torch.dtype, config: LaunchConfig) -> None:
        """Store a choice for the current GPU in the tuning cache. Graphs that were captured before keep the config that
        they were captured with."""
        self._known.pop((kernel.name, shape_class, dtype, current_card()), None)
        self._tuning_cache.set(choice_name(kernel, shape_class, dtype), list(config))


def image_class(pixels: int) -> str:
    """The class of shapes of images with this many pixels (height * width): LARGE from LARGE_IMAGE_PIXELS on, otherwise
    SMALL."""
    return LARGE if pixels >= LARGE_IMAGE_PIXELS else SMALL


def attention_kernel(head_width: int) -> Kernel:
    """ATTENTION or WIDE_ATTENTION: the kernel for attention over few keys with heads of this width."""
    return ATTENTION if head_width <= WIDEST_SMALL_HEAD else WIDE_ATTENTION


def row_class(width: int) -> str:
    """The class of shapes of rows of this width: the width rounded up to a power of two. The same kernel computes all
    rows of a class."""
    return str(1 << (width - 1).bit_length())


def choice_name(kernel: Kernel, shape_class: str, dtype: torch.dtype) -> str:
    """The name of a choice in the tuning cache. It includes the current GPU's model."""
    return name_on_this_card(f"kernel {kernel.name}, {shape_class}, {str(dtype).removeprefix('torch.')}")


class Trial(NamedTuple):
    """The measurement of a kernel for one class of shapes.

    run: run(config) launches the kernel with a launch config, and returns its output.
    shape_class: see Launches.of.
    agrees: agrees(output) returns whether a candidate's output is correct. It is called for every candidate but the
        first. None: all candidates compute the same.
    """

    kernel: Kernel
    shape_class: str
    run: Callable[[LaunchConfig], Any]
    agrees: Callable[[Any], bool] | None = None


def tuned(launches: Launches, trial: Trial, dtype: torch.dtype, time_ms: TimeMs) -> bool:
    """Measure a kernel's candidates and store the fastest as its choice for this GPU; return True. If there is a
    choice, do nothing and return False. dtype: the one by which the choice is looked up. Raises what the first
    candidate raises, and torch.cuda.OutOfMemoryError; other candidates that fail are left out."""
    if launches.chosen(trial.kernel, trial.shape_class, dtype) is not None:
        return False
    launches.choose(trial.kernel, trial.shape_class, dtype, best_config(trial, time_ms))
    return True


def best_config(trial: Trial, time_ms: TimeMs) -> LaunchConfig:
    """The fastest candidate of the kernel that this GPU can run and whose output is correct; the first one, unless
    another takes less than WORTH_CHANGING of its time. Raises what the first candidate raises, and
    torch.cuda.OutOfMemoryError."""
    first, *others = trial.kernel.candidates
    best = first
    best_ms = time_ms(partial(trial.run, first)) * WORTH_CHANGING
    for config in others:
        work = partial(trial.run, config)
        try:
            if trial.agrees is not None and not trial.agrees(work()):
                continue
            ms = time_ms(work)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("%s cannot be launched as %s: %s", trial.kernel.name, config, error, exc_info=True)
            continue
        if ms < best_ms:
            best = config
            best_ms = ms
    return best


def random_on(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function, make(*shape), whose calls return new tensors of normally distributed random numbers. It has its own
    generator, with a fixed seed: measurements are repeatable, and torch's generators, which a user's image depends on,
    do not change."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=dtype)
