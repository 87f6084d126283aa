"""Calls on two real GPUs: exactness, overlap, and what the second card follows. The second card is any other."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host, residual_shapes
from test_cudagraph import change_by_moving

from lib_onediff.bench.models import random_unet
from lib_onediff.public import compile_unet, status, uncompile_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [
    pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
SPLIT = "cuda:0 + cuda:1, 1+1 rows"
MIB = 2**20


@pytest.fixture(autouse=True)
def wait_for_compile() -> Iterator[None]:
    """Not for whole tests: calls that wait for kernels are found out anew each time."""
    yield
    runtime.release_all()
    torch.cuda.set_device(0)


def second() -> dict[str, Any]:
    return status()["second_gpu"]


@torch.no_grad()
def call(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return unet(**given, return_dict=False)[0]


def ready(unet: nn.Module, given: dict[str, Any], split: str = SPLIT, calls: int = 4) -> Tensor:
    """The output of a call that both cards replay."""
    with runtime.wait_for_compile():
        for _ in range(2):
            call(unet, given)
    for _ in range(calls):
        output = call(unet, given)
    assert second()["split"] == split, second()["reason"]
    assert status()["route"] == "graph", status()["reason"]
    return output


def test_all_rows_of_a_batch_come_back_in_their_places(tiny: nn.Module) -> None:
    """Also those of a ControlNet's residuals."""
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    shapes = residual_shapes(tiny, given)
    for strength in (0.5, 2.0):
        residuals = [strength * torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        controlled = {**given, "down_block_additional_residuals": tuple(residuals[:-1]),
                      "mid_block_additional_residual": residuals[-1]}
        output, expected = ready(tiny, controlled), host(tiny, controlled)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2))
    for batch, split in ((4, "cuda:0 + cuda:1, 2+2 rows"), (3, "cuda:0 + cuda:1, 2+1 rows")):
        given = arguments(tiny, batch=batch)
        output = ready(tiny, given, split)
        expected = host(tiny, given)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(batch))


def test_a_replay_waits_for_no_gpu_and_reads_each_call_s_inputs(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    calls = [{**given, "sample": torch.randn_like(given["sample"])} for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [call(tiny, one) for one in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second()["split"] == SPLIT and torch.cuda.current_device() == 0
    for output, one in zip(outputs, calls, strict=True):
        assert relative_error(output, host(tiny, one)) < 1e-2


def change_one_row(unet: nn.Module) -> None:
    """It counts no edit."""
    unet.mid_block.resnets[0].conv1.weight.data[3] *= 2


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict({name: value * 0.95 for name, value in unet.state_dict().items()})


CHANGES = change_one_row, change_in_place, change_by_loading, change_by_moving, change_in_place


def test_changed_weights_are_never_replayed_stale(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    for change in CHANGES:
        with torch.no_grad():
            change(tiny)
        for _ in range(3):
            output, expected = call(tiny, given), host(tiny, given)
            assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2)), change.__name__
        assert second()["split"] == SPLIT, second()["reason"]


def test_another_checkpoint_and_unloading_leave_nothing_on_the_second_card(tiny: nn.Module) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(1)

    other = random_unet("tiny-sd15", torch.device("cuda")).half()
    for unet in (tiny, other):
        compile_unet(unet, second_gpu="auto")
        given = arguments(unet)
        assert relative_error(ready(unet, given), host(unet, given)) < 1e-2
    weights = sum(parameter.nbytes for unet in (tiny, other) for parameter in unet.parameters())
    assert second()["bytes"] == weights and allocated() >= weights
    for unet in (tiny, other):
        uncompile_unet(unet)
    # What the matrix libraries keep for a stream stays.
    assert second()["bytes"] == 0 and allocated() < weights + 160 * MIB
    before = allocated()
    compile_unet(tiny, second_gpu="auto")
    ready(tiny, arguments(tiny))
    uncompile_unet(tiny)
    assert allocated() - before < MIB


def test_out_of_memory_on_the_second_card_leaves_one(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.two_gpus.cards, "room", lambda device: 2**50)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, 1)
    given = arguments(tiny)
    try:
        compile_unet(tiny, second_gpu="auto")
        for _ in range(3):
            output = call(tiny, given)
        assert "out of memory on cuda:1" in second()["reason"] and second()["bytes"] == 0
        assert relative_error(output, host(tiny, given)) < 1e-2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)
    compile_unet(tiny, second_gpu="1")
    ready(tiny, given)
