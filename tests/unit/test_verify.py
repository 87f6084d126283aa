"""What the check of a first use lets through."""
from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy
import pytest
import torch
from backend_names import EAGER, NATIVE, ONEFLOW
from builders import SMALL, a_call, diffusers_unet
from torch import Tensor

from lib_onediff.core.key import EXACT, Lossy, ShapeKey
from lib_onediff.core.table import Entry
from lib_onediff.families.registry import read_layout
from lib_onediff.runtime.verify import HOST_NOT_FINITE, computed_twice, judge, prove
from lib_onediff.store.history import History


def judged(backend: str, dtype: torch.dtype, error: float, lossy: Lossy = EXACT) -> str | None:
    unet = diffusers_unet(**SMALL)
    key = ShapeKey.of(read_layout(unet).architecture, dtype, a_call(unet), backend, lossy=lossy)
    expected = torch.ones(64, dtype=torch.float32)
    return judge(Entry(replace(key, dtype=dtype)), expected * (1 + error), lambda: expected)


@pytest.mark.parametrize(
    ("backend", "dtype", "passes", "fails"),
    [
        (EAGER, torch.float32, 9e-5, 1.1e-4), (NATIVE, torch.float16, 9e-3, 1.1e-2),
        (NATIVE, torch.bfloat16, 5e-2, 7e-2),
        # It may sum in half precision, and is not checked again when it is told to.
        (ONEFLOW, torch.float16, 5e-2, 7e-2), (ONEFLOW, torch.float32, 9e-5, 1.1e-4),
    ],
)
def test_limits(backend: str, dtype: torch.dtype, passes: float, fails: float) -> None:
    assert judged(backend, dtype, passes) is None
    assert "rounding explains" in judged(backend, dtype, fails)
    for lossy in (Lossy("fp8"), Lossy(attention="SageAttention")):
        assert judged(NATIVE, torch.float16, 0.11, lossy) is None
        assert "rounding explains" in judged(NATIVE, torch.float16, 0.13, lossy)


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_fails_and_a_host_that_is_not_is_no_yardstick(worst: float) -> None:
    assert "rounding explains" in judged(EAGER, torch.float32, worst)
    unet = diffusers_unet(**SMALL)
    key = ShapeKey.of(read_layout(unet).architecture, torch.float32, a_call(unet), EAGER)

    def host() -> Tensor:
        return torch.full((64,), worst)

    assert judge(Entry(key), torch.ones(64), host) == HOST_NOT_FINITE


def patched_entry() -> Entry:
    """Of a shape with a function of somebody's in it."""
    unet = diffusers_unet(**SMALL)
    key = ShapeKey.of(read_layout(unet).architecture, torch.float32, a_call(unet), EAGER)
    return Entry(replace(key, patches=("patches[attn2_patch] by somebody",)))


# As HyperTile has one.
OWN = random.Random()


def next_numbers() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_what_is_computed_twice_leaves_the_host_its_random_numbers() -> None:
    def compute() -> Tensor:
        return torch.randn(8) + random.random() + numpy.random.rand()

    for seed in (1, 2):
        for generator in (torch.manual_seed, random.seed, numpy.random.seed):
            generator(seed)
        rewound = next_numbers()
        for generator in (torch.manual_seed, random.seed, numpy.random.seed):
            generator(seed)
        assert torch.is_tensor(computed_twice(patched_entry(), compute))
        counter = itertools.count(1)
        assert computed_twice(patched_entry(), lambda: compute() * next(counter)) is None  # noqa: B023
        assert next_numbers() == rewound


def test_a_function_is_compared_and_a_miss_leaves_the_host_its_random_numbers() -> None:
    own = OWN
    own.seed(1)

    def host() -> Tensor:
        return torch.randn(8) + OWN.random()

    torch.manual_seed(5)
    refusal = prove(patched_entry(), torch.zeros(8), History(), host, None, False, (host,))
    assert refusal is not None and "it differs from the model's own forward" in refusal
    after_a_miss = torch.rand(3), own.random()
    torch.manual_seed(5)
    assert torch.equal(after_a_miss[0], torch.rand(3)) and after_a_miss[1] == random.Random(1).random()
