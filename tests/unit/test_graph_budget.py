"""The memory of CUDA graphs: it stays within the budget, is freed by purges as their rows show, and is given back with
an unloaded UNet."""
from __future__ import annotations

import gc
import random
import re

import pytest
from builders import SMALL_XL, a_call
from graph_builders import MEBIBYTE, PretendedGraphs
from grid import WHOLE
from ladder_builders import attached, error, make_ready, reason, served_by, states
from torch import nn

from lib_onediff.core.settings import Settings
from lib_onediff.core.table import Entry, State
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.runtime.graphs.accounting import LEAST_GAIN, SMALL_THINGS, PoolKey, memory_of
from lib_onediff.runtime.graphs.cache import PINNED_TAKE_IT
from lib_onediff.runtime.rows import ResolutionRow
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
# In latent pixels, the smallest first.
SMALL = (8, 8)
MIDDLE = (12, 12)
LARGE = (16, 16)


def set_budget(mebibytes: int) -> None:
    """Set the option Graph memory."""
    runtime.configure(Settings(memory_budget=mebibytes))


def bytes_held() -> int:
    """The memory of all graphs."""
    return runtime.totals().vram


def row(resolution: str) -> ResolutionRow:
    [found] = [row for row in runtime.rows() if row.resolution == resolution]
    return found


def entry(resolution: str) -> Entry:
    [found] = [entry for entry in runtime.table.entries() if entry.key.resolution == resolution]
    return found


def test_a_row_shows_the_memory_that_its_purge_frees(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """All graphs share one memory pool, whose size the largest one decides. After a purge of the largest, the others
    are captured again in a smaller pool. The memory held then has shrunk by what the row showed, within 10 %."""
    make_ready(unet, LARGE, SMALL, MIDDLE)
    for resolution in ("128x128", "96x96"):
        said = row(resolution).bytes
        before = bytes_held()
        rest = set(states()) - {resolution}
        assert runtime.purge([resolution]) >= said > LEAST_GAIN
        assert set(states()) == rest
        for size in {"96x96": (SMALL,), "128x128": (MIDDLE, SMALL)}[resolution]:
            make_ready_again(unet, size)
        assert abs(before - bytes_held() - said) <= 0.1 * said
    assert row("64x64").bytes == bytes_held()
    assert runtime.purge(["64x64"]) > 0
    assert bytes_held() == 0 and not pretended.devices()


def test_graphs_of_many_sizes_stay_within_the_budget(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """The budget is the memory of the largest graph and 2 MiB. During a capture, the memory held may exceed it by one
    graph."""
    make_ready(unet, LARGE)
    largest = entry("128x128").needs
    runtime.purge()
    pretended.most = 0
    allowed = memory_of(largest) + 2 * MEBIBYTE
    set_budget(-(-allowed // MEBIBYTE))
    widths = (8, 10, 12, 14, 15, 16) if WHOLE else (8, 12, 15)
    sizes = [(height, width) for height in range(8, 17, 2) for width in widths]
    random.Random(3).shuffle(sizes)
    for size in sizes:
        make_ready(unet, size)
        assert bytes_held() <= allowed + MEBIBYTE
    assert pretended.most <= allowed + largest, "never over it by more than one graph"
    assert sum(state == "ready" for state in states().values()) > 3
    for size in sizes[::5]:
        assert error(unet, a_call(unet, *size)) < CLOSE


def test_a_pinned_graph_is_not_dropped_for_another_model(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """The budget is large enough for the pinned graph only. The other model is computed without a graph, and the reason
    is that pinned sizes take the budget."""
    make_ready(unet, SMALL)
    assert runtime.pin("64x64", row("64x64").model, True) and row("64x64").pinned
    assert not runtime.pin("8x8", row("64x64").model, True), "there is no such row"
    set_budget(bytes_held() // MEBIBYTE + SMALL_THINGS // MEBIBYTE)
    other = attached()
    for _ in range(4):
        assert error(other, a_call(other)) < CLOSE
    assert served_by() == ("native", "plain") and PINNED_TAKE_IT in reason()
    assert states()["64x64"] == "ready"


def test_a_graph_larger_than_the_budget_is_never_captured(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """The reason names the option and its value."""
    set_budget(1)
    for _ in range(4):
        assert error(unet, a_call(unet)) < CLOSE
        assert served_by() == ("native", "plain")
    assert "'Graph memory in MiB' allows 1" in reason() and reason() == entry("64x64").no_graph
    assert pretended.captured == [] and runtime.totals().budget == MEBIBYTE


def test_the_reason_names_all_memory_of_onediff_if_that_exceeds_the_budget(
    unet: nn.Module, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph alone fits, but not beside copies of weights (64 MiB here), which count too."""
    held = runtime.services.holdings
    monkeypatch.setattr(held, "applied_bytes", lambda device: 64 * MEBIBYTE if pretended.captured else 0)
    set_budget(128)
    for _ in range(4):
        error(unet, a_call(unet))
    assert pretended.captured and entry("64x64").needs < 128 * MEBIBYTE
    needed = re.search(r"OneDiff needs (\d+) MiB, but the setting 'Graph memory in MiB' allows 128", reason())
    assert needed is not None and int(needed[1]) > 128


def test_when_the_budget_is_full_graphs_of_other_architectures_are_dropped_first(
    unet: nn.Module, pretended: PretendedGraphs
) -> None:
    """A third graph exceeds the budget. That of the other architecture is dropped and has the state "proved": it has
    passed its comparison with the host, and has no graph."""
    other = attached()
    make_ready(other, MIDDLE)
    make_ready(unet, SMALL)
    assert set(states().values()) == {"ready"}, "there is room for both"
    graphs = runtime.services.holdings
    budget = max(graphs.held_by(PoolKey.of(entry(name).key)) for name in ("64x64", "96x96")) + 4 * MEBIBYTE
    set_budget(budget // MEBIBYTE)
    make_ready(unet, (8, 10))
    assert states() == {"80x64": "ready", "64x64": "ready", "96x96": "proved"}
    assert bytes_held() <= budget
    make_ready(other, SMALL)
    assert served_by()[1] == "graph" and row("96x96").state == "proved"


def make_ready_again(unet: nn.Module, size: tuple[int, int] = SMALL) -> None:
    for route in ("plain", "graph"):
        assert error(unet, a_call(unet, *size)) < CLOSE
        assert served_by() == ("native", route), reason()


def test_an_unloaded_unet_gives_its_memory_back(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """Two UNets of one architecture share a row. The first is detached, the second is garbage-collected. Each frees its
    part of the memory; after both, nothing is held, and the row has no graph."""
    other = attached(**SMALL_XL)
    make_ready(unet, SMALL)
    make_ready_elsewhere(other)
    both = bytes_held()
    diffusers_host.detach(unet)
    assert states() == {"64x64": "ready"}, "the other has it still"
    assert bytes_held() < both
    emptied = pretended.card.emptied
    del other
    gc.collect()
    assert runtime.rows()[0].state == "proved" and runtime.rows()[0].bytes == 0
    assert bytes_held() == 0 and not pretended.devices() and pretended.card.emptied > emptied
    assert runtime.rows()[0].needs, "what it will need is known"


def make_ready_elsewhere(unet: nn.Module) -> None:
    """Call another checkpoint of the same architecture until it has a graph. It needs no second check of the size."""
    assert error(unet, a_call(unet)) < CLOSE
    assert entry("64x64").state is State.READY
    assert error(unet, a_call(unet)) < CLOSE
    assert served_by() == ("native", "graph")


def test_releasing_memory_drops_graphs_and_keeps_the_checks_of_their_sizes(unet: nn.Module) -> None:
    """State "proved": the next call needs no comparison with the host before its graph is captured."""
    make_ready(unet, LARGE, SMALL)
    before = runtime.services.holdings.shared()
    assert runtime.release_memory() == before and bytes_held() == 0
    assert set(states().values()) == {"proved"} and {row.bytes for row in runtime.rows()} == {0}
    make_ready_again(unet)


def test_a_lowered_budget_applies_from_the_next_sampling_on(unet: nn.Module, pretended: PretendedGraphs) -> None:
    """At the beginning of that sampling, graphs are dropped; those that fit the budget are captured again."""
    make_ready(unet, LARGE, SMALL, MIDDLE)
    set_budget(memory_of(entry("96x96").needs) // MEBIBYTE + 4)
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"proved"} and bytes_held() == 0
    make_ready_again(unet, MIDDLE)
    make_ready_again(unet)
    assert 0 < bytes_held() <= runtime.totals().budget
    set_budget(1)
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"proved"} and runtime.totals().vram == 0
