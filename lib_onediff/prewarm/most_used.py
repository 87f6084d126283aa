"""Which sizes are used the most on this machine."""
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..shapes.sizes import Size, parse_size
from ..store.rows import HistoryRow
from .job import TOKEN_CHOICES, TOKENS


class Wanted(NamedTuple):
    """What could be made ready: a size with the number of pictures at once, and the length of the prompt."""

    size: Size
    tokens: int


def most_used(rows: Iterable[HistoryRow], model: str | None, count: int) -> list[Wanted]:
    """The sizes that this model ("SD1") has made the most UNet calls at, the most used first.

    Each resolution once, with the number of pictures and the prompt's length that were the most usual there.
    """
    by_resolution: dict[str, Counter[tuple[int, int]]] = {}
    for row in rows:
        if row.model == model and row.uses and row.tokens:
            by_resolution.setdefault(row.resolution, Counter())[pictures_of(row.batch), row.tokens] += row.uses
    ordered = sorted(by_resolution, key=lambda resolution: -by_resolution[resolution].total())
    found = []
    for resolution in ordered:
        ((pictures, tokens), _), = by_resolution[resolution].most_common(1)
        # What an extension has drawn at may be no size that a user could ask for.
        with contextlib.suppress(ValueError):
            size = parse_size(resolution)
            found.append(Wanted(Size(size.width, size.height, pictures), usual_tokens(tokens)))
    return found[:count]


def pictures_of(latents: int) -> int:
    """How many pictures a UNet call of so many latents makes, with guidance, which takes two for each."""
    return latents // 2 if latents % 2 == 0 else latents


def usual_tokens(tokens: int) -> int:
    return tokens if tokens in TOKEN_CHOICES else TOKENS
