"""What the graphs hold of a real GPU: counted, kept within the budget, and given back."""
from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from lib_onediff import status
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.devices.cuda.graphs.allocations import peak
from lib_onediff.devices.cuda.graphs.device_memory import empty_cache
from lib_onediff.hosts.diffusers.unet import attach
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
MIB = 2**20
SIZES = [(512, 512), (768, 512), (960, 720)]


def use(unet: nn.Module, width: int, height: int, calls: int = 3) -> None:
    given = inputs(unet, width, height, 2, 77, torch.float16)
    with torch.no_grad():
        for _ in range(calls):
            unet(**given)


def test_rows_say_what_the_graphs_hold_and_purging_gives_it_back(unet: nn.Module) -> None:
    use(unet, 64, 64)
    runtime.purge()
    gc.collect()
    before = torch.cuda.memory_reserved()
    for size in SIZES:
        use(unet, *size)
    rows = {row.resolution: row for row in runtime.rows()}
    assert {row.state for row in rows.values()} == {"ready"}
    held = sum(row.bytes for row in rows.values())
    assert held > 0
    freed = runtime.purge()
    assert freed >= 0.9 * held
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 4 * MIB
    assert runtime.rows() == []


def test_a_graph_that_does_not_fit_the_budget_is_not_kept(unet: nn.Module) -> None:
    runtime.configure(replace(runtime.settings, memory_budget=1))
    use(unet, 512, 512)
    assert status()["route"] == "plain"
    assert "'Graph memory in MiB' allows 1" in status()["reason"]
    runtime.configure(Settings())
    use(unet, 768, 512)
    assert status()["route"] == "graph"


def test_a_graph_goes_with_its_unet(unet: nn.Module) -> None:
    other = random_unet("sd15", torch.device("cuda")).half()
    attach(other)
    use(other, 512, 768)
    assert {row.resolution: row.state for row in runtime.rows()} == {"512x768": "ready"}
    allocated = torch.cuda.memory_allocated()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in other.parameters())
    del other
    gc.collect()
    assert allocated - torch.cuda.memory_allocated() >= weights
    assert {row.resolution: (row.state, row.bytes) for row in runtime.rows()} == {"512x768": ("proved", 0)}


def test_what_a_call_needs_is_measured_without_touching_torchs_peak(unet: nn.Module) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    given = inputs(unet, 512, 512, 2, 77, torch.float16)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return type(unet).forward(unet, **given, return_dict=False)[0]

    call()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    expected = torch.cuda.max_memory_allocated() - before
    larger = torch.empty(4 * expected, dtype=torch.uint8, device=device)
    del larger
    shown = torch.cuda.max_memory_allocated()
    _, measured = peak(device, call)
    assert abs(measured - expected) <= 0.02 * expected + 2 * MIB
    assert torch.cuda.max_memory_allocated() == shown, "A1111 shows it below every image"
    assert not torch._C._cuda_isHistoryEnabled()


def test_what_a_call_needs_while_somebody_else_records(unet: nn.Module) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.memory._record_memory_history(context=None)
    try:
        _, measured = peak(device, lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=device))
        assert measured >= 64 * MIB and torch._C._cuda_isHistoryEnabled(), "theirs goes on"
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_our_memory_is_not_given_back_while_somebody_captures(unet: nn.Module) -> None:
    """Another extension's capture in another thread goes on, and so does OneDiff."""
    use(unet, 512, 512)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    begun, may_end, errors = threading.Event(), threading.Event(), []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                begun.set()
                assert may_end.wait(60)
                torch.zeros(8, device="cuda").add_(1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(60)
    empty_cache()
    may_end.set()
    thread.join(60)
    assert not errors and runtime.purge() > 0
