"""Counts the GPU memory of all graphs.

The graphs of one architecture share one memory pool and overlap in it, so the pool is as large as its largest graph. It
shrinks only if it is freed and the remaining graphs are captured again.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ...core.device import GraphMaker, Runner
from ...core.device_memory import UNLIMITED, Card
from ...core.key import ShapeKey
from ...core.table import Entry, ShapeTable
from ...core.units import MEBIBYTE
from ...core.weak_dictionary import WeakDictionary
from ..network import Network

# The size of the pages in which torch maps device memory.
PAGE = 2 * MEBIBYTE
# Room for the graphs' outputs and other small tensors: at most 6 MiB were in use with a graph of SDXL.
SMALL_THINGS = 4 * PAGE
# Fragmentation: the gaps between a forward's tensors, relative to its peak of used bytes. In a pool of one contiguous
# piece they are 1/12 for SDXL and 1/8 for SD1.5, at every size; in a pool of many pieces they are larger.
GAPS_IN_ONE_PIECE = 1 / 7
GAPS_IN_MANY = 2 / 5
# A pool is shrunk only if that gains this many bytes and this part of it, because its other graphs must be captured
# again.
LEAST_GAIN = 16 * MEBIBYTE
LEAST_SHARE = 1 / 16
# By default, graphs may take 1 / SHARE_OF_THE_CARD of the GPU memory.
SHARE_OF_THE_CARD = 4
# Every pinned (model, resolution).
GetPins = Callable[[], Collection[tuple[str, str]]]


def pages(size: float) -> int:
    """The size in bytes, rounded up to whole pages."""
    return -int(-size // PAGE) * PAGE


def needs_of(peak: int, in_one_piece: bool = True) -> int:
    """Bytes that a graph takes of a memory pool. peak: the peak of the bytes that its forward uses. in_one_piece:
    whether the pool is contiguous, so that gaps are smaller."""
    return pages(peak * (1 + (GAPS_IN_ONE_PIECE if in_one_piece else GAPS_IN_MANY)))


def memory_of(needs: int) -> int:
    """Bytes of a new memory pool whose largest graph needs this many."""
    return pages(needs) + SMALL_THINGS


def fits(size: int, allowed: int) -> bool:
    """Whether size is at most allowed; allowed = 0 means no limit."""
    return not allowed or size <= allowed


def too_large(needed: int, allowed: int) -> str:
    """Why a graph cannot be made within the budget, in one line for the user."""
    return (
        f"its graph needs {-(-needed // MEBIBYTE)} MiB, and the setting 'Graph memory in MiB' allows "
        f"{allowed // MEBIBYTE}"
    )


class HeldGraph(NamedTuple):
    """The memory of one graph.

    needs: bytes of the shared pool.
    own_bytes: bytes of this graph alone.
    """

    key: ShapeKey
    needs: int
    own_bytes: int


class SharedMemory:
    """A memory pool in which graphs overlap, and its size in bytes, which is that of its largest graph. by_need: the
    graphs, the largest first."""

    def __init__(self, size: int, graphs: Iterable[HeldGraph]) -> None:
        self.size = size
        self.by_need = sorted(graphs, key=lambda graph: -graph.needs)

    def shrinks(self, keys: Collection[ShapeKey]) -> int:
        """Bytes by which the pool shrinks if the graphs with these keys are dropped; 0 if that gains too little
        (LEAST_GAIN, LEAST_SHARE), and the pool stays."""
        needs = next((graph.needs for graph in self.by_need if graph.key not in keys), None)
        if needs is None:
            return self.size
        gain = self.size - memory_of(needs)
        return gain if gain >= max(LEAST_GAIN, LEAST_SHARE * self.size) else 0


class MemorySnapshot:
    """The memory of all graphs at one moment. It keeps no graph alive."""

    def __init__(self, vram: int = 0, memories: Iterable[SharedMemory] = ()) -> None:
        """vram: bytes of all graphs together. memories: the pools."""
        self.vram = vram
        # An index by key, because a page calls gives_back() for each of thousands of shapes.
        self._where: dict[ShapeKey, list[tuple[SharedMemory, HeldGraph]]] = {}
        for memory in memories:
            for graph in memory.by_need:
                self._where.setdefault(graph.key, []).append((memory, graph))

    def gives_back(self, keys: Collection[ShapeKey]) -> int:
        """Bytes of GPU memory that are freed if the graphs of these shapes are dropped."""
        graphs = [one for key in keys for one in self._where.get(key, ())]
        return sum(graph.own_bytes for _, graph in graphs) + sum(one.shrinks(keys) for one in memories_of(graphs))

    def beside(self, keys: Collection[ShapeKey]) -> set[ShapeKey]:
        """The shapes of all graphs in those pools that shrink if the graphs of these shapes are dropped. A pool shrinks
        only if all of its graphs are dropped; the others are captured again later."""
        graphs = [one for key in keys for one in self._where.get(key, ())]
        return {graph.key for one in memories_of(graphs) if one.shrinks(keys) for graph in one.by_need}


def memories_of(graphs: Iterable[tuple[SharedMemory, HeldGraph]]) -> list[SharedMemory]:
    """The memory pools of these graphs, each once."""
    return list({id(memory): memory for memory, _ in graphs}.values())


class GraphRecord(NamedTuple):
    """A graph, with its entry."""

    key: ShapeKey
    entry: Entry
    runner: Runner


class PoolKey(NamedTuple):
    """Identifies a memory pool: the graphs of one architecture on one device share it. architecture: None stands for
    work that belongs to no graph, such as a decode."""

    device: torch.device
    architecture: str | None

    @classmethod
    def of(cls, key: ShapeKey) -> PoolKey:
        """The pool of a shape's graph."""
        return cls(key.device, key.architecture)


class Holdings:
    """Lists all graphs of all networks, and counts the GPU memory of OneDiff.

    Callers hold the runtime's lock, because a reference to a graph keeps the memory of its whole pool alive.

    made: the GraphMaker, which owns the memory pools.
    card: reads the GPUs' memory.
    """

    def __init__(
        self, table: ShapeTable, networks: WeakDictionary[nn.Module, Network], pins: GetPins, made: GraphMaker
    ) -> None:
        """table, networks: see Services. pins: returns the resolutions that the user has pinned."""
        self._table = table
        self._networks = networks
        self._pins = pins
        self.made = made
        self.card = Card()

    def allowed(self, budget: int, device: torch.device | None = None) -> int:
        """Bytes that all graphs of a device may take. budget: in MiB; 0 for the default. Returns 0 without a GPU.
        device: by default torch's current one."""
        total = self.card.total(device)
        return min(budget * MEBIBYTE or total // SHARE_OF_THE_CARD, total)

    def shared(self) -> int:
        """Bytes of the memory pools on all devices."""
        return sum(map(self.made.bytes, self.made.devices()))

    def held(self, device: torch.device) -> int:
        """Bytes that OneDiff takes on a device: its graphs, and applied_bytes()."""
        own = sum(held.runner.own_bytes for held in self.graphs() if held.key.device == device)
        return self.made.bytes(device) + own + self.applied_bytes(device)

    def applied_bytes(self, device: torch.device) -> int:
        """Bytes on a device for copies of weights: results of functions that hosts apply to their weights, and buffers
        that streamed weights are copied to."""
        bounds = (network.bound for network in self._networks.values() if network.bound.bytes)
        return sum(bound.bytes for bound in bounds if bound.binding.device == device)

    def room(self, budget: int, device: torch.device) -> int:
        """Bytes that OneDiff may still take on a device. budget: in MiB; 0 for the default, which is no limit without a
        GPU."""
        if device.type != "cuda":
            return budget * MEBIBYTE - self.applied_bytes(device) if budget else UNLIMITED
        return min(self.allowed(budget, device) - self.held(device), self.left(device) - self.card.spare(device))

    def held_by(self, pool: PoolKey) -> int:
        """Bytes of one pool, and those that each of its graphs takes outside of the pool."""
        if pool.architecture is None:
            return 0
        own = sum(held.runner.own_bytes for held in self.graphs() if PoolKey.of(held.key) == pool)
        return self.made.bytes(*pool) + own

    def left(self, device: torch.device) -> int:
        """Bytes of a card that any code in this process can allocate: free ones, and those that torch has reserved and
        does not use outside of the graphs' pools."""
        return self.card.free(device) + max(0, self.card.unused(device) - self.made.bytes(device))

    def keys(self) -> set[ShapeKey]:
        """The shapes that have a graph."""
        return set().union(*(network.runners for network in self._networks.values()))

    def pinned(self) -> set[ShapeKey]:
        """The shapes with a graph whose resolution the user has pinned."""
        pins = self._pins()
        return {held.key for held in self.graphs() if (held.entry.model, held.key.resolution) in pins}

    def memory(self) -> MemorySnapshot:
        """A snapshot, to compute how many bytes dropping some graphs would free."""
        memories: dict[int, tuple[int, list[HeldGraph]]] = {}
        for held in self.graphs():
            _, graphs = memories.setdefault(id(held.runner.memory), (held.runner.memory.bytes, []))
            graphs.append(HeldGraph(held.key, held.entry.needs, held.runner.own_bytes))
        shared = [SharedMemory(size, graphs) for size, graphs in memories.values()]
        return MemorySnapshot(sum(map(self.held, self.made.devices())), shared)

    def graphs(self) -> list[GraphRecord]:
        """All graphs. Do not keep the result, which keeps them alive."""
        entries = self._table.by_key()
        return [
            GraphRecord(key, entries[key], kept.runner)
            # A copy, because pages call this while another thread makes graphs.
            for network in self._networks.values() for key, kept in network.runners.copy().items() if key in entries
        ]

    def others(self, pool: PoolKey) -> list[set[ShapeKey]]:
        """The keys of each other pool on this device without pinned graphs, the least recently used pool first."""
        keys: dict[PoolKey, set[ShapeKey]] = {}
        for held in sorted(self.graphs(), key=lambda held: held.entry.last_used):
            other = PoolKey.of(held.key)
            if other.device == pool.device and other != pool:
                # A pool's place in the order is that of its most recently used graph.
                keys[other] = keys.pop(other, set()) | {held.key}
        pinned = self.pinned()
        return [group for group in keys.values() if not group & pinned]
