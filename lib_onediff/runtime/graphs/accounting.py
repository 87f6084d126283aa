"""What the graphs of every UNet hold.

Those of one architecture share a memory: they lie over each other in it, so it is as large as the largest of them, and
it shrinks only when it is given up and those that stay are captured again.
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

# torch maps device memory in such pages.
PAGE = 2 * MEBIBYTE
# For the graphs' outputs, and all else that is small: at most 6 MiB with a graph of SDXL.
SMALL_THINGS = 4 * PAGE
# What the gaps between a forward's tensors take of a memory in one piece, in proportion to the most that is in use: a
# twelfth for SDXL, an eighth for SD1.5, whatever the size; and of one in many pieces.
GAPS_IN_ONE_PIECE = 1 / 7
GAPS_IN_MANY = 2 / 5
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


class SharedMemory:
    """A memory in which graphs lie over each other: it is as large as the largest of them."""

    def __init__(self, size: int, graphs: Iterable[HeldGraph]) -> None:
        self.size = size
        self.by_need = sorted(graphs, key=lambda graph: -graph.needs)

    def shrinks(self, keys: Collection[ShapeKey]) -> int:
        """By how much it shrinks without the graphs that have these keys, of which it holds some; 0 where it is left
        alone."""
        needs = next((graph.needs for graph in self.by_need if graph.key not in keys), None)
        if needs is None:
            return self.size
        gain = self.size - memory_of(needs)
        return gain if gain >= max(LEAST_GAIN, LEAST_SHARE * self.size) else 0


class MemorySnapshot:
    """What all graphs hold at one moment; it keeps none alive."""

    def __init__(self, vram: int = 0, memories: Iterable[SharedMemory] = ()) -> None:
        """vram: bytes that they hold together."""
        self.vram = vram
        # A page asks about each of thousands of shapes.
        self._where: dict[ShapeKey, list[tuple[SharedMemory, HeldGraph]]] = {}
        for memory in memories:
            for graph in memory.by_need:
                self._where.setdefault(graph.key, []).append((memory, graph))

    def gives_back(self, keys: Collection[ShapeKey]) -> int:
        """Bytes of GPU memory that come back without the graphs of these shapes."""
        held = [one for key in keys for one in self._where.get(key, ())]
        return sum(graph.own_bytes for _, graph in held) + sum(one.shrinks(keys) for one in memories_of(held))

    def beside(self, keys: Collection[ShapeKey]) -> set[ShapeKey]:
        """The graphs that have to go too so that the memory of these shapes comes back, where that is worth it."""
        held = [one for key in keys for one in self._where.get(key, ())]
        return {graph.key for one in memories_of(held) if one.shrinks(keys) for graph in one.by_need}


def memories_of(held: Iterable[tuple[SharedMemory, HeldGraph]]) -> list[SharedMemory]:
    """Each once."""
    return list({id(memory): memory for memory, _ in held}.values())


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
        self, table: ShapeTable, networks: WeakDictionary[nn.Module, Network], pins: GetPins, made: GraphMaker
    ) -> None:
        self._table = table
        self._networks = networks
        self._pins = pins
        self.made = made
        self.card = Card()

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
        bounds = (network.bound for network in self._networks.values() if network.bound.bytes)
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
        return set().union(*(network.runners for network in self._networks.values()))

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
        shared = [SharedMemory(size, graphs) for size, graphs in memories.values()]
        return MemorySnapshot(sum(map(self.held, self.made.devices())), shared)

    def graphs(self) -> list[GraphRecord]:
        """Every graph. Drop it soon: it keeps them alive."""
        entries = self._table.by_key()
        return [
            GraphRecord(key, entries[key], kept.runner)
            # A copy: a page asks in another thread than the one that makes graphs.
            for network in self._networks.values() for key, kept in network.runners.copy().items() if key in entries
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
