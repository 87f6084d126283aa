"""Measure how the kernels are best configured on this GPU, at the shapes that a network has."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ....core.leaves import CrossAttention, GroupNorm, LayerNorm
from ....core.operators import Stream
from . import attention as triton_attention
from . import group_norm as triton_group_norm
from . import images as triton_images
from . import partial_statistics as triton_strips
from . import tokens as triton_tokens
from .launch_config import (
    ADDITION,
    APPLICATION,
    FEED_FORWARD,
    GEGLU,
    LARGE,
    LAYER_NORM,
    LIBRARY,
    MEASURED_ADDITION,
    SMALL,
    STATISTICS,
    Kernel,
    LaunchConfig,
    Launches,
    attention_kernel,
    row_class,
)

# Two measurements of one thing differ by less.
WORTH_CHANGING = 0.97
BATCH = 2
# Sides of an image, and rows of tokens, of the kind that takes the most time in its class.
SIDES = {SMALL: 32, LARGE: 64}
ROWS = 4096
QUERIES, KEYS = 1024, 77
GROUPS = 32
log = logging.getLogger("onediff")
TimeMs = Callable[[Callable[[], object]], float]


class Trial(NamedTuple):
    """One kernel at one class of shapes; run(config) launches it."""

    kernel: Kernel
    shape_class: str
    run: Callable[[LaunchConfig], object]


def tune_kernels(
    launches: Launches, users: Iterable[Any], dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> int:
    """Measure every kernel and class of a network with these layers (unet.layout) that was not measured on this GPU.

    Returns how many there were. Each compiles a few variants: seconds, once on a machine. Raises what Triton raises.
    """
    measured = 0
    for trial in trials(list(users), dtype, device):
        if launches.chosen(trial.kernel, trial.shape_class, dtype) is None:
            launches.choose(trial.kernel, trial.shape_class, dtype, best_cut(trial, time_ms))
            measured += 1
    return measured


def best_cut(trial: Trial, time_ms: TimeMs) -> LaunchConfig:
    """The fastest of the kernel's configurations that this GPU can run; the first, unless another is clearly faster."""
    first, *others = trial.kernel.candidates
    best, best_ms = first, time_ms(partial(trial.run, first)) * WORTH_CHANGING
    for config in others:
        try:
            ms = time_ms(partial(trial.run, config))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("%s cannot be launched as %s: %s", trial.kernel.name, config, error, exc_info=True)
            continue
        if ms < best_ms:
            best, best_ms = config, ms
    return best


def cross_attention(width: int, heads: int, random: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as a network hands them over."""
    query = random(BATCH, QUERIES, heads, width).transpose(1, 2)
    key, value = random(BATCH, KEYS, 2 * heads, width).transpose(1, 2).chunk(2, dim=1)
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig) -> Tensor:
    """By our kernel, or by torch's, as the configuration says."""
    if config == LIBRARY:
        return functional.scaled_dot_product_attention(query, key, value)
    return triton_attention.attention(query, key, value, config)


def by_keyword(work: Callable[..., object], name: str, config: LaunchConfig) -> object:
    return work(**{name: config})


def trials(users: list[Any], dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """What is to be measured for a network."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    widest = max(leaf.channels for leaf in users if isinstance(leaf, GroupNorm))
    for shape_class, side in SIDES.items():
        image = random(BATCH, widest, side, side).to(memory_format=torch.channels_last)
        norm = partial(
            triton_group_norm.large_group_norm, image, None, random(widest), random(widest), GROUPS, 1e-5, True, None
        )
        yield Trial(STATISTICS, shape_class, partial(by_keyword, norm, "statistics_cut"))
        yield Trial(APPLICATION, shape_class, partial(by_keyword, norm, "application_cut"))
        bias = random(widest)
        added = partial(triton_images.add, image, image, bias, torch.empty_like(image))
        yield Trial(ADDITION, shape_class, added)
        measured = partial(triton_strips.add_and_measure, image, image, bias, torch.empty_like(image))
        yield Trial(MEASURED_ADDITION, shape_class, measured)
    for width in {row_class(leaf.width): leaf.width for leaf in users if isinstance(leaf, LayerNorm)}.values():
        tokens, hidden, weight = random(ROWS, width), random(ROWS, 2 * FEED_FORWARD * width), random(width)
        normed = partial(triton_tokens.layer_norm, Stream(tokens, None, weight), weight, weight, 1e-5)
        yield Trial(LAYER_NORM, row_class(width), normed)
        yield Trial(GEGLU, row_class(FEED_FORWARD * width), partial(triton_tokens.geglu, hidden))
    if dtype in triton_attention.DTYPES:
        heads = {user.head_width: user.heads for user in users if isinstance(user, CrossAttention)}
        for width, count in heads.items():
            yield Trial(attention_kernel(width), str(width), partial(attend, *cross_attention(width, count, random)))
