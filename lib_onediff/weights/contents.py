"""Whether values in memory are those that they were, where torch counts no edits: `weight.data += ...`, as fusing a
LoRA does, and tensors of inference mode.

A sum over 64 bits of all words, each times an odd number of its place: any edit of one word changes it, and two edits
cancel each other out once in 2**32. Where a copy may be a little off by design (eight bits), one part in PART of the
words of a matrix is summed, which touches every row.
"""
from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORD = 4
# Words that are read together; of so many such pieces one, where not all are read.
PIECE, PART = 8, 17
# Every row of a larger matrix is touched all the same.
SMALLEST_PARTLY_READ = 1 << 16


class Place(NamedTuple):
    """Where a tensor lies. Keeps neither it nor its memory alive, and is no weak reference to the tensor itself: one
    that has any cannot be swapped, which is how peft exchanges a LoRA.

    storage: its memory. start, nbytes: which bytes of that. address: of the first. is_matrix: whether it has rows.
    layout: how it lies there.
    """

    storage: StorageWeakRef
    start: int
    nbytes: int
    address: int
    is_matrix: bool
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
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

    def step(self, part: int) -> int:
        """One in how many pieces of its words is read, where one in so many (part) is wanted of large matrices."""
        return part if self.is_matrix and self.nbytes > SMALLEST_PARTLY_READ * WORD else 1


# Makes ready what launches the sums of places on one device, (places,) in int64; None where it cannot read them.
Reader = Callable[[Sequence[Place], int], "Callable[[], Tensor] | None"]


class Contents:
    """What lay in some places when it was asked for last.

    part: one in so many pieces of a matrix is read; 1: all. reader: where there is something better than torch's
    operators. known: the sums, (places,) in int64 on the CPU.
    """

    def __init__(self, places: Sequence[Place], part: int = 1, reader: Reader | None = None) -> None:
        self._places = [place for place in places if place.device.type != "meta"]
        self._part = part
        is_read = reader is not None and self._places and self._places[0].device.type == "cuda"
        self._launch = reader(self._places, part) if reader is not None and is_read else None
        self._odd: dict[int, Tensor] = {}
        self.known = self._begin()()

    def begin(self, are_alive: bool = False) -> Callable[[], bool]:
        """Launch the reading; main memory is read when it is told. What is returned waits for it, and for nothing
        launched after it, and tells whether anything has other values than when that was told last. are_alive: the
        memory of all places is known to be there."""
        try:
            read = self._begin(are_alive)
        except ReferenceError:
            return lambda: True

        def changed() -> bool:
            try:
                before, self.known = self.known, read()
            except ReferenceError:
                return True
            return not torch.equal(before, self.known)

        return changed

    def _begin(self, are_alive: bool = False) -> Callable[[], Tensor]:
        if not self._places:
            return lambda: torch.empty(0, dtype=torch.int64)
        if self._launch is None and not any(place.device.type == "cuda" for place in self._places):
            return self._sums
        if self._launch is None:
            found = self._sums()
        elif are_alive or all(place.is_alive for place in self._places):
            found = self._launch()
        else:
            raise ReferenceError("a tensor's memory is gone")
        on_cpu = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_cpu.copy_(found, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(found.device))

        def wait() -> Tensor:
            done.synchronize()
            return on_cpu

        return wait

    @torch.no_grad()
    def _sums(self) -> Tensor:
        """By torch's operators, (places,) in int64 where the first one is."""
        return torch.stack([self._sum_of(place).to(self._places[0].device) for place in self._places])

    def _sum_of(self, place: Place) -> Tensor:
        """(), in int64: of the words of 32 bits, or of bytes where the memory does not come out even."""
        words = place.bytes()
        if place.nbytes % WORD == 0 and place.start % WORD == 0:
            words = words.view(torch.int32)
        step = place.step(self._part)
        if step > 1:
            whole = len(words) // (PIECE * step) * (PIECE * step)
            words = words[:whole].view(-1, step, PIECE)[:, 0].flatten()
        count, device = len(words), words.device
        odd = self._odd.get(count)
        if odd is None or odd.device != device:
            odd = torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)
            if device.type == "cpu":
                self._odd[count] = odd
        return (words * odd).sum()


def digest_of_values(label: str, tensors: Iterable[Tensor]) -> str:
    """What tells these values from others of the same label, wherever they lie. Copies them from each device in one
    piece for each type, and waits for it."""
    values = [tensor.detach().flatten() for tensor in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, one in enumerate(values):
        alike.setdefault((one.dtype, one.device), []).append(place)
    for (dtype, _), places in alike.items():
        found = [values[place] for place in places]
        # Not every release of torch joins float8.
        together = torch.cat(found if dtype.itemsize > 1 else [one.view(torch.uint8) for one in found]).cpu()
        for place, one in zip(places, together.split(list(map(len, found))), strict=True):
            values[place] = one
    digest = hashlib.sha256(label.encode())
    for dtype in dict.fromkeys(dtype for dtype, _ in alike):
        digest.update(f" {dtype} ".encode())
        for place in sorted(chain.from_iterable(found for (kind, _), found in alike.items() if kind == dtype)):
            digest.update(ctypes.string_at(values[place].data_ptr(), values[place].nbytes))
    return digest.hexdigest()[:16]
