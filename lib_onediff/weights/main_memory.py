"""Room for weights in the computer's main memory, from which a GPU copies by itself."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.refusal import Refusal

# What is pinned comes in powers of two: so little is lost.
CHUNK_BYTES = 1 << 28
ALIGNED_BYTES = 256
# What the rest of the computer is left with.
SPARE_BYTES = 1 << 30


class MainMemory:
    """Memory in large pieces."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype, pinned: bool) -> Any:
        """(count,), without values. pinned: so that a GPU copies from it while it computes. Raises Refusal."""
        size = aligned(count * dtype.itemsize)
        try:
            if self._chunk is None or self._used + size > len(self._chunk):
                self._chunk = new_chunk(max(CHUNK_BYTES, size), pinned)
                self._used = 0
        except (RuntimeError, MemoryError) as full:
            said = str(full).partition("\n")[0]
            raise Refusal(
                f"a part of its weights is in main memory, and what of it can be pinned has no room: {said}"
            ) from None
        start = self._used
        self._used += size
        # A tensor of the mode that is on now, inference or not, as whoever takes it for its own has to be.
        piece: Any = torch.empty(0, dtype=dtype, device="cpu")
        return piece.set_(self._chunk.untyped_storage(), start // dtype.itemsize, (count,))


def aligned(size: int) -> int:
    """Rounded up, so that any type can follow."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def new_chunk(size: int, pinned: bool) -> Tensor:
    """Raises MemoryError where the system says that so many bytes do not fit (Linux would end a process for it), and
    RuntimeError."""
    free = free_main_memory()
    if free is not None and free < size + SPARE_BYTES:
        # torch keeps what was pinned before.
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None and torch.cuda.is_initialized():
            empty()
        free = free_main_memory() or 0
        if free < size + SPARE_BYTES:
            raise MemoryError(f"{free >> 20} MiB are left")
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def free_main_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as told:
            fields = dict(line.split(":", 1) for line in told)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return None
