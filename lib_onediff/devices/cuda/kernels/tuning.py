"""The kernels that a network launches: measured at its shapes, for how they are best configured on this GPU, and
compiled by a launch on a few numbers."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ....core.device import TimeMs
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
GROUPS = 32
log = logging.getLogger("onediff")


class Sizes(NamedTuple):
    """On how much kernels are launched. sides: of an image, by its class. rows: of tokens. queries, keys: of a cross
    attention."""

    batch: int
    sides: Mapping[str, int]
    rows: int
    queries: int
    keys: int


# What takes the most time in its class, and what takes none.
MEASURED, COMPILED = Sizes(2, {SMALL: 32, LARGE: 64}, 4096, 1024, 77), Sizes(1, {SMALL: 4, LARGE: 4}, 4, 16, 16)


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
    return sum(
        tuned(launches, trial, dtype, time_ms) for trial in trials(list(users), random_on(device, dtype), MEASURED)
    )


def random_on(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Makes tensors of random numbers, and takes none of the user's generators."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=dtype)


def tuned(launches: Launches, trial: Trial, dtype: torch.dtype, time_ms: TimeMs) -> bool:
    """Measure and choose, where that was not done on this GPU; whether it was done now. Raises what Triton raises."""
    if launches.chosen(trial.kernel, trial.shape_class, dtype) is not None:
        return False
    launches.choose(trial.kernel, trial.shape_class, dtype, best_cut(trial, time_ms))
    return True


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


def trials(users: list[Any], make: Callable[..., Tensor], sizes: Sizes) -> Iterator[Trial]:
    """What can be measured for a network with these layers. make: a tensor of a shape, in the network's type."""
    widest = max(leaf.channels for leaf in users if isinstance(leaf, GroupNorm))
    vector = make(widest)
    for shape_class, side in sizes.sides.items():
        image = make(sizes.batch, widest, side, side).to(memory_format=torch.channels_last)
        norm = partial(triton_group_norm.large_group_norm, image, None, vector, vector, GROUPS, 1e-5, True, None)
        yield Trial(STATISTICS, shape_class, partial(by_keyword, norm, "statistics_cut"))
        yield Trial(APPLICATION, shape_class, partial(by_keyword, norm, "application_cut"))
        added = image, image, vector, torch.empty_like(image)
        yield Trial(ADDITION, shape_class, partial(triton_images.add, *added))
        yield Trial(MEASURED_ADDITION, shape_class, partial(triton_strips.add_and_measure, *added))
    for width in widths(users):
        tokens, hidden, vector = make(sizes.rows, width), make(sizes.rows, 2 * FEED_FORWARD * width), make(width)
        normed = partial(triton_tokens.layer_norm, Stream(tokens, None, vector), vector, vector, 1e-5)
        yield Trial(LAYER_NORM, row_class(width), normed)
        yield Trial(GEGLU, row_class(FEED_FORWARD * width), partial(triton_tokens.geglu, hidden))
    if vector.dtype in triton_attention.DTYPES:
        heads = {user.head_width: user.heads for user in users if isinstance(user, CrossAttention)}
        for width, count in heads.items():
            # As a network hands them over.
            query = make(sizes.batch, sizes.queries, count, width).transpose(1, 2)
            key, value = make(sizes.batch, sizes.keys, 2 * count, width).transpose(1, 2).chunk(2, dim=1)
            yield Trial(attention_kernel(width), str(width), partial(attend, query, key, value))


def compilations(
    users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches
) -> list[Callable[[], object]]:
    """One launch for each kernel as Triton specialises it: by block sizes, not by sizes of images or layers."""
    make = partial(torch.zeros, dtype=dtype, device=device)

    def image(channels: int) -> Tensor:
        return make(1, channels, 4, 4).to(memory_format=torch.channels_last)

    def large(norm: GroupNorm, shape_class: str) -> object:
        statistics, application = (launches.of(kernel, shape_class, dtype) for kernel in (STATISTICS, APPLICATION))
        return triton_group_norm.large_group_norm(*of_norm(norm), (None, None), statistics, application)

    def of_norm(norm: GroupNorm) -> tuple[Tensor, None, Tensor, Tensor, int, float, bool, None]:
        vector = make(norm.channels)
        return image(norm.channels), None, vector, vector, norm.groups, norm.eps, False, None

    def materialize(width: int) -> object:
        deferred = torch.zeros(width, dtype=torch.float32, device=device)
        return triton_tokens.materialize(
            Stream(make(4, width), deferred), launches.of(LAYER_NORM, row_class(width), dtype)
        )

    norms = [leaf for leaf in users if isinstance(leaf, GroupNorm)]
    by_width = {norm.channels // norm.groups: norm for norm in norms}
    by_block = {triton_group_norm.join_block(width): norm for width, norm in by_width.items()}
    return [
        *(
            partial(trial.run, launches.of(trial.kernel, trial.shape_class, dtype))
            for trial in trials(users, make, COMPILED) if trial.kernel not in (STATISTICS, APPLICATION)
        ),
        lambda: triton_images.resize(image(norms[0].channels), 8, 8),
        partial(large, norms[0], LARGE),
        *(partial(large, norm, SMALL) for norm in by_block.values()),
        *(
            partial(triton_group_norm.small_image_group_norm, *of_norm(norm)) for width, norm in by_width.items()
            if width >= triton_group_norm.SMALL_IMAGE_GROUP_WIDTH
        ),
        *(partial(materialize, width) for width in widths(users)),
    ]


def widths(users: Iterable[Any]) -> Iterable[int]:
    """Of tokens, one for each class of rows."""
    return {row_class(leaf.width): leaf.width for leaf in users if isinstance(leaf, LayerNorm)}.values()


def attend(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig) -> Tensor:
    """By our kernel, or by torch's, as the configuration says."""
    if config == LIBRARY:
        return functional.scaled_dot_product_attention(query, key, value)
    return triton_attention.attention(query, key, value, config)


def by_keyword(work: Callable[..., object], name: str, config: LaunchConfig) -> object:
    return work(**{name: config})
