"""Finds edits of tensors that torch does not count in Tensor._version: `weight.data += ...`, as fusing a LoRA does, and
edits of inference tensors.

Compares a checksum: the sum, in 64 bits, of all 32-bit words, each multiplied by its own odd number. Any edit of a
single word changes it, and the effects of two edits on it cancel out with a probability of 2**-32. If only 8-bit copies
were made from the values, a partial reading is enough, because these copies are approximate anyway: of a matrix, it
sums 1 in PART of the words, some in every row.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORD = 4
# The number of words that torch's operators process at once, by device type. Intermediate results take 16 bytes a word.
CHUNKS = {"cpu": 1 << 17}
# For other devices.
CHUNK = 1 << 20
EMPTY = torch.empty(0, dtype=torch.int64, device="cpu")
# The number of consecutive words in a piece, the unit of partial readings.
PIECE = 8
# A partial reading takes every PART-th piece.
PART = 17
# Matrices with at most so many words are always read in full: a partial reading could miss whole rows of them.
LARGEST_READ_IN_FULL = 1 << 16


class MemorySpan(NamedTuple):
    """The memory of a tensor, without keeping the tensor or the memory alive.

    It has a weak reference to the storage, not to the tensor: torch cannot swap a tensor that has weak references, and
    peft swaps tensors to exchange LoRAs.

    start, nbytes: the tensor's bytes in the storage.
    address: of the first byte.
    is_matrix: whether the tensor has two dimensions or more.
    layout: its shape, stride, dtype and device.
    """

    storage: StorageWeakRef
    start: int
    nbytes: int
    address: int
    is_matrix: bool
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> MemorySpan:
        """The span of a tensor: as many bytes as its numbers take, from the first number on. For a tensor with gaps
        between its numbers (see is_dense), the bytes are not those of its numbers; use the span to compare alone."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        layout = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        return cls(
            StorageWeakRef(tensor.untyped_storage()), start, tensor.nbytes, tensor.data_ptr(), tensor.dim() > 1, layout
        )

    @property
    def is_alive(self) -> bool:
        """Whether the storage exists: some tensor still uses it."""
        return not self.storage.expired()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.layout[-1]
        return device

    def bytes(self) -> Tensor:
        """The memory as a tensor of uint8, (nbytes,). Raises ReferenceError if it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise ReferenceError("a tensor's memory was freed")
        empty: Any = torch.empty(0, dtype=torch.uint8, device=self.device)
        found: Tensor = empty.set_(storage, self.start, (self.nbytes,))
        return found

    def stride(self, part: int) -> int:
        """The step of a reading: it takes every such piece of this memory. `part` for a large matrix; 1, all pieces,
        for anything else."""
        return part if self.is_matrix and self.nbytes > LARGEST_READ_IN_FULL * WORD else 1


# A device's kernel for checksums. (spans of one GPU, part; see Contents) -> a function that launches the kernel and
# returns the checksums, int64 (spans,) on the GPU; None if the kernel cannot read these spans.
ContentsReader = Callable[[Sequence[MemorySpan], int], "Callable[[], Tensor] | None"]


class Contents:
    """The checksums of some spans of memory at the last reading. The spans may be on several devices; spans on the meta
    device are left out. The first reading is made, and waited for, when this is constructed.

    part: every part-th piece of a large matrix is read; 1: all. reader: a kernel for the checksums; None: torch's
    operators are used. known: the checksums at the last reading, int64 (spans,) on the CPU.
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
        # The inverse permutation of `order`: for each span, the index of its checksum in the concatenated results.
        self._order = torch.tensor(sorted(range(len(order)), key=order.__getitem__), dtype=torch.int64, device="cpu")
        self.known = self._begin()()

    def begin(self, are_alive: bool = False) -> Callable[[], bool]:
        """Launch a new reading on the GPUs. The returned function reads main memory, waits for the reading but for
        nothing launched after it, and returns whether any checksum differs from the last reading; True also if memory
        of a span was freed. The new checksums then replace `known`, so each change is reported once.

        are_alive: True if the caller knows that the memory of all spans exists, which saves a check.
        """
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
        """Launch a reading on the GPUs. The returned function waits for it and returns `known`'s next value. Both raise
        ReferenceError if a span's memory was freed."""
        # Launch on all devices before waiting for the first.
        waiting = [sums.begin(are_alive) for sums in self._devices]
        return lambda: torch.cat([wait() for wait in waiting])[self._order] if waiting else EMPTY


class Sums:
    """Computes the checksums of spans of one device. part, reader: see Contents; reader is used on CUDA devices alone.
    """

    def __init__(self, spans: Sequence[MemorySpan], part: int, reader: ContentsReader | None) -> None:
        self._spans = spans
        self._part = part
        self._device = spans[0].device
        self._launch = reader(spans, part) if reader is not None and self._device.type == "cuda" else None
        words = 0 if self._launch is not None else CHUNKS.get(self._device.type, CHUNK)
        self._odd = torch.arange(1, 2 * words + 1, 2, dtype=torch.int64, device=self._device)

    def begin(self, are_alive: bool) -> Callable[[], Tensor]:
        """Launch a reading on a CUDA device. The returned function waits for it, and returns the checksums, int64
        (spans,) on the CPU; for any other device, it also makes the reading. are_alive: see Contents.begin. Both raise
        ReferenceError if a span's memory was freed."""
        if self._device.type != "cuda":
            return lambda: self._read().cpu()
        if self._launch is None:
            found = self._read()
        elif are_alive or all(span.is_alive for span in self._spans):
            found = self._launch()
        else:
            raise ReferenceError("a tensor's memory was freed")
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
        """The checksums by torch's operators, int64 (spans,) on their device."""
        return torch.stack([self._sum_of(span) for span in self._spans])

    def _sum_of(self, span: MemorySpan) -> Tensor:
        """The checksum of a span, int64 (): over words of 32 bits, or over bytes if the memory is not a whole number of
        aligned words."""
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
        # Chunk by chunk, so that intermediate results stay in the processor's cache.
        for piece in words.split(rows):
            wide = piece.to(torch.int64).flatten()
            total.add_(wide.sum(), alpha=2 * begin).add_(wide.mul_(self._odd[:len(wide)]).sum())
            begin += len(wide)
        return total


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers fill a contiguous range of memory without gaps, in any order of its dimensions."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()
