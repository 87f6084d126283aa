"""Chooses the cases of a test with several parameters: all combinations on a GPU and at night, a few on a CPU.

Without a GPU, Triton's interpreter runs our kernels a thousand times slower. Then the cases are the fewest in which
each value of each parameter occurs. A GPU, or ONEDIFF_TEST_GRID=full, tests all combinations.
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
    """The id of a value in the test's name. It is the same in every process, unlike the str of a function, which
    contains its address."""
    return getattr(value, "__name__", str(value))


def grid(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of the values of its parameters, or by the fewest cases that have every
    value of each parameter."""
    return pytest.mark.parametrize(list(parameters), cases(*parameters.values()), ids=name_of)


def cases(*parameters: Sequence[Any], whole: bool = WHOLE) -> list[tuple[Any, ...]]:
    """All combinations of the values of several parameters, or the fewest cases that have every value of each."""
    if whole:
        return list(product(*parameters))
    count = max(map(len, parameters))
    # Shifted at each restart, so that two parameters with equally many values do not advance together.
    return [
        tuple(
            values[(number + place * (number // len(values))) % len(values)] for place, values in enumerate(parameters)
        )
        for number in range(count)
    ]


def ends(candidates: Sequence[Any]) -> Sequence[Any]:
    """All candidates for launching a kernel, or on a CPU the smallest and the largest: these have both sizes of blocks
    and both numbers of warps."""
    return candidates if WHOLE else sorted({min(candidates), max(candidates)})


def first(count: int, values: Sequence[Any]) -> Sequence[Any]:
    """All values, or on a CPU the first `count` of them. Put values first that differ in the property that is
    tested."""
    return values if WHOLE else values[:count]
