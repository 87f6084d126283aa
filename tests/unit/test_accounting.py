"""Holdings: the memory that CUDA graphs may take, the memory left for others, and the memory that dropping some graphs
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
    """Graphs that need this many bytes each. The index of a graph is also the key of its shape."""
    return [HeldGraph(place, size, 0) for place, size in enumerate(needs)]  # type: ignore[arg-type]


def gone(*places: int) -> Any:
    """The shapes whose graphs are dropped, by index."""
    return set(places)


def test_dropping_graphs_frees_memory_down_to_the_largest_graph_that_stays() -> None:
    """Graphs share one pool, as large as the largest of them needs. shrinks() is the number of bytes that dropping the
    given graphs frees: 0 if that would be fewer than LEAST_GAIN bytes or LEAST_SHARE of the pool, and the whole pool if
    no graph stays."""
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
    """A pretended GPU. In MiB: 1000 in all, 700 free, 200 kept free for others, and 60 that torch has reserved and does
    not use, 50 of them for graphs."""

    def total(self, device: Any = None) -> int:
        return 1000 * MEBIBYTE

    def free(self, device: Any) -> int:
        return 700 * MEBIBYTE

    def unused(self, device: Any) -> int:
        return 60 * MEBIBYTE

    def spare(self, device: Any) -> int:
        return 200 * MEBIBYTE


def holdings(card: Any = None, applied: int = 0) -> Any:
    """The holdings on this card, with graphs of 50 MiB. applied: bytes of weights that OneDiff keeps cast or with
    LoRAs."""
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
def test_the_budget_is_limited_to_the_gpu_memory_and_is_a_quarter_of_it_by_default(budget: int, allowed: int) -> None:
    """budget: the option memory_budget in MiB; 0: the default. allowed: what graphs may take, in MiB. The pretended
    Card has 1000 MiB."""
    assert holdings().allowed(budget, CUDA) == allowed * MEBIBYTE


def test_without_a_gpu_graphs_are_allowed_no_memory() -> None:
    """This holds for the default budget (0) and for one of 100 MiB."""
    card = SimpleNamespace(total=lambda device=None: 0)
    assert holdings(card).allowed(0) == 0 and holdings(card).allowed(100) == 0


@pytest.mark.parametrize(("budget", "room"), [
    # 50 MiB are in use.
    (100, 50), (50, 0), (40, -10), (0, 200),
    # 700 free, and 10 unused outside of the graphs' pools; 200 are left for others.
    (5000, 510), (561, 511 - 1), (560, 510), (559, 509),
])
def test_the_memory_left_for_graphs_is_limited_by_the_budget_and_by_the_free_gpu_memory(budget: int, room: int) -> None:
    """room: what Holdings.room() returns, in MiB; negative: so much must be freed. budget: the option in MiB; 0: the
    default. Card is the pretended GPU."""
    assert holdings().room(budget, CUDA) == room * MEBIBYTE


def test_without_a_gpu_the_budget_limits_only_the_weights_that_onediff_keeps_changed() -> None:
    """OneDiff keeps 7 bytes of weights here, cast or with LoRAs. A budget of 0 means no limit then."""
    assert holdings(applied=7).room(0, CPU) == UNLIMITED
    assert holdings(applied=7).room(3, CPU) == 3 * MEBIBYTE - 7
