"""Whether values in memory are those that they were, where torch counts no edits: `weight.data += ...`, as fusing a
LoRA does, and tensors of inference mode.

A sum over 64 bits of all words, each times an odd number of its place: any edit of one word changes it, and two edits
cancel each other out once in 2**32. Where a copy may be a little off by design (eight bits), one part in PART of the
words of a matrix is summed, which touches every row.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORD = 4
# How many words torch's operators take at once, by the type of device: what is made of them takes 16 bytes a word.
CHUNKS = {"cpu": 1 << 17}
# For other devices.
CHUNK = 1 << 20
EMPTY = torch.empty(0, dtype=torch.int64, device="cpu")
# A piece: words that are read together.
PIECE = 8
# One of so many pieces is read, where not all are.
PART = 17
# Every row of a larger matrix is touched all the same.
SMALLEST_PARTLY_READ = 1 << 16


class MemorySpan(NamedTuple):
    """The memory of a tensor. Keeps neither the tensor nor the memory alive, and is no weak reference to the tensor: a
    tensor that has any cannot be swapped, which is how peft exchanges a LoRA.

    storage: the memory. start, nbytes: the bytes of the storage, from the start on. address: of the first byte.
    is_matrix: whether the tensor has rows. layout: its shape, stride, dtype and device.
    """

    storage: StorageWeakRef
    start: int
    nbytes: int
    address: int
    is_matrix: bool
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> MemorySpan:
        start = int(tensor.storage_offset()) * tensor.element_size()
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return cls(
            StorageWeakRef(tensor.untyped_storage()), start, tensor.nbytes, tensor.data_ptr(), tensor.dim() > 1, layout
        )

    @property
    def is_alive(self) -> bool:
        return not self.storage.expired()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.layout[-1]
        return device

    def bytes(self) -> Tensor:
        """(nbytes,), as they are now. Raises ReferenceError if the memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise ReferenceError("a tensor's memory is gone")
        empty: Any = torch.empty(0, dtype=torch.uint8, device=self.device)
        found: Tensor = empty.set_(storage, self.start, (self.nbytes,))
        return found

    def stride(self, part: int) -> int:
        """One of how many pieces of its words is read: part for large matrices, 1 for all else."""
        return part if self.is_matrix and self.nbytes > SMALLEST_PARTLY_READ * WORD else 1


# Returns a function that launches the sums of spans on one device, (spans,) in int64; None if it cannot read them.
ContentsReader = Callable[[Sequence[MemorySpan], int], "Callable[[], Tensor] | None"]


class Contents:
    """The contents of some spans of memory when they were read last. The spans may be on several devices.

    part: every part-th piece of a large matrix is read; 1: all. reader: launches the sums, where a device has something
    better than torch's operators. known: the sums, (spans,) in int64 on the CPU, in the order of the spans.
    """

    def __init__(self, spans: Sequence[MemorySpan], part: int = 1, reader: ContentsReader | None = None) -> None:
        by_device: dict[torch.device, list[int]] = {}
        for number, span in enumerate(spans):
            if span.device.type != "meta":
                by_device.setdefault(span.device, []).append(number)
        self._devices = [
            Sums([spans[number] for number in numbers], part, reader) for numbers in by_device.values()
        ]
        order = list(chain.from_iterable(by_device.values()))
        # The index of each span's sum in the sums of one device after the other.
        self._order = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.int64, device="cpu")
        self.known = self._begin()()

    def begin(self, are_alive: bool = False) -> Callable[[], bool]:
        """Start the reading; main memory is read when the returned function is called. That waits for it, for nothing
        launched after it, and returns whether anything has other values than when this was read last. are_alive: the
        memory of all spans is known to be there."""
        try:
            read = self._begin(are_alive)
        except ReferenceError:
            return lambda: True

        def changed() -> bool:
            try:
                before = self.known
                self.known = read()
            except ReferenceError:
                return True
            return not torch.equal(before, self.known)

        return changed

    def _begin(self, are_alive: bool = False) -> Callable[[], Tensor]:
        # All are launched before the first is waited for.
        waiting = [sums.begin(are_alive) for sums in self._devices]
        return lambda: torch.cat([wait() for wait in waiting])[self._order] if waiting else EMPTY


class Sums:
    """Reads spans of one device. part, reader: see Contents."""

    def __init__(self, spans: Sequence[MemorySpan], part: int, reader: ContentsReader | None) -> None:
        self._spans = spans
        self._part = part
        self._device = spans[0].device
        self._launch = reader(spans, part) if reader is not None and self._device.type == "cuda" else None
        words = 0 if self._launch is not None else CHUNKS.get(self._device.type, CHUNK)
        self._odd = torch.arange(1, 2 * words + 1, 2, dtype=torch.int64, device=self._device)

    def begin(self, are_alive: bool) -> Callable[[], Tensor]:
        """Start the reading. The returned function waits for it, (spans,) in int64 on the CPU. Both raise
        ReferenceError where the memory of a span is gone."""
        if self._device.type != "cuda":
            return lambda: self._read().cpu()
        if self._launch is None:
            found = self._read()
        elif are_alive or all(span.is_alive for span in self._spans):
            found = self._launch()
        else:
            raise ReferenceError("a tensor's memory is gone")
        on_cpu = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
        on_cpu.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))

        def wait() -> Tensor:
            done.synchronize()
            return on_cpu

        return wait

    @torch.no_grad()
    def _read(self) -> Tensor:
        """By torch's operators, (spans,) in int64 on their device."""
        return torch.stack([self._sum_of(span) for span in self._spans])

    def _sum_of(self, span: MemorySpan) -> Tensor:
        """(), in int64: of the words of 32 bits, or of bytes where the memory does not come out even."""
        words = span.bytes()
        if span.nbytes % WORD == 0 and span.start % WORD == 0:
            words = words.view(torch.int32)
        step = span.stride(self._part)
        if step > 1:
            whole = len(words) // (PIECE * step) * (PIECE * step)
            words = words[:whole].view(-1, step, PIECE)[:, 0]
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        begin = 0
        rows = max(1, len(self._odd) // (PIECE if step > 1 else 1))
        # Piece by piece: what is made of each stays in the processor's cache.
        for piece in words.split(rows):
            wide = piece.to(torch.int64).flatten()
            total.add_(wide.sum(), alpha=2 * begin).add_(wide.mul_(self._odd[:len(wide)]).sum())
            begin += len(wide)
        return total


def is_dense(tensor: Tensor) -> bool:
    """Whether the memory from a tensor's first number on holds its numbers, in any order, and nothing else."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()
