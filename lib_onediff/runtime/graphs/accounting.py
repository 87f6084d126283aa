"""What the graphs of every UNet hold."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ...core.key import ShapeKey
from ...core.table import Entry, ShapeTable
from ...core.weak_dictionary import WeakDictionary
from ...devices.cuda.graphs.capture import CudaGraphs, Output
from ...devices.cuda.graphs.device_memory import UNLIMITED, Card
from ..managed_unet import CachedRunner, ManagedUNet
from .pool_size import MEBIBYTE, HeldGraph, MemorySnapshot

SHARE_OF_THE_CARD = 4
# Every pinned (model, resolution).
GetPins = Callable[[], Collection[tuple[str, str]]]


class GraphRecord(NamedTuple):
    """A graph that somebody's UNet has."""

    managed: ManagedUNet
    entry: Entry
    kept: CachedRunner

    @property
    def key(self) -> ShapeKey:
        return self.entry.key


class PoolKey(NamedTuple):
    """Whose graphs share a memory pool. architecture: None for that of none."""

    device: torch.device
    architecture: str | None

    @classmethod
    def of(cls, key: ShapeKey) -> PoolKey:
        return cls(key.device, key.architecture)


def own_bytes(held: Iterable[GraphRecord]) -> int:
    """What graphs hold for themselves, beside the memory that they share."""
    return sum(graph.kept.runner.own_bytes for graph in held)


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

    def devices(self) -> set[torch.device]:
        """Those that hold graphs."""
        return self.made.devices()

    def shared(self) -> int:
        """Bytes that the graphs of all devices share."""
        return sum(map(self.made.bytes, self.devices()))

    def held(self, device: torch.device) -> int:
        """Bytes that all graphs of a device hold, with what was made of functions that hosts apply to their weights."""
        own = own_bytes(held for held in self.graphs() if held.key.device == device)
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
        own = own_bytes(held for held in self.graphs() if PoolKey.of(held.key) == pool)
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
        snapshot = MemorySnapshot(sum(map(self.held, self.devices())))
        for held in self.graphs():
            snapshot.add(held.kept.runner.memory, HeldGraph(held.key, held.entry.needs, held.kept.runner.own_bytes))
        return snapshot

    def graphs(self) -> list[GraphRecord]:
        """Every graph. Drop it soon: it keeps them alive."""
        entries = self._table.by_key()
        return [
            GraphRecord(managed, entries[key], kept)
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
