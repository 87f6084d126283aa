"""Bad weather on a real GPU: what fails is served by the next step of the ladder, and the entry says why."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl
from gpu_calls import arguments
from weather import entry_of, geglu_that, gpu_is_usable, now, use, while_capturing

from lib_onediff import compile_unet, status
from lib_onediff.bench.models import random_unet
from lib_onediff.core.table import State
from lib_onediff.devices.cuda import availability, requirements
from lib_onediff.devices.cuda.kernels import tokens as triton_tokens
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu


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


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, where no network's kernels are known to be there."""
    monkeypatch.setattr(runtime.devices.named("native"), "_compiled", set())
    monkeypatch.setattr(runtime.devices.named("native"), "_pending", set())
    monkeypatch.setattr(runtime.devices.named("native"), "_failed", {})


@pytest.mark.usefixtures("nothing_compiled")
def test_kernels_that_do_not_compile_at_all(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that_does_not_compile)
        use(unet, arguments(unet))
    assert now() == ("cudagraph", "graph")
    assert entry_of("native").state is State.FAILED and entry_of("native").reason == status()["reason"]
    other = compile_unet(random_unet("tiny-sd15", torch.device("cuda")).half())
    use(other, arguments(other))
    assert now() == ("native", "graph"), "another network lives on"


@pytest.mark.usefixtures("nothing_compiled")
def test_the_host_serves_while_kernels_are_compiled(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.by_card.fallback, "_waits_for_compile", lambda: False)
    runtime.devices.finish()
    for memory in ("_compiled", "_pending"):
        monkeypatch.setattr(runtime.devices.named("native"), memory, set())
    done = threading.Event()
    runtime.devices.named("native")._worker.submit(done.wait)
    given = arguments(unet)
    use(unet, given, 1)
    assert now()[1] == "host" and "kernels are being compiled" in status()["reason"]
    done.set()
    runtime.devices.finish()
    use(unet, given)
    assert now() == ("native", "graph")


def test_a_kernel_that_cannot_be_launched(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(tokens: Tensor, *tuning: int) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: out of resource: shared memory, Required: 300000")

    monkeypatch.setattr(triton_tokens, "geglu", too_much)
    use(unet, arguments(unet))
    assert now() == ("cudagraph", "graph") and "out of resource" in status()["reason"]


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


def test_an_old_gpu_is_served_by_the_next_backend(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.devices.named("native"), "_why_not", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    use(unet, arguments(unet))
    assert now() == ("cudagraph", "graph")
    assert "compute capability" in status()["reason"] and "6.1" in status()["reason"]


def test_without_triton_the_next_backend_says_what_to_install(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.devices.named("native"), "_why_not", {})
    monkeypatch.setattr(runtime.devices, "_hint", None)
    monkeypatch.setattr(availability, "triton_here", lambda: None)
    monkeypatch.setattr(requirements, "triton_here", lambda: None)
    use(unet, arguments(unet))
    assert now() == ("cudagraph", "graph") and "need Triton, which is not installed" in status()["reason"]
    assert "pip install" in status()["hint"] and "Until then PyTorch's own operators are used" in status()["hint"]


def test_where_native_and_cudagraph_fail_the_host_serves(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.devices.torch import operators as torch_ops

    def broken(tokens: Tensor, *tuning: int) -> Tensor:
        raise RuntimeError("no GEGLU today")

    monkeypatch.setattr(triton_tokens, "geglu", broken)
    monkeypatch.setattr(torch_ops, "geglu", broken)
    use(unet, arguments(unet), 2)
    assert now()[1] == "host" and "no GEGLU today" in status()["reason"]
