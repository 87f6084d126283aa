"""Launch configs of Triton kernels: which are measured, and which is chosen."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.core.leaves import GroupNorm, LayerNorm
from lib_onediff.devices.cuda.kernels.launch_config import (
    ADDITION,
    DOWN_PRODUCT,
    GEGLU,
    INT8_PRODUCT,
    LAYER_NORM,
    SMALL,
    LaunchConfig,
    Launches,
    Trial,
    best_config,
    random_on,
    row_class,
)
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.tuning import trials, tune_down, tune_kernels, tune_stored

CPU = torch.device("cpu")
LAYERS: list[Any] = [GroupNorm("norm", 64, 32, 1e-5), LayerNorm("wide", 96, 1e-5), LayerNorm("narrow", 64, 1e-5)]


class Clock:
    """A TimeMs that does not run the work: it returns the time in `ms` for the work's launch config, or 1.0. timed: the
    launch configs, in order."""

    def __init__(self, **ms: float) -> None:
        self.ms = ms
        self.timed: list[LaunchConfig] = []

    def __call__(self, work: Callable[[], object]) -> float:
        config = work.args[-1]
        self.timed.append(config)
        return self.ms.get(str(config), 1.0)


def test_kernels_are_measured_once_for_each_width_and_dtype() -> None:
    """tune_kernels returns the number of measurements. Layer norm's third config is the fastest. All configs of GEGLU
    take the same time, so that its first one stays."""
    launches = Launches(TuningCache())
    clock = Clock(**{str(LAYER_NORM.candidates[2]): 0.5})
    count = tune_kernels(launches, LAYERS, torch.float32, CPU, clock)
    # Three kernels for two sizes of images, and two kernels for two widths of tokens.
    assert count == 2 * 3 + 2 * 2
    for width in (96, 64):
        assert launches.of(LAYER_NORM, row_class(width), torch.float32) == LAYER_NORM.candidates[2]
    assert launches.of(GEGLU, row_class(4 * 96), torch.float32) == GEGLU.candidates[0]
    assert launches.of(LAYER_NORM, row_class(96), torch.float16) == LAYER_NORM.candidates[0], "another dtype"
    clock.timed.clear()
    assert tune_kernels(launches, LAYERS, torch.float32, CPU, clock) == 0 and not clock.timed


@pytest.mark.parametrize(("other_ms", "place"), [(0.98, 0), (0.9, 1), (2.0, 0)])
def test_a_launch_config_is_replaced_only_by_a_clearly_faster_one(other_ms: float, place: int) -> None:
    """The first config takes 1.0 ms. other_ms: the time of the second one. place: which of both is chosen."""
    clock = Clock(**{str(ADDITION.candidates[1]): other_ms})
    assert best_config(Trial(ADDITION, SMALL, lambda config: None), clock) == ADDITION.candidates[place]


def test_a_launch_config_that_this_gpu_cannot_run_is_not_chosen() -> None:
    """The second config raises when it runs. Of the others, the third is the fastest."""

    def time_ms(work: Callable[[], object]) -> float:
        work()
        return next(times)

    def run(config: LaunchConfig) -> None:
        if config == GEGLU.candidates[1]:
            raise RuntimeError("out of resource: shared memory")

    times = iter([1.0, 0.5, 0.7, 0.9])
    assert best_config(Trial(GEGLU, "512", run), time_ms) == GEGLU.candidates[2]


def test_int8_products_of_stored_weights_are_measured_once_after_a_call_has_used_them() -> None:
    """Stored weights are those that the model's file has in int8. A call records their product's shape, (rows, out,
    width, dtype), but not that of weights which OneDiff has quantized."""
    launches = Launches(TuningCache())
    weight = QuantizedWeight(torch.zeros(48, 32, dtype=torch.int8), torch.ones(1, 1))
    layer = LayerWeights(torch.empty(48, 32, dtype=torch.float16, device="meta"), None, (weight,))
    ops = NativeOperators(launches)
    ops.linear(torch.zeros(2, 3, 32, dtype=torch.float16), layer)
    ours = layer._replace(low_bit=(weight._replace(stored=False),))
    ops.linear(torch.zeros(2, 4, 32, dtype=torch.float16), ours)
    assert launches.stored_products == {(6, 48, 32, torch.float16)}
    clock = Clock(**{str(INT8_PRODUCT.candidates[4]): 0.5})
    [product] = launches.stored_products
    assert tune_stored(launches, product, CPU, clock)
    assert launches.of(INT8_PRODUCT, "6x32x48", torch.float16) == INT8_PRODUCT.candidates[4]
    assert not tune_stored(launches, product, CPU, clock)


def test_products_with_down_matrices_of_loras_are_measured_once_after_a_call_has_used_them() -> None:
    """A call records the product's shape, (rows, rank, width, dtype)."""
    launches = Launches(TuningCache())
    weight = QuantizedWeight(torch.zeros(48, 32, dtype=torch.int8), torch.ones(1, 1))
    down, up = torch.zeros(16, 32, dtype=torch.float16), torch.zeros(48, 16, dtype=torch.float16)
    shape = torch.empty(48, 32, dtype=torch.float16, device="meta")
    layer = LayerWeights(shape, None, (weight,), LowRank(down, ((0, up),)))
    NativeOperators(launches).linear(torch.zeros(2, 3, 32, dtype=torch.float16), layer)
    assert launches.down_products == {(6, 16, 32, torch.float16)}
    clock = Clock(**{str(DOWN_PRODUCT.candidates[2]): 0.5})
    [product] = launches.down_products
    assert tune_down(launches, product, CPU, clock)
    assert launches.of(DOWN_PRODUCT, "6x32x16", torch.float16) == DOWN_PRODUCT.candidates[2]
    assert not tune_down(launches, product, CPU, clock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="interpreted, it takes minutes")
def test_every_launch_config_runs_on_this_gpu() -> None:
    """tune_kernels skips launch configs that raise, so that a broken one would not show."""
    for trial in trials(LAYERS, random_on(torch.device("cuda"), torch.float16)):
        for config in trial.kernel.candidates:
            trial.run(config)
    torch.cuda.synchronize()
