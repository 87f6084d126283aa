"""Failures and lack of memory on a real GPU: a slower route serves the call, and the status has the reason."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from gpu_calls import arguments, host, last_call
from torch import Tensor, nn

pytest.importorskip("diffusers")

from lib_onediff.bench.models import random_unet
from lib_onediff.devices.cuda.kernels import tokens as native_tokens
from lib_onediff.public import compile_unet
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
MIB = 2**20
CLOSE = 1e-2


@pytest.fixture
def unet() -> Iterator[nn.Module]:
    runtime.purge()
    yield compile_unet(random_unet("tiny-sdxl", torch.device("cuda")).half())
    runtime.purge()


@torch.no_grad()
def check_calls(unet: nn.Module, given: dict[str, Any], calls: int = 4) -> tuple[str, str]:
    """Make several calls, by default four, because a failed backend is tried twice, and compare each output with the
    host's. Returns the backend and the route of the last one."""
    for _ in range(calls):
        output = unet(**given, return_dict=False)[0]
        assert relative_error(output, host(unet, given)) < CLOSE, last_call()
    return last_call()["backend"], last_call()["route"]


def test_after_a_failed_capture_the_size_is_served_without_a_graph_and_other_sizes_with_one(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture fails because a kernel of ours synchronises the GPU, which CUDA forbids during a capture."""
    original = native_tokens.gated

    def gated(*given: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return original(*given)

    check_calls(unet, arguments(unet, 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(native_tokens, "gated", gated)
        assert check_calls(unet, arguments(unet)) == ("native", "plain")
    [entry] = [entry for entry in runtime.table.entries() if entry.key.resolution == "128x128"]
    assert last_call()["reason"] == entry.no_graph and entry.no_graph.startswith("the graph could not be captured: ")
    torch.cuda.synchronize()
    assert torch.randn(8, device="cuda").isfinite().all(), "random numbers work after a failed capture"
    assert check_calls(unet, arguments(unet, 64, 64), 2) == ("native", "graph"), "another size's graph is replayed"
    assert check_calls(unet, arguments(unet, 64, 128)) == ("native", "graph"), "a further size is captured"


def test_a_measurement_frees_memory_that_torch_keeps_unused_if_it_needs_it() -> None:
    """torch's allocator keeps 512 MiB unused, and may reserve no more. time_ms() captures work(), which needs 64 MiB,
    as a CUDA graph, whose memory pool cannot use kept memory until it is freed."""
    device = torch.device("cuda")

    def work() -> torch.Tensor:
        return torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")

    runtime.purge()
    kept = [torch.empty(64 * MIB, dtype=torch.uint8, device=device) for _ in range(8)]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    kept.clear()
    try:
        assert runtime.services.holdings.made.time_ms(device, torch.float16, work) >= 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_call_on_a_full_gpu_is_close_to_the_host_or_runs_out_of_memory_in_the_host(unet: nn.Module) -> None:
    """50, 150 and 400 MiB of GPU memory are left. A call that runs out of memory must do so in the host's forward,
    which would also fail without OneDiff. Once there is memory again, OneDiff serves as before."""
    small = arguments(unet)
    large = arguments(unet, 1024, 1024, 4)
    check_calls(unet, small)
    expected = host(unet, large)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    for spare in (50, 150, 400):
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare * MIB) / total)
        outputs = []
        try:
            for _ in range(3):
                try:
                    with torch.no_grad():
                        outputs.append(unet(**large, return_dict=False)[0])
                except torch.cuda.OutOfMemoryError:
                    # Then the model's own forward does not fit either.
                    assert last_call()["route"] == "host"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert all(relative_error(output, expected) < CLOSE for output in outputs)
        del outputs
        torch.cuda.empty_cache()
    check_calls(unet, small, 2)
    assert check_calls(unet, small, 1) == ("native", "graph")
