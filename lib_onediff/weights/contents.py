"""Whether values in memory are those that they were, where torch counts no edits: `weight.data += ...`, as fusing a
LoRA does, and tensors of inference mode.

A sum over 64 bits of all words, each times an odd number of its place: any edit of one word changes it, and two edits
cancel each other out once in 2**32. Where a copy may be a little off by design (eight bits), one part in PART of the
words of a matrix is summed, which touches every row.
"""
from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

WORD = 4
# Words that are read together; of so many such pieces one, where not all are read.
PIECE, PART = 8, 17
# Every row of a larger matrix is touched all the same.
SMALLEST_PARTLY_READ = 1 << 16

# Makes ready what launches the sums of tensors, (tensors,) in int64 on their device; None where it cannot read them.
Reader = Callable[[Sequence[Tensor], int], "Callable[[], Tensor] | None"]


class Contents:
    """What was in some tensors when it was asked for last. Keeps none of them alive.

    part: one in so many pieces of a matrix is read; 1: all. reader: where there is something better than torch's
    operators.
    """

    def __init__(self, tensors: Sequence[Tensor], part: int = 1, reader: Reader | None = None) -> None:
        self._references = list(map(weakref.ref, tensors))
        self._places = list(map(place_of, tensors))
        self._part = part
        self._launch = reader(tensors, part) if reader is not None and tensors and tensors[0].is_cuda else None
        self.known = self.begin()().clone()

    def begin(self) -> Callable[[], Tensor]:
        """Launch the reading. What is returned waits for it, and for nothing launched after it: (tensors,) in int64 on
        the CPU. Raises ReferenceError if a tensor is gone, or lies elsewhere."""
        tensors: list[Any] = [reference() for reference in self._references]
        if any(tensor is None for tensor in tensors) or list(map(place_of, tensors)) != self._places:
            raise ReferenceError("a tensor is gone, or lies elsewhere")
        if not tensors:
            return lambda: torch.empty(0, dtype=torch.int64)
        with torch.no_grad():
            found = sums_by_torch(tensors, self._part) if self._launch is None else self._launch()
        if not found.is_cuda:
            return lambda: found
        on_cpu = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_cpu.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(found.device))

        def wait() -> Tensor:
            done.synchronize()
            return on_cpu

        return wait

    def changed(self, now: Tensor) -> list[int]:
        """Which tensors have other values than those known."""
        places: list[int] = torch.nonzero(now != self.known).flatten().tolist()
        return places


def place_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def step_of(tensor: Tensor, words: int, part: int) -> int:
    """One in how many pieces of a tensor's words is read."""
    return part if tensor.dim() > 1 and words > SMALLEST_PARTLY_READ else 1


def sums_by_torch(tensors: Sequence[Tensor], part: int) -> Tensor:
    """(tensors,), in int64; a few launches for each tensor."""
    return torch.stack([sum_of(tensor.detach(), part).to(tensors[0].device) for tensor in tensors])


def sum_of(tensor: Tensor, part: int) -> Tensor:
    """(), in int64."""
    if tensor.device.type == "meta" or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    words = words_of(tensor)
    step = step_of(tensor, len(words), part)
    if step > 1:
        whole = len(words) // (PIECE * step) * (PIECE * step)
        words = words[:whole].view(-1, step, PIECE)[:, 0].flatten()
    odd = torch.arange(1, 2 * len(words), 2, dtype=torch.int64, device=words.device)
    return (words * odd).sum()


def words_of(tensor: Tensor) -> Tensor:
    """A tensor's memory as int32, or as bytes where that does not come out even; in the order in which it lies."""
    flat = tensor.flatten() if tensor.is_contiguous() else tensor.permute(memory_order(tensor)).flatten()
    as_bytes = flat.view(torch.uint8)
    even = as_bytes.numel() % WORD == 0 and as_bytes.storage_offset() % WORD == 0
    return as_bytes.view(torch.int32) if even else as_bytes


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions, the one with the largest stride first."""
    return sorted(range(tensor.dim()), key=lambda dimension: tensor.stride()[dimension], reverse=True)


def digest_of_values(label: str, tensors: Iterable[Tensor]) -> str:
    """What tells these values from others of the same label. Copies them from the device in one piece for each type,
    and waits for it."""
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault(tensor.dtype, []).append(tensor.detach().flatten())
    digest = hashlib.sha256(label.encode())
    for dtype, found in of_type.items():
        # Not every release of torch joins float8.
        together = torch.cat(found if dtype.itemsize > 1 else [one.view(torch.uint8) for one in found]).cpu()
        digest.update(f" {dtype} ".encode() + ctypes.string_at(together.data_ptr(), together.nbytes))
    return digest.hexdigest()[:16]


def few_rows(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """All of each vector, and the first, the middle and the last row of each matrix."""
    for tensor in tensors:
        if tensor.dim() == 1:
            yield tensor
        else:
            yield from (tensor[row] for row in sorted({0, len(tensor) // 2, len(tensor) - 1}))
