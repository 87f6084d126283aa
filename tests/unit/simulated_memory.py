"""torch's CUDA caching allocator as it treats one private pool, and what a forward asks of it: for machines without a
GPU. After c10/cuda/CUDACachingAllocator.cpp: two lists of free blocks, best fit, split and merged within a segment."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MEBIBYTE = 2**20
LEAST_BLOCK = 512
SMALL = MEBIBYTE
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MEBIBYTE, 20 * MEBIBYTE
LEAST_OWN_SEGMENT = 10 * MEBIBYTE
PAGE = 2 * MEBIBYTE


@dataclass(eq=False)
class Block:
    size: int
    small: bool
    used: bool = False
    before: Block | None = None
    after: Block | None = None


class PrivatePool:
    """What one pool holds. Addresses do not matter to it, but for which of two blocks of a size is taken."""

    def __init__(self) -> None:
        self.reserved = self.used = self.peak = 0
        self._free: list[Block] = []

    def allocate(self, wanted: int) -> Block:
        size = max(LEAST_BLOCK, -(-wanted // LEAST_BLOCK) * LEAST_BLOCK)
        small = size <= SMALL
        fitting = [block for block in self._free if block.small == small and block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
        else:
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else -(-size // PAGE) * PAGE
            self.reserved += segment
            block = Block(segment, small)
        rest = block.size - size
        if rest >= LEAST_BLOCK if small else rest > SMALL:
            other = Block(rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.size, block.after = size, other
            self._free.append(other)
        block.used = True
        self.used += block.size
        self.peak = max(self.peak, self.used)
        return block

    def release(self, block: Block) -> None:
        self.used -= block.size
        block.used = False
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._free.remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                block.before, block.after = first.before, second.after
                block.size += other.size
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        self._free.append(block)

    def replay(self, trace: Iterable[tuple[int, int]]) -> list[Block]:
        """What is still in use after these requests: (number, bytes), and (number, 0) where it is given back."""
        blocks: dict[int, Block] = {}
        for number, size in trace:
            if size:
                blocks[number] = self.allocate(size)
            else:
                self.release(blocks.pop(number))
        return list(blocks.values())


class Requests(TorchDispatchMode):
    """Takes down what is allocated inside, and when it is given back. scale: as if everything were so much larger."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and saying so to torch takes longer than noting a tensor."""
        return False

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.trace: list[tuple[int, int]] = []
        self._scale = scale
        self._numbers: dict[int, int] = {}
        self._views: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, *(kwargs or {}).values()))}
        for tensor in tensors(outputs):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._numbers and storage not in given and tensor.untyped_storage().nbytes():
                self._numbers[storage] = len(self.trace)
                self.trace.append((len(self.trace), tensor.untyped_storage().nbytes() * self._scale))
            if storage in self._numbers:
                self._views[storage] += 1
                weakref.finalize(tensor, self._gone, storage).atexit = False
        return outputs

    def _gone(self, storage: int) -> None:
        self._views[storage] -= 1
        if not self._views[storage]:
            self.trace.append((self._numbers.pop(storage), 0))


def tensors(values: Any) -> list[Tensor]:
    """Those among an operator's arguments or results, in lists as well."""
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors(value)]
    return [values] if isinstance(values, Tensor) else []


def requests_of(work: Callable[[], Tensor], scale: int = 1) -> list[tuple[int, int]]:
    """The requests of a forward, of which the output stays in use."""
    with torch.no_grad(), Requests(scale) as requests:
        output = work()
        trace = list(requests.trace)
    del output
    return trace
