"""Self attention in INT8 on a real GPU: its error and its time beside the fastest exact one, and SDXL's step with it.

    .venv/bin/python -m pytest -m gpu tests/gpu/test_int8_attention_times.py -s
"""
from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

from gpu_calls import arguments, host

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.bench.models import random_unet
from lib_onediff.engines import WITHOUT_ATTENTION
from lib_onediff.ops.attention_tuning import random_inputs
from lib_onediff.ops.quantized.attention_gains import name_of
from lib_onediff.ops.quantized.int8_attention import attention
from lib_onediff.ops.quantized.support import why_no_int8
from lib_onediff.ops.triton.launch_config import LaunchConfig, int8_attention_kernel
from lib_onediff.options.settings import MOST_LOW_BIT_ERROR
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# SDXL at 1024x1024, SD 1.5 at 512x512 and at sides that are no power of two, wide heads.
SHAPES = {
    "sdxl outer": (2, 10, 4096, 64), "sdxl inner": (2, 20, 1024, 64), "sd15": (2, 8, 4096, 40),
    "sd15 inner": (2, 8, 1024, 80), "odd": (1, 8, 45 * 23, 40), "wide": (1, 8, 576, 160),
}
CUTS = [
    pytest.param(width, config, id=f"{width}, {config}") for width in (64, 160)
    for config in int8_attention_kernel(width).candidates
]
INT8_ERROR = 2e-2


@pytest.fixture(autouse=True)
def needs_int8() -> None:
    lack = why_no_int8(GPU, torch.float16)
    if lack:
        pytest.skip(lack)


@pytest.mark.parametrize(("width", "config"), CUTS)
def test_every_cut_gives_the_same(width: int, config: LaunchConfig) -> None:
    inputs = random_inputs((2, 3, 700, width), (2, 3, 700, width), torch.float16, GPU)
    expected = torch.nn.functional.scaled_dot_product_attention(*(tensor.float() for tensor in inputs))
    try:
        output = attention(*inputs, config)
    except Exception as error:
        if config == int8_attention_kernel(width).candidates[0]:
            raise
        pytest.skip(f"this GPU cannot: {str(error).splitlines()[0]}")
    assert relative_error(output, expected) < INT8_ERROR
    assert torch.equal(attention(*inputs, config), output), "the same bits each time"


def test_keys_with_an_offset_a_thousand_times_as_large() -> None:
    query, key, value = random_inputs(SHAPES["sdxl inner"], SHAPES["sdxl inner"], torch.float16, GPU)
    key.add_(1000 * torch.randn(1, 20, 1, 64, device=GPU).half())
    wide = query.double(), key.double(), value.double()
    expected = torch.softmax(wide[0] @ wide[1].mT / 8, -1) @ wide[2]
    error = relative_error(attention(query, key, value, int8_attention_kernel(64).candidates[0]), expected)
    print(f"\nkeys with an offset of a thousand: error {error:.1e}")
    assert error < INT8_ERROR


@pytest.fixture
def pretended() -> Iterator[None]:
    """SDXL's attentions gain by int8; how they are cut is measured."""
    low_bit, cache, found = runtime.operators.low_bit, runtime.tuning_cache, {}
    time_ms = partial(runtime._graphs.time_ms, GPU, torch.float16)
    for shape in (SHAPES["sdxl outer"], SHAPES["sdxl inner"]):
        low_bit.measure_attention(shape, torch.float16, GPU, time_ms)
        name = name_of(shape, torch.float16)
        found[name] = cache.get(name)
        cache.set(name, [2.0, 1.0])
    low_bit.attention.forget()
    yield
    for name, times in found.items():
        cache.set(name, times)
    low_bit.attention.forget()


def test_sdxls_step_with_it(fresh_runtime: None, pretended: None) -> None:
    """Whether it gains or not."""
    unet = random_unet("sdxl", GPU).half()
    given = arguments(unet, 1024, 1024)
    expected = host(unet.float(), widened(given))
    unet.half()
    print(f"\n{torch.cuda.get_device_name()}, SDXL 1024x1024")
    for low_bit, attends in (("off", False), ("int8", False), ("int8", True)):
        compile_unet(unet, low_bit=low_bit, low_bit_attention=attends, low_bit_budget=MOST_LOW_BIT_ERROR)
        times = [timed_step(unet, given) for _ in range(14)][4:]
        backend, error = status()["backend"], relative_error(step(unet, given), expected)
        assert status()["route"] == "graph" and (backend in WITHOUT_ATTENTION) is attends, status()["reason"]
        print(f"{backend}: {statistics.median(times):.2f} ms a step, error against float32 {error:.2e}")
        assert error < MOST_LOW_BIT_ERROR
    uncompile_unet(unet)


@torch.no_grad()
def step(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return unet(**given, return_dict=False)[0]


def timed_step(unet: nn.Module, given: dict[str, Any]) -> float:
    """In milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(unet, given)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def widened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: widened(one) for name, one in value.items()}
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
