"""Chooses the cases of a test with several parameters: all combinations on a GPU and at night, a few on a CPU.

Without a GPU, Triton's interpreter runs our kernels a thousand times slower. Then each value of each parameter is
tested once, which is one case for each property. A GPU, or ONEDIFF_TEST_GRID=full, tests all combinations.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest


def has_gpu() -> bool:
    """Whether torch can use a GPU; False without torch, as in tests that only send requests to a WebUI."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


WHOLE = os.environ.get("ONEDIFF_TEST_GRID") == "full" or has_gpu()


def name_of(value: Any) -> str:
    """A value's name, the same in every process, unlike the str of a function, which contains its address."""
    return getattr(value, "__name__", str(value))


def grid(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of these values, or by the fewest cases that have every value of each
    axis."""
    return pytest.mark.parametrize(list(axes), cases(*axes.values()), ids=name_of)


def cases(*axes: Sequence[Any], whole: bool = WHOLE) -> list[tuple[Any, ...]]:
    """All combinations of the values, or the fewest cases that have every value of each axis."""
    if whole:
        return list(product(*axes))
    count = max(map(len, axes))
    # Shifted at each restart, so that two axes of one length do not run in step.
    return [
        tuple(axis[(number + place * (number // len(axis))) % len(axis)] for place, axis in enumerate(axes))
        for number in range(count)
    ]


def ends(candidates: Sequence[Any]) -> Sequence[Any]:
    """All candidates, or on a CPU the first and the last: blocks of both sizes, and both numbers of warps."""
    return candidates if WHOLE else sorted({min(candidates), max(candidates)})


def first(count: int, values: Sequence[Any]) -> Sequence[Any]:
    """All values, or on a CPU the first ones, which differ in the property that is tested."""
    return values if WHOLE else values[:count]
