"""Weights that lie in main memory, copied to the GPU while it computes, ahead of the layers that read them.

A forward reads its weights unit by unit (core.family.Family.units). The matrices that are away are copied on a stream
of their own into a ring of GPU memory, and written over once their unit was computed; vectors, a thousandth of all, are
copied when it begins. Every call copies them anew, so nothing that is made of a weight outlives a call. While a CUDA
graph is captured, so are the copies: they are a branch of the graph beside its kernels.
"""
from __future__ import annotations

import ctypes
import zlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.refusal import Refusal
from .binding import Binding, in_one, lies_away
from .contents import MemorySpan
from .exact_copy import copy_into, copy_of
from .main_memory import MainMemory, aligned
from .stored import StoredWeight

# Copies of less take longer to begin than to do.
LEAST_CHUNK = 16 << 20
# So many bytes the copies may be ahead of what is computed, where two units take less.
RING = 256 << 20
Units = Sequence[Sequence[str]]
# From which byte of a room on something is copied to, and from where.
Copy = tuple[int, MemorySpan]
Copies = Sequence[tuple[Tensor, MemorySpan]]


class CopyStream:
    """Copies to a GPU beside what it computes. Its marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def computed(self) -> torch.cuda.Event:
        """A mark behind all that was launched to compute."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, copies: Copies, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy behind a mark, and behind all copies before. Returns a mark behind these."""
        event = torch.cuda.Event()
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for target, span in copies:
                target.copy_(span.bytes(), non_blocking=True)
            event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """What is launched to compute from now on comes behind a mark."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class Chunk(NamedTuple):
    """What is copied in one go: the matrices of units that follow each other.

    last_unit: the last that reads it. start, size: where it lies in the ring, in bytes. waits: how many chunks must
    have been read before it is written, because it lies over one of them.
    """

    last_unit: int
    start: int
    size: int
    waits: int = 0


def chunks_of(sizes: Sequence[int], ring: int, least: int = LEAST_CHUNK) -> list[Chunk]:
    """The chunks in which units of these sizes go through a ring at least twice as large as the largest unit. All in
    bytes. least: smaller units that follow each other share a chunk."""
    chunks: list[Chunk] = []
    for unit, size in enumerate(sizes):
        if not size:
            continue
        last = chunks[-1] if chunks else Chunk(-1, 0, 0)
        end = last.start + last.size
        fits = end + size <= ring
        if chunks and fits and last.size < least and size < least:
            chunks[-1] = Chunk(unit, last.start, last.size + size)
        else:
            chunks.append(Chunk(unit, end if fits else 0, size))
    return [chunk._replace(waits=reads_before(chunk, chunks[:index])) for index, chunk in enumerate(chunks)]


def reads_before(chunk: Chunk, earlier: Sequence[Chunk]) -> int:
    """How many of the earlier chunks must have been read before this one is written: up to the last one that lies in
    the same bytes of the ring."""
    end = chunk.start + chunk.size
    found = 0
    for number, other in enumerate(earlier, 1):
        if other.start < end and chunk.start < other.start + other.size:
            found = number
    return found


class CopySchedule(NamedTuple):
    """The copies of a forward with so many units. unit_of: the unit of each layer. chunk_of, staged: for each layer
    whose matrix is away, its chunk and the tensor that it is copied to. copies: those of each chunk."""

    units: int
    unit_of: dict[str, int]
    chunks: list[Chunk]
    copies: list[Copies]
    chunk_of: dict[str, int]
    staged: dict[str, Tensor]


class Streaming:
    """The layers of a network that are not, or not as a whole, on the device that computes."""

    def __init__(self, binding: Binding, units: Units, lane: CopyStream, memory: MainMemory, pinned: bool) -> None:
        """Moves the parameters that lie in main memory to pinned memory, from which a GPU copies by itself, where they
        do not lie there. units: of the whole network. pinned: False where nothing has to be pinned.

        Raises Refusal if there is no main memory left, and torch.cuda.OutOfMemoryError.
        """
        self.device = binding.device
        self.lane = lane
        self._schedules: dict[Hashable, CopySchedule] = {}
        # Where each member of a fused layer begins in it, and how many rows it has.
        self.members = binding.fusion_of
        names = [name for name in chain.from_iterable(units) if name in binding.away]
        self._pin(binding, names, memory, pinned)
        matrices: dict[tuple[str, str], list[Tensor]] = {}
        vectors: dict[tuple[str, str], list[Tensor]] = {}
        for name in names:
            for kind, parts in zip(("weight", "bias"), binding.parts(name), strict=True):
                if parts:
                    found_of_kind = matrices if parts[0].dim() > 1 else vectors
                    found_of_kind[name, kind] = parts
            for path in binding.groups[name]:
                for label, scale in labelled_scales(binding.stored(path)):
                    if lies_away(scale, self.device):
                        vectors[path, label] = [scale]
        # Nothing here keeps them alive.
        self._matrices = {name: list(map(MemorySpan.of, parts)) for (name, _), parts in matrices.items()}
        sizes = self._sizes_of(units)
        self._ring_bytes = max(2 * max(sizes), min(RING, sum(sizes)))
        # Made when a matrix is copied.
        self._ring = room_of(0, self.device)
        spans: dict[tuple[str, str], list[MemorySpan]] = {}
        for key, parts in vectors.items():
            spans[key] = [MemorySpan.of(part.reshape(-1)) for part in parts]
        self._room = room_of(sum(map(size_of, spans.values())), self.device)
        self._vectors: dict[tuple[str, str], Tensor] = {}
        copies: list[Copy] = []
        start = 0
        for key, found in spans.items():
            self._vectors[key] = staged(found, self._room, start, copies)
            start += size_of(found)
        self._copies_of_vectors = joined(copies, self._room)

    def _pin(self, binding: Binding, names: Sequence[str], memory: MainMemory, pinned: bool) -> None:
        """Have what is copied lie in pinned memory: matrices one after the other, so that one copy takes many, then the
        vectors. Raises Refusal for scales that lie apart in memory."""
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for name in names:
            for part in chain(*binding.holders(name)):
                (matrices if part.dim() > 1 else vectors).append(part)
            for path in binding.groups[name]:
                vectors += [scale for _, scale in labelled_scales(binding.stored(path))]
        for part in (*matrices, *vectors):
            pin(part, memory, pinned)

    @property
    def bytes(self) -> int:
        """GPU memory of the ring and of the vectors."""
        return self._room.nbytes + self._ring.nbytes

    def copied(self, left_out: Collection[str] = ()) -> int:
        """Bytes of matrices that every call copies. left_out: layers whose matrices are not read."""
        return sum(size_of(parts) for name, parts in self._matrices.items() if name not in left_out)

    def forward(self, units: Units, left_out: frozenset[str]) -> StreamedForward:
        """The copies of one forward. units: the order in which it reads its layers. left_out: layers whose matrices it
        does not read."""
        key = tuple(map(tuple, units)), left_out
        if key not in self._schedules:
            self._schedules[key] = self._schedule(units, left_out)
        return StreamedForward(self, self._schedules[key])

    def _schedule(self, units: Units, left_out: frozenset[str]) -> CopySchedule:
        copied = self._matrices.keys() - left_out
        streamed: list[list[str]] = []
        for unit in units:
            streamed.append([name for name in unit if name in copied])
        sizes = self._sizes_of(streamed)
        if any(sizes) and not len(self._ring):
            self._ring = room_of(self._ring_bytes, self.device)
        chunks = chunks_of(sizes, self._ring_bytes)
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(units):
            unit_of.update(dict.fromkeys(unit, index))
        schedule = CopySchedule(len(units), unit_of, chunks, [], {}, {})
        first = 0
        for number, chunk in enumerate(chunks):
            start = chunk.start
            copies: list[Copy] = []
            for name in chain.from_iterable(streamed[first:chunk.last_unit + 1]):
                schedule.staged[name] = staged(self._matrices[name], self._ring, start, copies)
                schedule.chunk_of[name] = number
                start += size_of(self._matrices[name])
            schedule.copies.append(joined(copies, self._ring))
            first = chunk.last_unit + 1
        return schedule

    def _sizes_of(self, units: Units) -> list[int]:
        """The bytes of the matrices of each unit that are away."""
        return [sum(size_of(self._matrices.get(name, ())) for name in unit) for unit in units]

    def begin(self) -> None:
        """Copy all vectors, which every forward does first."""
        self.lane.wait(self.lane.copy(self._copies_of_vectors, self.lane.computed()))

    def vector(self, name: str, kind: str) -> Tensor | None:
        """The copy of a layer's vector. kind: "weight" or "bias". None where it is not copied."""
        return self._vectors.get((name, kind))

    def scales(self, path: str, stored: StoredWeight) -> list[Tensor]:
        """The scales of a weight in few bits on the device that computes: copies of those that are away."""
        found: list[Tensor] = []
        for label, scale in labelled_scales(stored):
            copy = self._vectors.get((path, label))
            found.append(scale if copy is None else copy.view(scale.shape))
        return found

    def content(self, names: Collection[str]) -> int:
        """A checksum of the first row of each matrix in main memory, which shows edits that torch does not count
        (weight.data += ...). Some milliseconds for SDXL."""
        found = 0
        for name in names:
            for span in self._matrices.get(name, ()):
                if span.device.type == "cpu" and span.is_alive:
                    found = zlib.crc32(ctypes.string_at(span.address, span.nbytes // span.layout[0][0]), found)
        return found

    def alone(self, name: str) -> Tensor:
        """A layer's matrix in memory of its own."""
        return in_one(list(map(tensor_at, self._matrices[name])), self.device)


def streaming_of(binding: Binding, units: Units, memory: MainMemory) -> Streaming:
    """For what computes on a GPU. Raises what Streaming raises."""
    if binding.device.type != "cuda":
        raise Refusal(f"a part of its weights is in main memory, from where none is copied for {binding.device.type}")
    return Streaming(binding, units, CopyStream(binding.device), memory, pinned=True)


class StreamedForward:
    """The copies of one forward, in the order in which it reads its layers."""

    def __init__(self, streaming: Streaming, schedule: CopySchedule) -> None:
        self._streaming = streaming
        self._copy_schedule = schedule
        self._unit = -1
        # Behind the copies of each chunk that nobody has waited for yet; how many are on their way or there.
        self._marks: dict[int, torch.cuda.Event] = {}
        self._begun = 0

    def weight(self, name: str) -> Tensor | None:
        """The copy of a layer's weight, complete once the launches so far have run; None where it is not copied. Starts
        the copies that take the place of earlier units, which were launched."""
        schedule = self._copy_schedule
        unit = schedule.unit_of.get(name, -1)
        if unit > self._unit:
            self._go_on(unit)
        chunk = schedule.chunk_of.get(name)
        if chunk is None:
            return self._streaming.vector(name, "weight")
        if unit < self._unit:
            # What it was copied to may hold another by now.
            return self._streaming.alone(name)
        self._wait(chunk)
        return schedule.staged[name]

    def bias(self, name: str) -> Tensor | None:
        """The copy of a layer's bias; None where it is not copied."""
        if self._unit < 0:
            self._go_on(0)
        return self._streaming.vector(name, "bias")

    def _go_on(self, unit: int) -> None:
        """The forward comes to a unit: whatever reads the units before is launched, so start the copies that take
        their place."""
        chunks = self._copy_schedule.chunks
        lane = self._streaming.lane
        if self._unit < 0:
            self._streaming.begin()
        self._unit = unit
        computed: torch.cuda.Event | None = None
        while self._begun < len(chunks):
            waits = chunks[self._begun].waits
            if waits and chunks[waits - 1].last_unit >= unit:
                break
            computed = lane.computed() if computed is None else computed
            self._marks[self._begun] = lane.copy(self._copy_schedule.copies[self._begun], computed)
            self._begun += 1
        if unit == self._copy_schedule.units - 1 and self._marks:
            # Nothing is on its way when the forward ends: a capture has to find its streams together.
            self._wait(max(self._marks))

    def _wait(self, chunk: int) -> None:
        mark = self._marks.pop(chunk, None)
        if mark is not None:
            self._streaming.lane.wait(mark)


def labelled_scales(stored: StoredWeight | None) -> Iterator[tuple[str, Tensor]]:
    """The scales of a weight, each with a name."""
    if stored is not None:
        for index, scale in enumerate(stored.scales):
            yield f"scale {index}", scale


def room_of(size: int, device: torch.device) -> Tensor:
    """Bytes that can be written in any mode. Raises torch.cuda.OutOfMemoryError."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


def size_of(spans: Sequence[MemorySpan]) -> int:
    """The bytes that they take one after the other, so that what follows is aligned."""
    return aligned(sum(span.nbytes for span in spans))


def staged(spans: Sequence[MemorySpan], room: Tensor, start: int, copies: list[Copy]) -> Tensor:
    """Where tensors, (rows, ...) each, are one after the other in a room of bytes, from a start on; with what has to be
    copied for that."""
    (_, *shape), stride, dtype, _ = spans[0].layout
    end = start
    for span in spans:
        copies.append((end, span))
        end += span.nbytes
    rows = sum(span.layout[0][0] for span in spans)
    return room[start:end].view(dtype).as_strided((rows, *shape), stride)


def tensor_at(span: MemorySpan) -> Tensor:
    """Raises ReferenceError if its memory is gone."""
    shape, stride, dtype, _ = span.layout
    return span.bytes().view(dtype).as_strided(shape, stride)


def joined(copies: Sequence[Copy], room: Tensor) -> list[tuple[Tensor, MemorySpan]]:
    """The same copies, in one where they lie one after the other at both ends."""
    found: list[Copy] = []
    for start, span in copies:
        if found:
            before, other = found[-1]
            is_beside = span.address - other.address == start - before == aligned(other.nbytes)
            if is_beside and span.storage.cdata == other.storage.cdata:
                found[-1] = before, other._replace(nbytes=start - before + span.nbytes)
                continue
        found.append((start, span))
    return [(room[start:start + span.nbytes], span) for start, span in found]


def pin(parameter: Tensor, memory: MainMemory, pinned: bool) -> None:
    """Have a parameter of main memory lie there in one piece, from which a GPU copies by itself (pinned).
    Raises Refusal where there is no room."""
    lies_well = is_dense(parameter) and (parameter.is_pinned() or not pinned)
    if parameter.device.type != "cpu" or lies_well:
        return
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
        source = parameter.data if is_dense(parameter) else copy_of(parameter, torch.contiguous_format)
        room = memory.empty(source.numel(), source.dtype, pinned)
        room.set_(room.untyped_storage(), room.storage_offset(), source.shape, source.stride())
        parameter.data = copy_into(room, source)


def is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
