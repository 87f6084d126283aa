"""The kernels that a network launches: measured at its shapes, for how they are best configured on this GPU, and
compiled by a launch on a few numbers."""
from __future__ import annotations

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
from . import launch_config as cuts
from . import tokens as triton_tokens
from .launch_config import LaunchConfig, Launches, Trial, attention_kernel, random_on, row_class, tuned

GROUPS = 32


class Sizes(NamedTuple):
    """On how much kernels are launched. sides: of an image, by its class. rows: of tokens. queries, keys: of a cross
    attention."""

    batch: int
    sides: Mapping[str, int]
    rows: int
    queries: int
    keys: int


# What takes the most time in its class, and what takes none.
MEASURED = Sizes(2, {cuts.SMALL: 32, cuts.LARGE: 64}, 4096, 1024, 77)
COMPILED = Sizes(1, {cuts.SMALL: 4, cuts.LARGE: 4}, 4, 16, 16)


def tune_kernels(
    launches: Launches, users: Iterable[Any], dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> int:
    """Measure every kernel and class of a network with these layers (its layout's kernel_users), where that was not
    done on this GPU.

    Returns how many there were. Each compiles a few variants: seconds, once on a machine. Raises what Triton raises.
    """
    return sum(
        tuned(launches, trial, dtype, time_ms) for trial in trials(list(users), random_on(device, dtype), MEASURED)
    )


def trials(users: list[Any], make: Callable[..., Tensor], sizes: Sizes) -> Iterator[Trial]:
    """What can be measured for a network with these layers. make: a tensor of a shape, in the network's type."""
    widest = max(leaf.channels for leaf in users if isinstance(leaf, GroupNorm))
    vector = make(widest)
    for shape_class, side in sizes.sides.items():
        image = make(sizes.batch, widest, side, side).to(memory_format=torch.channels_last)
        norm = partial(triton_group_norm.large_group_norm, image, None, vector, vector, GROUPS, 1e-5, True, None)
        yield Trial(cuts.STATISTICS, shape_class, partial(by_keyword, norm, "statistics_cut"))
        yield Trial(cuts.APPLICATION, shape_class, partial(by_keyword, norm, "application_cut"))
        added = image, image, vector, torch.empty_like(image)
        yield Trial(cuts.ADDITION, shape_class, partial(triton_images.add_and_measure, *added))
    for width in widths(users):
        tokens, hidden, vector = make(sizes.rows, width), make(sizes.rows, 2 * cuts.FEED_FORWARD * width), make(width)
        normed = partial(triton_tokens.layer_norm, Stream(tokens, None, vector), vector, vector, 1e-5)
        yield Trial(cuts.LAYER_NORM, row_class(width), normed)
        yield Trial(cuts.GEGLU, row_class(cuts.FEED_FORWARD * width), partial(triton_tokens.geglu, hidden))
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
        statistics = launches.of(cuts.STATISTICS, shape_class, dtype)
        application = launches.of(cuts.APPLICATION, shape_class, dtype)
        return triton_group_norm.large_group_norm(*of_norm(norm), (None, None), statistics, application)

    def of_norm(norm: GroupNorm) -> tuple[Tensor, None, Tensor, Tensor, int, float, bool, None]:
        vector = make(norm.channels)
        return image(norm.channels), None, vector, vector, norm.groups, norm.eps, False, None

    def materialize(width: int) -> object:
        deferred = torch.zeros(width, dtype=torch.float32, device=device)
        return triton_tokens.materialize(
            Stream(make(4, width), deferred), launches.of(cuts.LAYER_NORM, row_class(width), dtype)
        )

    norms = [leaf for leaf in users if isinstance(leaf, GroupNorm)]
    by_width = {norm.channels // norm.groups: norm for norm in norms}
    by_block = {triton_group_norm.join_block(width): norm for width, norm in by_width.items()}
    chosen = (
        (trial, launches.of(trial.kernel, trial.shape_class, dtype)) for trial in trials(users, make, COMPILED)
        if trial.kernel not in (cuts.STATISTICS, cuts.APPLICATION)
    )
    return [
        *(partial(trial.run, config) for trial, config in chosen if config != cuts.LIBRARY),
        lambda: triton_images.resize(image(norms[0].channels), 8, 8),
        partial(large, norms[0], cuts.LARGE),
        *(partial(large, norm, cuts.SMALL) for norm in by_block.values()),
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
    if config == cuts.LIBRARY:
        return functional.scaled_dot_product_attention(query, key, value)
    return triton_attention.attention(query, key, value, config)


def by_keyword(work: Callable[..., object], name: str, config: LaunchConfig) -> object:
    return work(**{name: config})
