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
# Bytes of a pool for the graphs' outputs and other small tensors: at most 6 MiB were in use with a graph of SDXL.
SMALL_THINGS = 4 * PAGE
# Fragmentation: the gaps between a forward's tensors, relative to the forward's peak of used bytes. In a pool of one
# contiguous piece the gaps are 1/12 for SDXL and 1/8 for SD1.5, at every size; in a pool of many pieces, they are
# larger.
GAPS_IN_ONE_PIECE = 1 / 7
GAPS_IN_MANY = 2 / 5
# A pool is shrunk only if that gains at least LEAST_GAIN bytes and LEAST_SHARE of the pool's size, because its other
# graphs must be captured again.
LEAST_GAIN = 16 * MEBIBYTE
LEAST_SHARE = 1 / 16
# By default, graphs may take 1 / SHARE_OF_THE_CARD of the GPU memory.
SHARE_OF_THE_CARD = 4
# Every pinned (model, resolution).
GetPins = Callable[[], Collection[tuple[str, str]]]


def pages(size: float) -> int:
    """A size in bytes, rounded up to a multiple of PAGE."""
    return -int(-size // PAGE) * PAGE


def needs_of(peak: int, in_one_piece: bool = True) -> int:
    """An estimate of the bytes that a graph will take in a memory pool. peak: the most bytes that the same forward has
    in use at one time when it runs without a graph. in_one_piece: whether the pool is contiguous, so that gaps are
    smaller.
    """
    return pages(peak * (1 + (GAPS_IN_ONE_PIECE if in_one_piece else GAPS_IN_MANY)))


def memory_of(needs: int) -> int:
    """The size in bytes of a new memory pool whose largest graph needs `needs` bytes."""
    return pages(needs) + SMALL_THINGS


def fits(size: int, allowed: int) -> bool:
    """Whether `size` bytes are within the limit of `allowed` bytes; True if allowed is 0, which means no limit."""
    return not allowed or size <= allowed


def too_large(needed: int, allowed: int) -> str:
    """Why a graph cannot be made within the budget, in one line for the user. needed: the bytes that OneDiff takes on
    the GPU with this graph. allowed: the budget in bytes."""
    return (
        f"with a CUDA graph of this size, OneDiff needs {-(-needed // MEBIBYTE)} MiB, but the setting 'Graph memory in "
        f"MiB' allows {allowed // MEBIBYTE}: raise it"
    )


class HeldGraph(NamedTuple):
    """The memory of one graph.

    needs: bytes that it uses of the shared pool, in which it overlaps with other graphs.
    own_bytes: bytes outside of the pool, which only this graph uses.
    """

    key: ShapeKey
    needs: int
    own_bytes: int


class SharedMemory:
    """Describes a memory pool in which graphs overlap. Keeps neither the pool nor a graph alive.

    size: the pool's size in bytes. It has grown with the largest graph since the pool was made, which may be dropped.
    by_need: the graphs, those with the largest needs first.
    """

    def __init__(self, size: int, graphs: Iterable[HeldGraph]) -> None:
        self.size = size
        self.by_need = sorted(graphs, key=lambda graph: -graph.needs)

    def shrinks(self, keys: Collection[ShapeKey]) -> int:
        """Bytes by which the pool would get smaller if the graphs with these keys were dropped: its whole size if no
        other graph remained; 0 if the gain is so small (LEAST_GAIN, LEAST_SHARE) that the pool would be kept. Only
        computes."""
        needs = next((graph.needs for graph in self.by_need if graph.key not in keys), None)
        if needs is None:
            return self.size
        gain = self.size - memory_of(needs)
        return gain if gain >= max(LEAST_GAIN, LEAST_SHARE * self.size) else 0


class MemorySnapshot:
    """The memory of all graphs at one moment, to compute how much GPU memory it would free to drop some of them. Keeps
    no graph alive.

    vram: bytes that OneDiff takes on all GPUs that have graphs (the sum of Holdings.held).
    """

    def __init__(self, vram: int = 0, memories: Iterable[SharedMemory] = ()) -> None:
        """memories: the pools."""
        self.vram = vram
        # An index by key, because a page calls gives_back() for each of thousands of shapes.
        self._where: dict[ShapeKey, list[tuple[SharedMemory, HeldGraph]]] = {}
        for memory in memories:
            for graph in memory.by_need:
                self._where.setdefault(graph.key, []).append((memory, graph))

    def gives_back(self, keys: Collection[ShapeKey]) -> int:
        """Bytes of GPU memory that would be freed if the graphs of these shapes were dropped. Shapes without a graph
        count as 0."""
        graphs = [one for key in keys for one in self._where.get(key, ())]
        return sum(graph.own_bytes for _, graph in graphs) + sum(one.shrinks(keys) for one in memories_of(graphs))

    def dropped_with(self, keys: Collection[ShapeKey]) -> set[ShapeKey]:
        """The shapes whose graphs must all be dropped so that the pool memory of these shapes' graphs is freed. A pool
        is freed only as a whole, so these are all shapes of each pool that gets smaller without the given graphs
        (SharedMemory.shrinks), even shapes whose graphs are still wanted: those are captured again later. Empty if no
        pool gets smaller."""
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
    """Identifies a memory pool, which the graphs of one architecture on one device share. architecture: None for work
    whose graphs have no pool: a decode, or a network that had no call yet."""

    device: torch.device
    architecture: str | None

    @classmethod
    def of(cls, key: ShapeKey) -> PoolKey:
        """The pool of a shape's graph."""
        return cls(key.device, key.architecture)


class Holdings:
    """Lists all graphs of all networks, and counts the GPU memory of OneDiff.

    Callers hold the runtime's lock, because a reference to a graph keeps the memory of the graph's whole pool alive.

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
        """Bytes that OneDiff may take on a GPU, at most all of the GPU's memory. budget: the option in MiB; 0 for the
        default, a quarter of the GPU's memory. device: None for torch's current one. Returns 0 without a GPU, which
        fits() takes as no limit."""
        total = self.card.total(device)
        return min(budget * MEBIBYTE or total // SHARE_OF_THE_CARD, total)

    def shared(self) -> int:
        """Bytes of the graphs' memory pools on all devices."""
        return sum(map(self.made.bytes, self.made.devices()))

    def held(self, device: torch.device) -> int:
        """Bytes that OneDiff takes on a device: all graphs with their pools, and applied_bytes(). 8-bit weights and the
        memories of step policies are not counted."""
        own = sum(held.runner.own_bytes for held in self.graphs() if held.key.device == device)
        return self.made.bytes(device) + own + self.applied_bytes(device)

    def applied_bytes(self, device: torch.device) -> int:
        """Bytes on a device for copies of weights in all networks: results of functions that hosts apply to their
        weights, and buffers that streamed weights are copied to."""
        bounds = (network.bound for network in self._networks.values() if network.bound.bytes)
        return sum(bound.bytes for bound in bounds if bound.binding.device == device)

    def room(self, budget: int, device: torch.device) -> int:
        """Bytes that OneDiff may still take on a device: the smaller one of its unused budget, and of the memory that
        is free beyond Card.spare, which is left to others; negative if OneDiff has taken too much. budget: in MiB; 0
        for the default. Without a GPU, only a budget other than 0 limits it; otherwise returns UNLIMITED.
        """
        if device.type != "cuda":
            return budget * MEBIBYTE - self.applied_bytes(device) if budget else UNLIMITED
        return min(self.allowed(budget, device) - self.held(device), self.left(device) - self.card.spare(device))

    def held_by(self, pool: PoolKey) -> int:
        """Bytes of one pool, and the bytes that its graphs take outside of it; 0 for a PoolKey without architecture."""
        if pool.architecture is None:
            return 0
        own = sum(held.runner.own_bytes for held in self.graphs() if PoolKey.of(held.key) == pool)
        return self.made.bytes(*pool) + own

    def left(self, device: torch.device) -> int:
        """Bytes of a GPU that any code in this process can allocate: the free ones, and the unused ones that torch has
        reserved outside of the graphs' pools."""
        return self.card.free(device) + max(0, self.card.unused(device) - self.made.bytes(device))

    def keys(self) -> set[ShapeKey]:
        """The shapes that have a graph."""
        return set().union(*(network.runners for network in self._networks.values()))

    def pinned(self) -> set[ShapeKey]:
        """The shapes with a graph whose resolution the user has pinned."""
        pins = self._pins()
        return {held.key for held in self.graphs() if (held.entry.model, held.key.resolution) in pins}

    def memory(self) -> MemorySnapshot:
        """A MemorySnapshot of all graphs."""
        memories: dict[int, tuple[int, list[HeldGraph]]] = {}
        for held in self.graphs():
            _, graphs = memories.setdefault(id(held.runner.memory), (held.runner.memory.bytes, []))
            graphs.append(HeldGraph(held.key, held.entry.needs, held.runner.own_bytes))
        shared = [SharedMemory(size, graphs) for size, graphs in memories.values()]
        return MemorySnapshot(sum(map(self.held, self.made.devices())), shared)

    def graphs(self) -> list[GraphRecord]:
        """The graphs of all networks, except those whose shape is not in the table any more. Do not keep the result,
        which keeps the graphs alive."""
        entries = self._table.by_key()
        return [
            GraphRecord(key, entries[key], kept.runner)
            # A copy, because pages call this while another thread makes graphs.
            for network in self._networks.values() for key, kept in network.runners.copy().items() if key in entries
        ]

    def others(self, pool: PoolKey) -> list[set[ShapeKey]]:
        """All other pools on this pool's device, as sets of the shapes of their graphs, the least recently used pool
        first. A pool with a pinned graph is left out."""
        keys: dict[PoolKey, set[ShapeKey]] = {}
        for held in sorted(self.graphs(), key=lambda held: held.entry.last_used):
            other = PoolKey.of(held.key)
            if other.device == pool.device and other != pool:
                # A pool's place in the order is that of its most recently used graph.
                keys[other] = keys.pop(other, set()) | {held.key}
        pinned = self.pinned()
        return [group for group in keys.values() if not group & pinned]
