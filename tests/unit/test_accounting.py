"""Holdings: the memory that graphs may take, the memory left for others, and the memory that dropping some graphs
frees."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_onediff.core.device_memory import UNLIMITED
from lib_onediff.core.table import ShapeTable
from lib_onediff.core.units import MEBIBYTE
from lib_onediff.runtime.graphs import accounting
from lib_onediff.runtime.graphs.accounting import (
    LEAST_GAIN,
    LEAST_SHARE,
    PAGE,
    HeldGraph,
    SharedMemory,
    memory_of,
)

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


def graphs(*needs: int) -> list[Any]:
    """Graphs of shapes that are named by their indices."""
    return [HeldGraph(place, size, 0) for place, size in enumerate(needs)]  # type: ignore[arg-type]


def gone(*places: int) -> Any:
    return set(places)


def test_dropping_graphs_frees_memory_down_to_the_largest_graph_that_stays() -> None:
    """Graphs share one memory, which is as large as the largest of them needs. It is made anew only if that gains
    LEAST_GAIN bytes and LEAST_SHARE of it; shrinks() is 0 where it stays, and the whole size where no graph stays."""
    small = 8 * PAGE
    rest = memory_of(small)
    assert SharedMemory(1000, graphs(small, small)).shrinks(gone(0, 1)) == 1000, "nothing stays in it"
    assert SharedMemory(rest + LEAST_GAIN, graphs(small, 5 * small)).shrinks(gone(1)) == LEAST_GAIN
    assert SharedMemory(rest + LEAST_GAIN - 1, graphs(small, 5 * small)).shrinks(gone(1)) == 0
    # The largest remaining graph decides, at any index.
    for needs in ((small, PAGE, 99 * small), (PAGE, small, 99 * small)):
        assert SharedMemory(rest + 2 * LEAST_GAIN, graphs(*needs)).shrinks(gone(2)) == 2 * LEAST_GAIN
    # Of a large pool, at least 1/16 must be gained.
    size = 160 * LEAST_GAIN
    worth = int(LEAST_SHARE * size)
    needs = size - worth - memory_of(0)
    assert worth > LEAST_GAIN and memory_of(needs) == size - worth
    assert SharedMemory(size, graphs(needs, size)).shrinks(gone(1)) == worth
    assert SharedMemory(size, graphs(needs + PAGE, size)).shrinks(gone(1)) == 0


class Card:
    """A card of 1000 MiB: 700 are free, and torch has reserved 60 that are unused, 50 of them for the graphs."""

    def total(self, device: Any = None) -> int:
        return 1000 * MEBIBYTE

    def free(self, device: Any) -> int:
        return 700 * MEBIBYTE

    def unused(self, device: Any) -> int:
        return 60 * MEBIBYTE

    def spare(self, device: Any) -> int:
        return 200 * MEBIBYTE


def holdings(card: Any = None, applied: int = 0) -> Any:
    bound = SimpleNamespace(bytes=applied, binding=SimpleNamespace(device=CPU), runners={})
    network: Any = {1: SimpleNamespace(bound=bound, runners={})}
    kind = next(
        kind for kind in vars(accounting).values() if isinstance(kind, type) and hasattr(kind, "allowed")
    )
    made: Any = kind(ShapeTable(), network, lambda: (), lambda *given: None)
    made.made = SimpleNamespace(bytes=lambda device, *given: 50 * MEBIBYTE, devices=lambda: [CUDA])
    made.card = card or Card()
    return made


@pytest.mark.parametrize(("budget", "allowed"), [(0, 250), (100, 100), (999, 999), (1000, 1000), (5000, 1000)])
def test_a_budget_is_limited_to_the_gpus_memory_and_a_quarter_of_it_by_default(budget: int, allowed: int) -> None:
    """budget: the option in MiB; 0 is the default. The pretended Card has 1000 MiB."""
    assert holdings().allowed(budget, CUDA) == allowed * MEBIBYTE


def test_without_a_gpu_no_graph_is_allowed() -> None:
    card = SimpleNamespace(total=lambda device=None: 0)
    assert holdings(card).allowed(0) == 0 and holdings(card).allowed(100) == 0


@pytest.mark.parametrize(("budget", "room"), [
    # 50 MiB are in use.
    (100, 50), (50, 0), (40, -10), (0, 200),
    # 700 free, and 10 unused outside of the graphs' pools; 200 are left for others.
    (5000, 510), (561, 511 - 1), (560, 510), (559, 509),
])
def test_room_for_graphs_is_what_the_budget_and_the_gpu_leave(budget: int, room: int) -> None:
    """In MiB; negative: so much must be freed."""
    assert holdings().room(budget, CUDA) == room * MEBIBYTE


def test_without_a_gpu_a_budget_limits_the_bytes_of_changed_weights_alone() -> None:
    """7 bytes are weights that we keep cast or with LoRAs. A budget of 0 means no limit then."""
    assert holdings(applied=7).room(0, CPU) == UNLIMITED
    assert holdings(applied=7).room(3, CPU) == 3 * MEBIBYTE - 7
