"""How much memory is freed by dropping some CUDA graphs, in memory pools that several graphs share."""
from __future__ import annotations

import random
import time
from dataclasses import replace

import torch

from lib_onediff.core.key import ShapeKey
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.graphs.accounting import (
    LEAST_GAIN,
    LEAST_SHARE,
    HeldGraph,
    MemorySnapshot,
    SharedMemory,
    memory_of,
)

CALL = UNetCall(latent=torch.empty(2, 4, 8, 8), timestep=torch.empty(2), context=torch.empty(2, 77, 48))
KEY = ShapeKey.of("SD1", torch.float32, CALL)


def keys(count: int) -> list[ShapeKey]:
    return [replace(KEY, height=8 + number // 64, width=8 + number % 64) for number in range(count)]


def comes_back(memories: list[tuple[int, list[HeldGraph]]], gone: set[ShapeKey]) -> int:
    """The bytes that dropping the graphs of the shapes in `gone` frees, by definition: their own bytes, and those by
    which each pool shrinks to the size of its largest remaining graph, if that is enough to shrink it."""
    total = 0
    for size, graphs in memories:
        total += sum(graph.own_bytes for graph in graphs if graph.key in gone)
        stay = [graph.needs for graph in graphs if graph.key not in gone]
        if len(stay) == len(graphs):
            continue
        gain = size - memory_of(max(stay)) if stay else size
        total += gain if not stay or gain >= max(LEAST_GAIN, LEAST_SHARE * size) else 0
    return total


def test_gives_back_returns_the_bytes_by_which_all_pools_shrink_without_the_removed_graphs() -> None:
    """The reference for 200 random sets of pools is comes_back(), the definition. A pool with graphs of several removed
    shapes counts once."""
    drawn = random.Random(0)
    shapes = keys(12)
    for _ in range(200):
        memories = []
        for _ in range(drawn.randint(1, 3)):
            # Two networks may have a graph of the same shape in one pool.
            graphs = [
                HeldGraph(drawn.choice(shapes), drawn.randint(1, 1 << 30), drawn.randint(0, 1000))
                for _ in range(drawn.randint(1, 6))
            ]
            memories.append((memory_of(max(graph.needs for graph in graphs)), graphs))
        snapshot = MemorySnapshot(0, [SharedMemory(*memory) for memory in memories])
        gone = set(drawn.sample(shapes, drawn.randint(1, 6)))
        assert snapshot.gives_back(gone) == comes_back(memories, gone)


def test_the_memory_of_each_of_2000_graphs_in_one_pool_is_found_within_a_second() -> None:
    """The Cache page shows this memory in each row. Searching all graphs for each row took 6 seconds."""
    shapes = keys(2000)
    snapshot = MemorySnapshot(0, [SharedMemory(1 << 30, [HeldGraph(key, 1 << 20, 0) for key in shapes])])
    began = time.process_time()
    for key in shapes:
        snapshot.gives_back({key})
    assert time.process_time() - began < 1.0
