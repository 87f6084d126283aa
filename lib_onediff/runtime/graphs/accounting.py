"""What the graphs of every UNet hold.

Those of one architecture share a memory: they lie over each other in it, so it is as large as the largest of them, and
it shrinks only when it is given up and those that stay are captured again.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import nn

from ...core.device import Runner
from ...core.key import ShapeKey
from ...core.table import Entry, ShapeTable
from ...core.weak_dictionary import WeakDictionary
from ...devices.cuda.graphs.capture import CudaGraphs, Output
from ...devices.cuda.graphs.device_memory import UNLIMITED, Card
from ..managed_unet import ManagedUNet

MEBIBYTE = 2**20
# torch maps device memory in such pages.
PAGE = 2 * MEBIBYTE
# For the graphs' outputs, and all else that is small: at most 6 MiB with a graph of SDXL.
SMALL_THINGS = 4 * PAGE
# What the gaps between a forward's tensors take of a memory in one piece, in proportion to the most that is in use: a
# twelfth for SDXL, an eighth for SD1.5, whatever the size; and of one in many pieces.
GAPS_IN_ONE_PIECE, GAPS_IN_MANY = 1 / 7, 2 / 5
# Less is not worth capturing every graph that stays again.
LEAST_GAIN = 16 * MEBIBYTE
LEAST_SHARE = 1 / 16
SHARE_OF_THE_CARD = 4
# Every pinned (model, resolution).
GetPins = Callable[[], Collection[tuple[str, str]]]


def pages(size: float) -> int:
    """Rounded up to whole pages."""
    return -int(-size // PAGE) * PAGE


def needs_of(peak: int, in_one_piece: bool = True) -> int:
    """What a graph takes of a memory, for the most that its forward has in use at a time."""
    return pages(peak * (1 + (GAPS_IN_ONE_PIECE if in_one_piece else GAPS_IN_MANY)))


def memory_of(needs: int) -> int:
    """What graphs of which the largest needs this hold together, in a memory made for them."""
    return pages(needs) + SMALL_THINGS


def fits(size: int, allowed: int) -> bool:
    """Whether so many bytes are within what is allowed; 0 allows any."""
    return not allowed or size <= allowed


def too_large(needed: int, allowed: int) -> str:
    """Why a graph cannot be, in one line for the user."""
    return (
        f"its graph needs {-(-needed // MEBIBYTE)} MiB, and the setting 'Graph memory in MiB' allows "
        f"{allowed // MEBIBYTE}"
    )


class HeldGraph(NamedTuple):
    """Of a graph, what it takes: needs of the memory that it shares, own_bytes for itself alone."""

    key: ShapeKey
    needs: int
    own_bytes: int


class MemorySnapshot(NamedTuple):
    """What all graphs hold at one moment; it keeps none alive. vram: bytes that they hold together. memories: the size
    of each, and what lies in it."""

    vram: int = 0
    memories: Collection[tuple[int, list[HeldGraph]]] = ()

    def gives_back(self, keys: Collection[ShapeKey]) -> int:
        """Bytes of GPU memory that come back without the graphs of these shapes."""
        own = sum(graph.own_bytes for _, graphs in self.memories for graph in graphs if graph.key in keys)
        return own + sum(shrinks(size, graphs, keys) for size, graphs in self.memories)

    def beside(self, keys: Collection[ShapeKey]) -> set[ShapeKey]:
        """The graphs that have to go too so that the memory of these shapes comes back, where that is worth it."""
        return {
            graph.key for size, graphs in self.memories if shrinks(size, graphs, keys) for graph in graphs
        }


def shrinks(size: int, graphs: Collection[HeldGraph], keys: Collection[ShapeKey]) -> int:
    """By how much a memory of this size shrinks without those of its graphs that have these keys; 0 where it is left
    alone."""
    rest = [graph.needs for graph in graphs if graph.key not in keys]
    if not rest or len(rest) == len(graphs):
        return 0 if rest else size
    gain = size - memory_of(max(rest))
    return gain if gain >= max(LEAST_GAIN, LEAST_SHARE * size) else 0


class GraphRecord(NamedTuple):
    """A graph that somebody's UNet has."""

    key: ShapeKey
    entry: Entry
    runner: Runner


class PoolKey(NamedTuple):
    """Whose graphs share a memory pool. architecture: None for a graph of no network."""

    device: torch.device
    architecture: str | None

    @classmethod
    def of(cls, key: ShapeKey) -> PoolKey:
        return cls(key.device, key.architecture)


class Holdings:
    """Every graph that the UNets in our care have, and what else they hold. Whoever asks holds the runtime's lock: a
    graph that somebody looks at keeps the memory of all.

    made: who makes graphs. card: the GPUs' memory.
    """

    def __init__(
        self, table: ShapeTable, managed: WeakDictionary[nn.Module, ManagedUNet], pins: GetPins, output: Output
    ) -> None:
        """output: computes a call; see Families.output."""
        self._table, self._managed, self._pins = table, managed, pins
        self.made, self.card = CudaGraphs(output), Card()

    def allowed(self, budget: int, device: torch.device | None = None) -> int:
        """Bytes that all graphs of a device may hold, for a budget in MiB; 0 where there is no GPU. device: by default
        the one that torch uses."""
        total = self.card.total(device)
        return min(budget * MEBIBYTE or total // SHARE_OF_THE_CARD, total)

    def shared(self) -> int:
        """Bytes that the graphs of all devices share."""
        return sum(map(self.made.bytes, self.made.devices()))

    def held(self, device: torch.device) -> int:
        """Bytes that all graphs of a device hold, with what was made of functions that hosts apply to their weights."""
        own = sum(held.runner.own_bytes for held in self.graphs() if held.key.device == device)
        return self.made.bytes(device) + own + self.applied_bytes(device)

    def applied_bytes(self, device: torch.device) -> int:
        """Bytes that lie on a device beside the hosts' weights, because of functions that they apply to these, and for
        what weights are copied to."""
        bounds = (managed.bound for managed in self._managed.values() if managed.bound.bytes)
        return sum(bound.bytes for bound in bounds if bound.binding.device == device)

    def room(self, budget: int, device: torch.device) -> int:
        """Bytes that may be used beside what is held, for a budget in MiB. Without a GPU, 0 is no limit."""
        if device.type != "cuda":
            return budget * MEBIBYTE - self.applied_bytes(device) if budget else UNLIMITED
        return min(self.allowed(budget, device) - self.held(device), self.left(device) - self.card.spare(device))

    def held_by(self, pool: PoolKey) -> int:
        """Bytes that the graphs of an architecture hold."""
        if pool.architecture is None:
            return 0
        own = sum(held.runner.own_bytes for held in self.graphs() if PoolKey.of(held.key) == pool)
        return self.made.bytes(*pool) + own

    def left(self, device: torch.device) -> int:
        """Bytes of a card that anybody can have: what torch keeps unused is among it, but not in the graphs' memory."""
        return self.card.free(device) + max(0, self.card.unused(device) - self.made.bytes(device))

    def keys(self) -> set[ShapeKey]:
        """The shapes that have a graph."""
        return set().union(*(managed.runners for managed in self._managed.values()))

    def pinned(self) -> set[ShapeKey]:
        """Those of them that the user has pinned."""
        pins = self._pins()
        return {held.key for held in self.graphs() if (held.entry.model, held.key.resolution) in pins}

    def memory(self) -> MemorySnapshot:
        """What would come back without some graphs."""
        memories: dict[int, tuple[int, list[HeldGraph]]] = {}
        for held in self.graphs():
            _, graphs = memories.setdefault(id(held.runner.memory), (held.runner.memory.bytes, []))
            graphs.append(HeldGraph(held.key, held.entry.needs, held.runner.own_bytes))
        return MemorySnapshot(sum(map(self.held, self.made.devices())), memories.values())

    def graphs(self) -> list[GraphRecord]:
        """Every graph. Drop it soon: it keeps them alive."""
        entries = self._table.by_key()
        return [
            GraphRecord(key, entries[key], kept.runner)
            # A copy: a page asks in another thread than the one that makes graphs.
            for managed in self._managed.values() for key, kept in managed.runners.copy().items() if key in entries
        ]

    def others(self, pool: PoolKey) -> list[set[ShapeKey]]:
        """The graphs of each other architecture on this device that has none pinned, the least recently used first."""
        keys: dict[PoolKey, set[ShapeKey]] = {}
        for held in sorted(self.graphs(), key=lambda held: held.entry.last_used):
            other = PoolKey.of(held.key)
            if other.device == pool.device and other != pool:
                # The last used of an architecture decides on its turn.
                keys[other] = keys.pop(other, set()) | {held.key}
        pinned = self.pinned()
        return [group for group in keys.values() if not group & pinned]
