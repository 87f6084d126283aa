"""Failures and lack of memory on a real GPU: the next backend serves, and the entry has the reason."""
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
def use(unet: nn.Module, given: dict[str, Any], calls: int = 4) -> tuple[str, str]:
    """Make several calls, each of which must have the right output; a failed backend is tried twice. Returns who
    served."""
    for _ in range(calls):
        output = unet(**given, return_dict=False)[0]
        assert relative_error(output, host(unet, given)) < CLOSE, last_call()
    return last_call()["backend"], last_call()["route"]


def test_after_a_failed_capture_launches_and_later_captures_work(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = native_tokens.gated

    def gated(*given: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return original(*given)

    use(unet, arguments(unet, 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(native_tokens, "gated", gated)
        assert use(unet, arguments(unet)) == ("native", "plain")
    [entry] = [entry for entry in runtime.table.entries() if entry.key.resolution == "128x128"]
    assert last_call()["reason"] == entry.no_graph and entry.no_graph.startswith("the graph could not be captured: ")
    torch.cuda.synchronize()
    assert torch.randn(8, device="cuda").isfinite().all(), "random numbers work after a failed capture"
    assert use(unet, arguments(unet, 64, 64), 2) == ("native", "graph"), "another entry lives on"
    assert use(unet, arguments(unet, 64, 128)) == ("native", "graph"), "captures work again"


def test_memory_that_torch_keeps_unused_can_be_used_for_measurements() -> None:
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


def test_calls_on_a_full_card_are_right_or_out_of_memory_as_the_hosts(unet: nn.Module) -> None:
    small = arguments(unet)
    large = arguments(unet, 1024, 1024, 4)
    use(unet, small)
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
    use(unet, small, 2)
    assert use(unet, small, 1) == ("native", "graph")
