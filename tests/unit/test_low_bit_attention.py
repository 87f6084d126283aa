"""Low-bit attention: where self attention is in int8, as was measured; what it does to calls, and what falls back."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import diffusers_output, relative_error, served
from ladder_builders import Weather, entry_of, now, reason
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import half_call, half_unet, measured

import lib_onediff
from lib_onediff.engines import (
    CUDAGRAPH,
    FLOAT8,
    INT8,
    LOW_BIT_ONLY,
    NATIVE,
    WITH_ATTENTION,
    WITHOUT_ATTENTION,
    Candidates,
    with_low_bit_attention,
)
from lib_onediff.engines.low_bit import SELF_ATTENTION, LowBit
from lib_onediff.model.low_bit import INT8 as INT8_KIND
from lib_onediff.ops import torch_ops
from lib_onediff.ops.attention import Attention
from lib_onediff.ops.quantized import attention_gains, int8_attention, tuning
from lib_onediff.ops.quantized.attention_gains import AttentionChoice, AttentionPlan, name_of, shape_class
from lib_onediff.ops.quantized.gains import products
from lib_onediff.ops.quantized.int8_attention import Int8Attention
from lib_onediff.ops.quantized.operators import LowBitOperators
from lib_onediff.ops.triton.launch_config import INT8_ATTENTION, Launches
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.options.settings import MOST_LOW_BIT_ERROR, Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.table import State

CPU = torch.device("cpu")
HALF = torch.float16
ATTENDING = WITH_ATTENTION[INT8]
SHAPE = (1, 1, 300, 32)
GAINS_NOTHING = "at this size attention gains nothing by INT8 on this machine (measured)"


KERNELS = int8_attention.attention


def by_torch(query: Tensor, key: Tensor, value: Tensor, config: Any) -> Tensor:
    """As the kernels, with one scale for all tokens of a head."""

    def rounded(tokens: Tensor) -> Tensor:
        scale = tokens.abs().amax((2, 3), keepdim=True).clamp_min(1e-12) / 127
        return torch.round(tokens / scale) * scale

    query, key = rounded(query.float()), rounded(key.float() - key.float().mean(2, keepdim=True))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value.float()).to(value.dtype)


class Attending(LowBitOperators):
    """Those of low_bit_builders, with the attention that they are given."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        return self._attention(query, key, value, upcast)


@pytest.fixture
def gpu(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> Weather:
    """A machine that has int8, for networks of any size; attention in int8 by torch."""
    monkeypatch.setattr(int8_attention, "attention", by_torch)
    monkeypatch.setattr(attention_gains, "FEW_KEYS", 3)
    ours, launches = runtime.operators.low_bit, Launches(TuningCache())
    ours.forget()
    attention = Int8Attention(torch_ops.attention, ours.attention.serves, launches)
    operators = Attending(launches, attention, lambda device, dtype: dtype, ours.choice.best)
    for backend in WITHOUT_ATTENTION:
        monkeypatch.setitem(runtime.operators._made, backend, operators)
    return on_a_gpu


def compiled(unet: nn.Module, low_bit: str = "int8", budget: float = MOST_LOW_BIT_ERROR, **options: Any) -> Any:
    return lib_onediff.compile_unet(
        unet, low_bit=low_bit, low_bit_budget=budget, **{"low_bit_attention": True, **options}
    )


def timed(unet: nn.Module, exact: float, rounded: float) -> None:
    """Have these milliseconds measured for the attentions of half_call."""
    choice, nothing = runtime.operators.low_bit.attention, torch.ones(1)
    for shape in set(AttentionPlan().shapes(runtime.layout_of(unet), 4, 4, 1).values()):
        times = iter((exact, rounded))
        choice.measure(shape, HALF, lambda: nothing, lambda: nothing, nothing, lambda work: next(times))  # noqa: B023


@pytest.fixture
def kernels_run(gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the kernel was called with."""
    found: list[tuple[int, ...]] = []
    real = int8_attention.attention
    monkeypatch.setattr(
        int8_attention, "attention", lambda query, *others: (found.append(tuple(query.shape)), real(query, *others))[1]
    )
    return found


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_steps_with_it() -> None:
    native, eight = Candidates((NATIVE, CUDAGRAPH), "too small"), Candidates((FLOAT8, NATIVE), "")
    only = Candidates((LOW_BIT_ONLY[INT8], INT8, NATIVE), "")
    assert with_low_bit_attention(eight, "fp8", lambda: None).backends == (WITH_ATTENTION[FLOAT8], FLOAT8, NATIVE)
    assert with_low_bit_attention(only, "int8", lambda: None).backends[0] == WITH_ATTENTION[LOW_BIT_ONLY[INT8]]
    found = with_low_bit_attention(native, "int8", lambda: None)
    assert found == Candidates((ATTENDING, *native.backends), "too small"), "attention gains where no product does"
    assert with_low_bit_attention(native, "int8", lambda: "old") == Candidates(native.backends, "too small; old")
    other = Candidates((CUDAGRAPH,), "no Triton")
    assert with_low_bit_attention(other, "int8", lambda: None) == other
    assert len(set(WITH_ATTENTION.values())) == len(WITHOUT_ATTENTION) == 6


def test_only_a_class_that_was_measured_to_gain_is_in_int8() -> None:
    cache = TuningCache()
    choice, nothing = AttentionChoice(cache), torch.ones(1)

    def measure(shape: tuple[int, ...], exact: float, rounded: float) -> None:
        times = iter((exact, rounded))
        choice.measure(shape, HALF, lambda: nothing, lambda: nothing, nothing, lambda work: next(times))

    assert not choice.serves(SHAPE, HALF) and choice.gains(SHAPE, HALF) is None, "nothing was measured"
    assert choice.why_none([SHAPE], HALF) is None, "it may gain"
    measure(SHAPE, 1.0, 0.91)
    assert not choice.serves(SHAPE, HALF) and choice.why_none([SHAPE], HALF) == GAINS_NOTHING
    measure(SHAPE, 1.0, 0.89)
    assert choice.serves(SHAPE, HALF) and choice.why_none([SHAPE], HALF) is None
    assert choice.serves((8, 5, 512, 32), HALF), "any batch and number of heads, up to the next power of two"
    for other in ((1, 1, 513, 32), (1, 1, 300, 40)):
        assert not choice.serves(other, HALF)
    assert not choice.serves(SHAPE, torch.bfloat16)
    assert AttentionChoice(cache).serves(SHAPE, HALF), "the next process"
    for strange in ("fast", [1], [1, None], [1, float("nan")], [0, -1], {"backend": "int8"}):
        cache.set(name_of(SHAPE, HALF), strange)
        assert AttentionChoice(cache).gains(SHAPE, HALF) is None
    assert "too few keys" in (choice.why_none([], HALF) or "")
    assert AttentionChoice(TuningCache(), lambda: True).serves(SHAPE, HALF)
    assert not AttentionChoice(TuningCache(), lambda: True).serves((1, 1, 256, 32), HALF)


def test_exact_attention_never_sees_what_was_measured() -> None:
    cache = TuningCache()
    cache.set(name_of(SHAPE, HALF), [1.0, 0.1])
    assert Attention(cache).chosen(SHAPE, SHAPE, HALF) is None


class Clock:
    """Milliseconds for each work in turn, which is done once."""

    def __init__(self, *ms: float) -> None:
        self.ms = list(ms)

    def __call__(self, work: Callable[[], object]) -> float:
        return self.ms.pop(0)


def test_the_fastest_cut_is_what_is_compared() -> None:
    cache = TuningCache()
    ours = LowBit(cache, launches := Launches(cache), Attention(cache))
    cuts = len(INT8_ATTENTION.candidates)
    ours.measure_attention(SHAPE, HALF, CPU, clock := Clock(*[3.0] * (cuts - 1), 1.5, 2.0, 1.5))
    assert clock.ms == [] and ours.attention.measured(SHAPE, HALF) == (2.0, 1.5)
    assert launches.of(INT8_ATTENTION, shape_class(SHAPE), HALF) == INT8_ATTENTION.candidates[-1]
    ours.measure_attention(SHAPE, HALF, CPU, Clock(2.0, 1.9))
    assert not ours.attention.serves(SHAPE, HALF), "how it is cut is known"


def test_a_kernel_that_is_wrong_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_attention, "attention", lambda query, key, value, config: torch.zeros_like(query))
    cache = TuningCache()
    ours = LowBit(cache, Launches(cache), Attention(cache))
    with pytest.raises(RuntimeError, match="wrong by 1.0e"):
        ours.measure_attention(SHAPE, HALF, CPU, Clock(*[1.0] * 9))
    assert ours.attention.gains(SHAPE, HALF) is None


# --- calls ------------------------------------------------------------------------------------------------------------


def test_self_attention_is_in_int8_where_it_gains_and_cross_attention_never(
    gpu: Weather, kernels_run: list[tuple[int, ...]]
) -> None:
    unet = compiled(half_unet())
    call = half_call(unet)
    host = diffusers_output(unet, call)
    timed(unet, 2.0, 1.0)
    output = served(unet, call)
    assert now()[0] == ATTENDING, reason()
    shapes = AttentionPlan().shapes(runtime.layout_of(unet), 4, 4, 1)
    assert kernels_run == list(shapes.values()) and len(shapes) >= 4
    assert entry_of(ATTENDING).relative_error == pytest.approx(relative_error(output, host), rel=0.05), "it is checked"
    for _ in range(2):
        assert torch.equal(served(unet, call), output)
    assert now() == (ATTENDING, "graph")
    compiled(unet, low_bit_attention=False)
    without = served(unet, call)
    assert now()[0] == INT8 and 1e-5 < relative_error(output, without) < 0.05


def test_without_the_option_nothing_changes_by_a_bit(gpu: Weather, kernels_run: list[tuple[int, ...]]) -> None:
    for low_bit, backend in (("off", NATIVE), ("int8", INT8)):
        unet = compiled(half_unet(), low_bit, low_bit_attention=False)
        call = half_call(unet)
        before = served(unet, call)
        timed(unet, 2.0, 1.0)
        assert torch.equal(served(unet, call), before) and now()[0] == backend
        runtime.tuning_cache.clear()
        runtime.operators.measure_anew()
    unet = compiled(half_unet(), "off")
    timed(unet, 2.0, 1.0)
    served(unet, half_call(unet))
    assert now()[0] == NATIVE and kernels_run == [], "it counts while Low-bit is not off"


def test_where_attention_gains_nothing_the_products_serve_and_the_reason_says_so(
    gpu: Weather, kernels_run: list[tuple[int, ...]]
) -> None:
    unet = compiled(half_unet())
    timed(unet, 1.0, 1.0)
    served(unet, half_call(unet))
    assert now()[0] == INT8 and GAINS_NOTHING in reason() and kernels_run == []


def test_where_no_product_gains_attention_may(
    gpu: Weather, kernels_run: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = compiled(half_unet())
    call = half_call(unet)
    timed(unet, 2.0, 1.0)
    for product in {product for _, product in products(runtime.layout_of(unet), 4, 4, 1)}:
        measured(product, INT8_KIND, 1.0, 2.0)
    output = served(unet, call)
    assert now()[0] == ATTENDING and "matrix products gain nothing" in reason()
    assert kernels_run and runtime.totals().low_bit == 0
    for _ in range(2):
        served(unet, call)
    assert now() == (ATTENDING, "graph")
    monkeypatch.setattr(int8_attention, "attention", KERNELS)
    runtime.free_graphs()
    by_kernels, host = served(unet, call), diffusers_output(unet, call)
    assert now() == (ATTENDING, "plain")
    assert 1e-4 < relative_error(by_kernels, host) < 2e-2 and 1e-4 < relative_error(output, host) < 2e-2


def test_what_was_not_measured_is_measured_before_the_first_use(
    gpu: Weather, monkeypatch: pytest.MonkeyPatch, kernels_run: list[tuple[int, ...]]
) -> None:
    times = iter((1.0, 2.0) * 9)
    monkeypatch.setattr(runtime.operators, "tune_low_bit", lambda backend, layout, call, time_ms: (
        runtime.operators.low_bit.tune_attention(layout, call, lambda work: next(times)) if "+" in backend else False
    ))
    monkeypatch.setattr(tuning, "best_cut", lambda trial, time_ms: trial.kernel.candidates[0])
    unet = compiled(half_unet())
    served(unet, half_call(unet))
    assert now()[0] == INT8 and GAINS_NOTHING in reason(), "at once, not from the second call on"
    classes = {shape_class(shape) for shape in AttentionPlan().shapes(runtime.layout_of(unet), 4, 4, 1).values()}
    assert len(kernels_run) == len(classes), "each class once"


def test_what_cannot_be_measured_is_tried_once_and_said(gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def broken(*given: Any) -> None:
        tries.append(1)
        raise RuntimeError("no such instruction here")

    monkeypatch.setattr(runtime.operators.low_bit, "measure_attention", broken)
    unet = compiled(half_unet())
    for _ in range(3):
        served(unet, half_call(unet))
        assert now()[0] == INT8 and "could not be measured here" in reason()
    classes = {shape for shape in AttentionPlan().shapes(runtime.layout_of(unet), 4, 4, 1).values()}
    assert len(tries) == len(classes)
    runtime.operators.low_bit.forget()


def test_a_kernel_that_fails_leaves_the_products(gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(int8_attention, "attention", broken)
    unet = compiled(half_unet())
    timed(unet, 2.0, 1.0)
    served(unet, half_call(unet))
    assert now()[0] == INT8 and "shared memory" in reason()
    assert entry_of(ATTENDING).state is State.FAILED


def test_what_is_too_far_from_the_host_is_not_used(gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_attention, "attention", lambda query, key, value, config: -3 * value)
    unet = compiled(half_unet())
    timed(unet, 2.0, 1.0)
    call = half_call(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call)), "the first image is the host's"
    served(unet, call)
    assert now()[0] == INT8 and "it differs" in reason()


def test_attention_in_float32_stays_so(gpu: Weather, kernels_run: list[tuple[int, ...]]) -> None:
    unet = compiled(half_unet(), attention_upcast="on")
    timed(unet, 2.0, 1.0)
    served(unet, half_call(unet))
    assert now()[0] == INT8 and "computed in float32" in reason() and kernels_run == []


def test_low_bit_only_with_it(gpu: Weather, kernels_run: list[tuple[int, ...]]) -> None:
    unet = compiled(half_unet(), low_bit_only=True, verify=False)
    timed(unet, 2.0, 1.0)
    call = half_call(unet)
    output = served(unet, call)
    assert now()[0] == WITH_ATTENTION[LOW_BIT_ONLY[INT8]], reason()
    assert kernels_run and runtime.totals().offloaded > 0
    assert relative_error(output, diffusers_output(half_unet(), call)) < 0.05


# --- the error budget -------------------------------------------------------------------------------------------------


def classes_found() -> dict[str, dict[str, Any]]:
    [errors] = lib_onediff.status()["low_bit"]
    return {one["name"]: one for one in errors["classes"]}


def test_attention_is_a_class_of_the_error_budget(gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = compiled(half_unet(), budget=0.06)
    timed(unet, 2.0, 1.0)
    call = half_call(unet)
    served(unet, call)
    assert now()[0] == ATTENDING, reason()
    found = classes_found()[SELF_ATTENTION]
    assert found["is_used"] and found["kinds"] == "int8" and 1e-5 < found["error"] < 0.02


def test_attention_that_errs_too_much_stays_exact_and_the_products_do_not(
    gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        int8_attention, "attention", lambda query, key, value, config: (calls.append(1), 1.5 * value)[1]
    )
    unet = compiled(half_unet(), budget=0.06)
    timed(unet, 2.0, 1.0)
    call = half_call(unet)
    output = served(unet, call)
    found = classes_found()
    assert not found[SELF_ATTENTION]["is_used"] and found[SELF_ATTENTION]["error"] > 0.06
    assert len([one for one in found.values() if one["is_used"]]) == len(found) - 1 == 6
    calls.clear()
    for _ in range(3):
        assert torch.equal(served(unet, call), output)
    assert calls == [] and now() == (ATTENDING, "graph")
    with runtime.settings_for_run(Settings(low_bit="int8", low_bit_budget=MOST_LOW_BIT_ERROR)):
        assert torch.equal(served(unet, call), output), "with exact attention"
