"""Bad weather on a real GPU: what fails or finds too little memory is served by the next step of the ladder, and the
entry says why."""
from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl
from gpu_calls import arguments, host
from weather import CLOSE, entry_of, geglu_that, gpu_is_usable, now, out_of_memory, use, while_capturing

from lib_onediff.bench.models import random_unet
from lib_onediff.core.table import State
from lib_onediff.devices.cuda.kernels import tokens as triton_tokens
from lib_onediff.public import compile_unet, status
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.purge()


@pytest.fixture
def unet() -> nn.Module:
    return compile_unet(random_unet("tiny-sdxl", torch.device("cuda")).half())


@triton.jit
def does_not_compile(tokens, BLOCK: tl.constexpr):
    tl.store(tokens + tl.arange(0, BLOCK), 0.0)  # BLOCK must be a power of two


def geglu_that_does_not_compile(tokens: Tensor, *tuning: int) -> Tensor:
    does_not_compile[(1,)](tokens, 48)
    return tokens


def test_a_kernel_that_does_not_compile_in_a_call(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    use(unet, arguments(unet, 64, 64))
    assert now() == ("native", "graph")
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that_does_not_compile)
        use(unet, arguments(unet))
    assert now() == ("cudagraph", "graph")
    native = entry_of("native")
    assert native.state is State.FAILED and native.reason.startswith("our forward failed: ")
    assert native.reason.endswith("(backend native)") and "\n" not in native.reason
    assert status()["reason"] == native.reason
    assert entry_of("native", "64x64").state is State.READY
    use(unet, arguments(unet, 64, 64), 2)
    assert now() == ("native", "graph"), "another entry lives on"
    use(unet, arguments(unet, 64, 128))
    assert now() == ("native", "graph"), "so does one that is made afterwards"


def test_a_capture_that_fails_leaves_plain_launches_and_a_usable_gpu(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(unet, arguments(unet, 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that(while_capturing(torch.cuda.synchronize)))
        use(unet, arguments(unet), 4)
    assert now() == ("native", "plain")
    assert status()["reason"] == entry_of("native").no_graph
    assert entry_of("native").no_graph.startswith("the graph could not be captured: ")
    assert gpu_is_usable(), "random numbers work after a failed capture"
    use(unet, arguments(unet, 64, 64), 2)
    assert now() == ("native", "graph"), "another entry lives on"
    use(unet, arguments(unet, 64, 128))
    assert now() == ("native", "graph"), "captures work again"


def test_out_of_memory_while_running(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(unet)
    use(unet, given)
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that(out_of_memory))
        other = arguments(unet, 64, 64)
        use(unet, other, 2)
        assert now()[1] == "host" and status()["reason"] == "out of GPU memory: the graphs were freed"
    assert all(entry.state is not State.FAILED for entry in runtime.table.entries())
    use(unet, other)
    assert now() == ("native", "graph")
    use(unet, given, 2)
    use(unet, given, 1)
    assert now() == ("native", "graph")


def test_a_card_that_is_really_full(unet: nn.Module) -> None:
    small, large = arguments(unet), arguments(unet, 1024, 1024, 4)
    use(unet, small)
    expected = host(unet, large)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    for spare in (50, 150, 400):
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare * MIB) / total)
        try:
            with torch.no_grad():
                outputs = []
                for _ in range(3):
                    try:
                        outputs.append(unet(**large, return_dict=False)[0])
                    except torch.cuda.OutOfMemoryError:
                        # Then the model's own forward does not fit either.
                        assert status()["route"] == "host"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert all(relative_error(output, expected) < CLOSE for output in outputs)
        del outputs
        torch.cuda.empty_cache()
    use(unet, small, 2)
    use(unet, small, 1)
    assert now() == ("native", "graph")
