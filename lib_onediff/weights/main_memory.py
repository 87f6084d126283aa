"""Allocates pinned main memory for weights that a GPU copies while it computes."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.refusal import Refusal

# Memory is pinned in chunks of this size. torch rounds pinned memory up to a power of two, so a smaller piece for each
# weight would waste much of it.
CHUNK_BYTES = 1 << 28
ALIGNED_BYTES = 256
# Bytes of main memory that are left free for other programs.
SPARE_BYTES = 1 << 30


class MainMemory:
    """Allocates tensors in main memory, inside of large chunks; see CHUNK_BYTES. A chunk is freed when no tensor in it
    is left and this object has begun another chunk or is gone."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype, pinned: bool) -> Any:
        """An uninitialised tensor (count,). pinned: whether the memory is page-locked, so that a GPU can copy from it
        while it computes; all calls for one object pass the same value. Raises Refusal if there is no room."""
        size = aligned(count * dtype.itemsize)
        try:
            if self._chunk is None or self._used + size > len(self._chunk):
                self._chunk = new_chunk(max(CHUNK_BYTES, size), pinned)
                self._used = 0
        except (RuntimeError, MemoryError) as full:
            said = str(full).partition("\n")[0]
            raise Refusal(
                "a part of the model is in main memory (RAM), and OneDiff could not reserve the RAM from which the GPU "
                f"copies it during a step: {said}"
            ) from None
        start = self._used
        self._used += size
        # A tensor of the present inference mode, because the caller assigns it to a parameter of that mode.
        piece: Any = torch.empty(0, dtype=dtype, device="cpu")
        return piece.set_(self._chunk.untyped_storage(), start // dtype.itemsize, (count,))


def aligned(size: int) -> int:
    """A size in bytes, rounded up to a multiple of ALIGNED_BYTES, so that a tensor of any dtype can follow."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def new_chunk(size: int, pinned: bool) -> Tensor:
    """An uninitialised tensor of `size` bytes in main memory. Raises MemoryError if it would leave fewer than
    SPARE_BYTES free (Linux would kill a process instead of refusing), and RuntimeError if torch cannot allocate it. May
    empty torch's cache of pinned memory."""
    free = free_main_memory()
    if free is not None and free < size + SPARE_BYTES:
        # torch caches memory that was pinned before: free it.
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None and torch.cuda.is_initialized():
            empty()
        free = free_main_memory() or 0
        if free < size + SPARE_BYTES:
            raise MemoryError(f"{-(-(size + SPARE_BYTES) >> 20)} MiB must be free, and {free >> 20} MiB are")
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def free_main_memory() -> int | None:
    """Bytes of main memory that can be allocated without swapping; None if unknown, as on systems without
    /proc/meminfo."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return None
