"""Arithmetic of the memory that the graphs of one architecture share: they lie over each other in it, so it is as large
as the largest of them, and it shrinks only when it is given up and those that stay are captured again."""
from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ...core.device import Memory
from ...core.key import ShapeKey

MEBIBYTE = 2**20
# torch maps device memory in such pages.
PAGE = 2 * MEBIBYTE
# For the graphs' outputs, and all else that is small.
SMALL_THINGS = PAGE
# What the gaps between a forward's tensors take of a memory in one piece, in proportion to the most that is in use: a
# twelfth for SDXL, an eighth for SD1.5, whatever the size; and of one in many pieces.
GAPS_IN_ONE_PIECE, GAPS_IN_MANY = 1 / 7, 2 / 5
# Less is not worth capturing every graph that stays again.
LEAST_GAIN = 16 * MEBIBYTE
LEAST_SHARE = 1 / 16


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


class MemorySnapshot:
    """What all graphs hold at one moment; it keeps none alive. vram: bytes that they hold together."""

    def __init__(self, vram: int = 0) -> None:
        self.vram = vram
        # By an identity for each memory: its size, and what lies in it.
        self._memories: dict[int, tuple[int, list[HeldGraph]]] = {}

    def add(self, memory: Memory, graph: HeldGraph) -> None:
        self._memories.setdefault(id(memory), (memory.bytes, []))[1].append(graph)

    def gives_back(self, keys: Collection[ShapeKey]) -> int:
        """Bytes of GPU memory that come back without the graphs of these shapes."""
        own = sum(graph.own_bytes for _, graphs in self._memories.values() for graph in graphs if graph.key in keys)
        return own + sum(shrinks(size, graphs, keys) for size, graphs in self._memories.values())

    def beside(self, keys: Collection[ShapeKey]) -> set[ShapeKey]:
        """The graphs that have to go too so that the memory of these shapes comes back, where that is worth it."""
        return {
            graph.key for size, graphs in self._memories.values() if shrinks(size, graphs, keys) for graph in graphs
        }


def shrinks(size: int, graphs: Collection[HeldGraph], keys: Collection[ShapeKey]) -> int:
    """By how much a memory of this size shrinks without those of its graphs that have these keys; 0 where it is left
    alone."""
    rest = [graph.needs for graph in graphs if graph.key not in keys]
    if not rest or len(rest) == len(graphs):
        return 0 if rest else size
    gain = size - memory_of(max(rest))
    return gain if gain >= max(LEAST_GAIN, LEAST_SHARE * size) else 0
