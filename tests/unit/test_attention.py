"""Attention: exact by every implementation, and the pick among them by measurement."""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import a_call, our_output, relative_error, shared_ldm_unet, shared_unet
from torch import Tensor, nn
from torch.backends import cuda as switches

from lib_onediff.core.tuning_cache import TuningCache
from lib_onediff.devices.torch import attention as module
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    FUSED,
    GEMM,
    MATH,
    TORCH,
    Attention,
    choice_name,
    gemm_attention,
)
from lib_onediff.devices.torch.attention_tuning import fastest, random_inputs
from lib_onediff.families.registry import FAMILIES, read_layout

CPU = torch.device("cpu")
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = {
    "self": ((2, 8, 60, 40), (2, 8, 60, 40)), "cross": ((2, 5, 63, 64), (2, 5, 77, 64)),
    "one query": ((1, 2, 1, 8), (1, 2, 77, 8)), "one key": ((1, 2, 9, 8), (1, 2, 1, 8)),
    "VAE": ((1, 1, 221, 512), (1, 1, 221, 512)), "VAE of two": ((2, 1, 35, 384), (2, 1, 35, 384)),
}


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ value.double()


def flags() -> list[bool]:
    enabled = [switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.math_sdp_enabled()]
    return enabled + ([switches.cudnn_sdp_enabled()] if hasattr(switches, "cudnn_sdp_enabled") else [])


@pytest.fixture(autouse=True)
def switches_stay_as_they_are() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores_bytes", [1, 3000, 40_000, 64 << 20])
@pytest.mark.parametrize("kind", SHAPES)
def test_gemm_attention_is_exact_however_it_is_cut(kind: str, scores_bytes: int, dtype: torch.dtype) -> None:
    inputs = random_inputs(*SHAPES[kind], dtype, CPU)
    output = gemm_attention(*inputs, scores_bytes=scores_bytes)
    assert output.shape == inputs[0].shape and output.dtype == dtype
    assert relative_error(output.double(), exact(*inputs)) < ROUNDING[dtype]


def test_gemm_attention_holds_no_more_scores_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    score = module.score

    def watched(query: Tensor, key: Tensor, scale: float, scores: Tensor) -> Tensor:
        held.append((scores.untyped_storage().nbytes(), scores.shape[1]))
        return score(query, key, scale, scores)

    monkeypatch.setattr(module, "score", watched)
    gemm_attention(*random_inputs((1, 2, 100, 16), (1, 2, 50, 16), torch.float32, CPU), scores_bytes=4 * 2 * 50 * 30)
    assert [rows for _, rows in held] == [30, 30, 30, 10]
    assert {size for size, _ in held} == {4 * 2 * 50 * 30}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_scores_neither_overflow_nor_blur(dtype: torch.dtype) -> None:
    query, key, value = (40 * tensor for tensor in random_inputs((1, 1, 64, 512), (1, 1, 64, 512), dtype, CPU))
    assert (query.double() @ key.double().transpose(-1, -2)).abs().max() > torch.finfo(torch.float16).max
    output = gemm_attention(query, key, value)
    assert torch.isfinite(output).all()
    assert relative_error(output.double(), exact(query, key, value)) < ROUNDING[dtype]


def test_heads_lie_beside_each_other_as_their_joining_wants_it() -> None:
    output = gemm_attention(*random_inputs((2, 8, 60, 40), (2, 8, 60, 40), torch.float32, CPU))
    assert output.transpose(1, 2).is_contiguous()


def test_inputs_lie_in_memory_as_our_forward_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, ...]] = []
    our_output(shared_unet("SD1"), a_call(shared_unet("SD1")), Watched(lambda *inputs: seen.append(inputs)))
    for inputs in seen:
        made = random_inputs(tuple(inputs[0].shape), tuple(inputs[1].shape), torch.float32, CPU)
        # Between two tokens of the context lie the keys and values of other layers too.
        is_cross, own = inputs[0].shape != inputs[1].shape, (1, 3)
        assert made[0].stride() == inputs[0].stride()
        for one, other in zip(made[1:], inputs[1:], strict=True):
            assert [one.stride(index) for index in own] == [other.stride(index) for index in own]
            assert is_cross or one.stride() == other.stride()


def test_on_a_cpu_it_is_torchs_own() -> None:
    inputs = random_inputs(*SHAPES["cross"], torch.float32, CPU)
    tuning_cache = TuningCache()
    tuning_cache.set(choice_name(*SHAPES["cross"], torch.float32), {"backend": GEMM})
    attention = Attention(tuning_cache)
    assert torch.equal(attention(*inputs), nn.functional.scaled_dot_product_attention(*inputs))
    assert attention.measure(*SHAPES["cross"], torch.float32, CPU) is None


def test_upcast_computes_in_float32() -> None:
    inputs = random_inputs(*SHAPES["self"], torch.float16, CPU)
    attention = Attention(TuningCache())
    upcast = attention(*inputs, upcast=True)
    assert upcast.dtype == torch.float16 and torch.equal(upcast, torch_ops.attention(*inputs, upcast=True))
    assert relative_error(upcast.double(), exact(*inputs)) < 4e-4


@pytest.mark.parametrize("backend", [TORCH, GEMM, *FUSED])
def test_every_implementation_gives_the_same_where_it_runs(backend: str) -> None:
    inputs = random_inputs(*SHAPES["cross"], torch.float32, CPU)
    output = Attention(TuningCache()).run(backend, *inputs)
    assert relative_error(output.double(), exact(*inputs)) < 1e-6


def test_no_switch_of_torchs_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the whole process's: a host's thread that asks or computes meanwhile would find ours."""
    for switch in ("flash", "mem_efficient", "math", "cudnn"):
        monkeypatch.setattr(switches, f"enable_{switch}_sdp", lambda on: pytest.fail("a switch was flipped"))
    tuning_cache = TuningCache()
    inputs = random_inputs(*SHAPES["self"], torch.float32, CPU)
    timed({}, tuning_cache).time_all(*SHAPES["self"], torch.float32, CPU)
    for backend in (TORCH, GEMM, *FUSED):
        Attention(tuning_cache).run(backend, *inputs)


def test_what_the_host_has_switched_off_is_not_used() -> None:
    tuning_cache, shapes = TuningCache(), SHAPES["self"]
    switches.enable_math_sdp(False)
    try:
        timed({MATH: 0.1}, tuning_cache).time_all(*shapes, torch.float32, CPU)
        assert MATH not in tuning_cache.get(choice_name(*shapes, torch.float32))["ms"] and not module.may_use(MATH)
    finally:
        switches.enable_math_sdp(True)
    assert module.may_use(MATH)


def timed(times: dict[str, float], tuning_cache: TuningCache | None = None) -> Attention:
    """An attention whose clock gives each implementation the time that it has here, 1.0 by default."""
    return Attention(tuning_cache or TuningCache(), lambda work: times.get(name_of(work), 1.0))


def name_of(work: Any) -> str:
    if work.func is gemm_attention:
        return GEMM
    return work.args[0] if work.func is module.alone else TORCH


@pytest.mark.parametrize("best", [MATH, GEMM, TORCH])
def test_the_fastest_that_runs_here_is_chosen(best: str) -> None:
    tuning_cache = TuningCache()
    # These three are a GPU's: they raise, however fast they claim to be.
    attention = timed({best: 0.5, CUDNN: 0.1, EFFICIENT: 0.1, FLASH: 0.1}, tuning_cache)
    assert attention.time_all(*SHAPES["self"], torch.float32, CPU) == best
    kept = tuning_cache.get(choice_name(*SHAPES["self"], torch.float32))
    assert kept["backend"] == best
    assert kept["ms"] == {name: 0.5 if name == best else 1.0 for name in (MATH, GEMM, TORCH)}
    assert attention.pick(*SHAPES["self"], torch.float32) == best


def test_wide_heads_are_gemms_and_torchs_whole_scores_are_never_tried() -> None:
    tuning_cache = TuningCache()
    attention = timed({}, tuning_cache)
    assert attention.pick(*SHAPES["VAE"], torch.bfloat16) == GEMM
    assert attention.time_all(*SHAPES["VAE"], torch.bfloat16, CPU) == GEMM
    assert set(tuning_cache.get(choice_name(*SHAPES["VAE"], torch.bfloat16))["ms"]) == {GEMM}


def test_math_is_not_tried_where_its_scores_are_large() -> None:
    tuning_cache, large = TuningCache(), (1, 8, 512, 8)
    timed({MATH: 0.1}, tuning_cache).time_all(large, large, torch.float32, CPU)
    assert MATH not in tuning_cache.get(choice_name(large, large, torch.float32))["ms"]


def raising() -> Tensor:
    raise RuntimeError("no such kernel here")


EXPECTED = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
WRONG: dict[str, Callable[[], Tensor]] = {
    "raises": raising, "is not finite": lambda: torch.where(EXPECTED > 2, math.nan, EXPECTED),
    "is infinite": lambda: torch.where(EXPECTED > 2, math.inf, EXPECTED), "is off": lambda: EXPECTED * 1.02,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_candidate_that_cannot_is_out(kind: str) -> None:
    works = {"flash": WRONG[kind], "math": lambda: EXPECTED}
    times = {works["flash"]: 0.1, works["math"]: 1.0}
    for dtype in (torch.float32, torch.float16):
        found = fastest(works, EXPECTED.to(dtype), times.__getitem__)
        assert found == {"backend": "math", "ms": {"math": 1.0}}
    assert fastest({"flash": WRONG[kind]}, EXPECTED, lambda work: 0.1) is None


@pytest.mark.parametrize(("torch_ms", "best"), [(1.0, "torch"), (1.02, "torch"), (1.1, "flash")])
def test_torchs_own_pick_is_left_alone_unless_another_is_clearly_faster(torch_ms: float, best: str) -> None:
    works = {"flash": lambda: EXPECTED, "torch": lambda: EXPECTED + 0}
    found = fastest(works, EXPECTED, lambda work: 1.0 if work is works["flash"] else torch_ms)
    assert found is not None and found["backend"] == best


def test_measuring_touches_no_random_numbers_and_needs_no_modes_of_its_thread() -> None:
    before, found = torch.get_rng_state(), []
    thread = threading.Thread(target=lambda: found.append(timed({}).time_all(*SHAPES["self"], torch.bfloat16, CPU)))
    thread.start()
    thread.join()
    assert found == [TORCH]
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_of_shapes() -> None:
    name = lambda queries, keys, width=64, dtype=torch.float16: choice_name(  # noqa: E731
        (2, 10, queries, width), (2, 10, keys, width), dtype
    )
    assert name(4096, 4096).startswith("attention, float16, width 64, 4096 queries, 4096 keys, ")
    assert name(4096, 4096) == name(3952, 3952) == name(2700, 2700) != name(2048, 2048)
    assert name(4096, 77) == name(4096, 154) == name(4096, 231) != name(4096, 308)
    assert len({name(4096, 4096), name(4096, 77), name(1024, 77), name(4096, 4096, 40),
                name(4096, 4096, dtype=torch.bfloat16)}) == 5
    assert choice_name((4, 10, 99, 64), (4, 10, 77, 64), torch.float16) == name(99, 77), "any batch"


class Watched:
    """torch_ops with an eye on the inputs of attention."""

    def __init__(self, watch: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        self._watch(query, key, value)
        return torch_ops.attention(query, key, value, upcast)


@pytest.mark.parametrize(("height", "width", "batch", "tokens"), [(8, 8, 2, 77), (9, 11, 1, 154), (15, 10, 3, 77)])
@pytest.mark.parametrize("kind", ["SD1", "SD2", "SDXL", "refiner", "SSD", "no middle", "ldm"])
def test_attention_shapes_are_those_of_the_forward(kind: str, height: int, width: int, batch: int, tokens: int) -> None:
    unet = shared_ldm_unet() if kind == "ldm" else shared_unet(kind)
    seen: dict[tuple[tuple[int, ...], ...], None] = {}

    def watch(query: Tensor, key: Tensor, value: Tensor) -> None:
        seen[tuple(query.shape), tuple(key.shape)] = None

    call = a_call(unet, height, width, batch, tokens)
    our_output(unet, call, Watched(watch))
    layout = read_layout(unet)
    assert FAMILIES.of(layout).attentions(layout, call) == list(seen)
