"""What the graphs hold of a real GPU: counted, kept within the budget, and given back."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from lib_onediff import status
from lib_onediff.accelerator import runtime
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.hosts.diffusers import attach
from lib_onediff.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MIB = 2**20
SIZES = [(512, 512), (768, 512), (960, 720)]


@pytest.fixture
def unet() -> Iterator[nn.Module]:
    runtime.purge()
    unet = random_unet("sd15", torch.device("cuda")).half()
    attach(unet)
    yield unet
    runtime.configure(Settings())
    runtime.release_all()
    runtime.purge()


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
    # The prompts' keys and values stay.
    assert torch.cuda.memory_reserved() - before < 64 * MIB
    assert runtime.rows() == []


def test_a_graph_that_does_not_fit_the_budget_is_not_kept(unet: nn.Module) -> None:
    runtime.configure(replace(runtime.settings, memory_budget=1))
    use(unet, 512, 512)
    assert status()["route"] == "plain"
    assert "'Graph memory in MiB' allows 1" in status()["reason"]
    runtime.configure(Settings())
    use(unet, 768, 512)
    assert status()["route"] == "graph"


def test_older_graphs_make_room_for_a_new_one(unet: nn.Module) -> None:
    use(unet, 960, 720)
    alone = sum(row.bytes for row in runtime.rows())
    runtime.configure(replace(runtime.settings, memory_budget=alone // MIB + 1))
    runtime.purge()
    for size in (*SIZES, *SIZES):
        use(unet, *size)
        assert status()["route"] == "graph", status()["reason"]
        assert sum(row.bytes for row in runtime.rows()) <= alone + MIB


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
