"""What the check of a first use lets through."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import SMALL, a_call, diffusers_unet
from torch import Tensor

from lib_onediff.engines import EAGER, FLOAT8, NATIVE, ONEFLOW
from lib_onediff.model.read import read_layout
from lib_onediff.runtime.verify import HOST_NOT_FINITE, judge
from lib_onediff.shapes.key import ShapeKey
from lib_onediff.shapes.table import Entry


def judged(backend: str, dtype: torch.dtype, error: float) -> str | None:
    unet = diffusers_unet(**SMALL)
    key = ShapeKey.of(read_layout(unet).architecture, dtype, a_call(unet), backend)
    expected = torch.ones(64, dtype=torch.float32)
    return judge(Entry(replace(key, dtype=dtype)), expected * (1 + error), lambda: expected)


@pytest.mark.parametrize(
    ("backend", "dtype", "passes", "fails"),
    [
        (EAGER, torch.float32, 9e-5, 1.1e-4), (NATIVE, torch.float16, 9e-3, 1.1e-2),
        (NATIVE, torch.bfloat16, 5e-2, 7e-2), (FLOAT8, torch.float16, 0.11, 0.13),
        # It may sum in half precision, and is not checked again when it is told to.
        (ONEFLOW, torch.float16, 5e-2, 7e-2), (ONEFLOW, torch.float32, 9e-5, 1.1e-4),
    ],
)
def test_limits(backend: str, dtype: torch.dtype, passes: float, fails: float) -> None:
    assert judged(backend, dtype, passes) is None
    assert "rounding explains" in judged(backend, dtype, fails)


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_fails_and_a_host_that_is_not_is_no_yardstick(worst: float) -> None:
    assert "rounding explains" in judged(EAGER, torch.float32, worst)
    unet = diffusers_unet(**SMALL)
    key = ShapeKey.of(read_layout(unet).architecture, torch.float32, a_call(unet), EAGER)

    def host() -> Tensor:
        return torch.full((64,), worst)

    assert judge(Entry(key), torch.ones(64), host) == HOST_NOT_FINITE
