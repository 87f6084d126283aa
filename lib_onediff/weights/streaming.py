"""Streams weights from main memory: copies them to the GPU while it computes, ahead of the layers that read them.

A forward reads its weights unit by unit. A unit is a group of layers, such as a block, given as the list of their names
(core.family.Family.units). Matrices in main memory are copied on a CUDA stream of their own into a ring buffer on the
GPU, and are overwritten once their unit was computed. Vectors (biases, norms, scales: 0.1 % of the bytes) are all
copied when the forward begins. Every call copies its weights again, so that no copy outlives a call. A CUDA graph
contains the copies as a branch beside its kernels.
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
from .binding import Binding
from .contents import MemorySpan
from .exact_copy import copy_into, copy_of
from .joining import in_one, lies_away
from .main_memory import MainMemory, aligned
from .stored import StoredWeight

# In bytes. Smaller copies spend more time on their launch than on the transfer.
LEAST_CHUNK = 16 << 20
# Bytes of the ring; more if twice the largest unit takes more, less if all units together take less.
RING = 256 << 20
# The names of each unit's layers, in reading order.
Units = Sequence[Sequence[str]]
# (the first byte of the target, in the ring or the buffer for vectors; the source in main memory).
Copy = tuple[int, MemorySpan]
# (the target, (bytes,) of uint8 on the GPU; the source in main memory).
Copies = Sequence[tuple[Tensor, MemorySpan]]


class CopyStream:
    """Launches copies to a GPU on a CUDA stream of its own, so that they run while the GPU computes. The methods only
    launch, and do not wait. A mark is a CUDA event, which orders this stream and the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def computed(self) -> torch.cuda.Event:
        """A new mark after everything launched so far on the current stream, which computes."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, copies: Copies, after: torch.cuda.Event) -> torch.cuda.Event:
        """Launch copies that begin after the mark `after` and after all earlier copies. Returns a mark after them.
        Raises ReferenceError if the memory of a source was freed."""
        event = torch.cuda.Event()
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for target, span in copies:
                target.copy_(span.bytes(), non_blocking=True)
            event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Let everything that is launched from now on on the current stream begin after a mark."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class Chunk(NamedTuple):
    """The streamed matrices of one unit, or of several consecutive ones, that are copied together.

    last_unit: the index of the last unit that reads it.
    start, size: its first byte and its bytes in the ring.
    waits: a number n: the first n chunks must have been read before this one is written, because it overwrites the last
        of them. 0: it overwrites none.
    """

    last_unit: int
    start: int
    size: int
    waits: int = 0


def chunks_of(sizes: Sequence[int], ring: int, least: int = LEAST_CHUNK) -> list[Chunk]:
    """The chunks for units with these sizes, in the order of their copies. sizes: the bytes of each unit's streamed
    matrices; 0: the unit has none, and gets no chunk. ring: the bytes of the ring, at least twice those of the largest
    unit. least: consecutive units with fewer bytes share a chunk."""
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
    """The number of earlier chunks, counted from the first, that must have been read before this one is written: all up
    to the last one that overlaps it in the ring; 0 if none does. See Chunk.waits."""
    end = chunk.start + chunk.size
    found = 0
    for number, other in enumerate(earlier, 1):
        if other.start < end and chunk.start < other.start + other.size:
            found = number
    return found


class CopySchedule(NamedTuple):
    """The copies that every run of a forward makes; see StreamedForward.

    units: the number of units.
    unit_of: the index of each layer's unit, by the layer's name.
    chunks: in the order of their copies.
    copies: the copies of each chunk, in the order of chunks.
    chunk_of, staged: by the name of each layer whose matrix is streamed, the index of its chunk, and the view of the
        ring that its matrix is copied to.
    """

    units: int
    unit_of: dict[str, int]
    chunks: list[Chunk]
    copies: list[Copies]
    chunk_of: dict[str, int]
    staged: dict[str, Tensor]


class Streaming:
    """Streams those weights of a network that are in main memory (Binding.away) to the device that computes. Has the
    ring and the copies of vectors. An object is valid until a parameter moves.

    device: the one that computes.
    copy_stream: launches the copies.
    members: the members of fused layers; see Binding.fusion_of.
    """

    def __init__(
        self, binding: Binding, units: Units, copy_stream: CopyStream, memory: MainMemory, pinned: bool
    ) -> None:
        """Moves the host's parameters in main memory to pinned memory (Parameter.data), from which a GPU can copy
        while it computes, and allocates the buffer for vectors. The ring is allocated when a forward first needs it.

        units: of the whole network. memory: allocates the pinned memory. pinned: False in tests without a GPU, which
        cannot pin. Raises Refusal if there is too little main memory, and torch.cuda.OutOfMemoryError.
        """
        self.device = binding.device
        self.copy_stream = copy_stream
        self._schedules: dict[Hashable, CopySchedule] = {}
        # The first row and the number of rows of each member of a fused layer.
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
                for label, scale in labelled_scales(binding.layers.stored(path)):
                    if lies_away(scale, self.device):
                        vectors[path, label] = [scale]
        # Spans do not keep the weights alive.
        self._matrices = {name: list(map(MemorySpan.of, parts)) for (name, _), parts in matrices.items()}
        sizes = self._sizes_of(units)
        self._ring_bytes = max(2 * max(sizes), min(RING, sum(sizes)))
        # Allocated when the first matrix is to be copied.
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
        self._copies_of_vectors = merged_neighbours(copies, self._room)

    def _pin(self, binding: Binding, names: Sequence[str], memory: MainMemory, pinned: bool) -> None:
        """Move the weights of these layers to pinned memory, in place: the matrices one after the other, so that one
        copy can take many, then the vectors. Raises Refusal if there is too little main memory."""
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for name in names:
            for part in chain(*binding.holders(name)):
                (matrices if part.dim() > 1 else vectors).append(part)
            for path in binding.groups[name]:
                vectors += [scale for _, scale in labelled_scales(binding.layers.stored(path))]
        for part in (*matrices, *vectors):
            pin(part, memory, pinned)

    @property
    def bytes(self) -> int:
        """The bytes of GPU memory of the ring and of the copied vectors."""
        return self._room.nbytes + self._ring.nbytes

    def copied(self, left_out: Collection[str] = ()) -> int:
        """The bytes of matrices that each call copies. left_out: names of layers whose matrices it does not read."""
        return sum(size_of(parts) for name, parts in self._matrices.items() if name not in left_out)

    def forward(self, units: Units, left_out: frozenset[str]) -> StreamedForward:
        """A new StreamedForward for one run of a forward. Its schedule is made once for equal arguments.

        units: the layers that this forward reads, in reading order. left_out: names of layers whose matrices it does
        not read. Raises torch.cuda.OutOfMemoryError.
        """
        key = tuple(map(tuple, units)), left_out
        if key not in self._schedules:
            self._schedules[key] = self._schedule(units, left_out)
        return StreamedForward(self, self._schedules[key])

    def _schedule(self, units: Units, left_out: frozenset[str]) -> CopySchedule:
        """The schedule for forward() with these arguments. Allocates the ring if there is none yet."""
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
            schedule.copies.append(merged_neighbours(copies, self._ring))
            first = chunk.last_unit + 1
        return schedule

    def _sizes_of(self, units: Units) -> list[int]:
        """For each unit, the bytes of its streamed matrices; other layers count as 0."""
        return [sum(size_of(self._matrices.get(name, ())) for name in unit) for unit in units]

    def begin(self) -> None:
        """Launch the copies of all vectors. A StreamedForward calls this when its forward begins."""
        self.copy_stream.wait(self.copy_stream.copy(self._copies_of_vectors, self.copy_stream.computed()))

    def vector(self, name: str, kind: str) -> Tensor | None:
        """The copy on the GPU of a layer's weight or bias, if this is a vector that is streamed; otherwise None. kind:
        "weight" or "bias"."""
        return self._vectors.get((name, kind))

    def scales(self, path: str, stored: StoredWeight) -> list[Tensor]:
        """The scales of a weight in 4 or 8 bits, on the device that computes: for those that are streamed, their
        copies. path: of the layer."""
        found: list[Tensor] = []
        for label, scale in labelled_scales(stored):
            copy = self._vectors.get((path, label))
            found.append(scale if copy is None else copy.view(scale.shape))
        return found

    def content(self, names: Collection[str]) -> int:
        """A checksum of the first row of each of these layers' matrices in main memory, to compare with a later result:
        it finds edits of whole matrices that torch does not count (weight.data += ...). 0 if none of them is streamed.
        Takes some milliseconds for SDXL."""
        found = 0
        for name in names:
            for span in self._matrices.get(name, ()):
                if span.device.type == "cpu" and span.is_alive:
                    found = zlib.crc32(ctypes.string_at(span.address, span.nbytes // span.layout[0][0]), found)
        return found

    def alone(self, name: str) -> Tensor:
        """A new copy of a layer's streamed matrix on the device that computes, in memory of its own and not in the
        ring. KeyError for a layer without such a matrix."""
        return in_one(list(map(tensor_at, self._matrices[name])), self.device)


def streaming_of(binding: Binding, units: Units, memory: MainMemory) -> Streaming:
    """A new Streaming for a network that computes on a CUDA device; see Streaming. Also raises Refusal for any other
    device."""
    if binding.device.type != "cuda":
        raise Refusal(
            "a part of the model is in main memory (RAM), and OneDiff cannot copy it to this device "
            f"({binding.device.type}) during a step"
        )
    return Streaming(binding, units, CopyStream(binding.device), memory, pinned=True)


class StreamedForward:
    """The streamed weights of one run of a forward. The forward must call weight() and bias() in its reading order:
    each call shows how far it is, and so which parts of the ring may be overwritten. A run needs a new object."""

    def __init__(self, streaming: Streaming, schedule: CopySchedule) -> None:
        """schedule: of this forward; made by Streaming.forward(), which constructs these objects."""
        self._streaming = streaming
        self._copy_schedule = schedule
        self._unit = -1
        # The marks after the copies of each chunk, until the forward has waited for them.
        self._marks: dict[int, torch.cuda.Event] = {}
        # The number of chunks whose copies are launched.
        self._begun = 0

    def weight(self, name: str) -> Tensor | None:
        """The copy on the GPU of a layer's weight; None if it is not streamed, or a matrix of a layer in `left_out`
        (Streaming.forward). Work launched from now on sees the complete copy.

        Call it for a layer of a new unit when all work of the earlier units is launched: it launches copies that
        overwrite the weights of the earlier units in the ring. The weight of an earlier unit's layer is copied once
        more.
        """
        schedule = self._copy_schedule
        unit = schedule.unit_of.get(name, -1)
        if unit > self._unit:
            self._go_on(unit)
        chunk = schedule.chunk_of.get(name)
        if chunk is None:
            return self._streaming.vector(name, "weight")
        if unit < self._unit:
            # A layer of an earlier unit: its memory in the ring may have been overwritten.
            return self._streaming.alone(name)
        self._wait(chunk)
        return schedule.staged[name]

    def bias(self, name: str) -> Tensor | None:
        """The copy on the GPU of a layer's bias; None if it is not streamed, or the layer has none."""
        if self._unit < 0:
            self._go_on(0)
        return self._streaming.vector(name, "bias")

    def _go_on(self, unit: int) -> None:
        """Note that the forward has reached the unit with this index, so that all readers of the units before it are
        launched, and launch all copies that overwrite only chunks of the units before it."""
        chunks = self._copy_schedule.chunks
        copy_stream = self._streaming.copy_stream
        if self._unit < 0:
            self._streaming.begin()
        self._unit = unit
        computed: torch.cuda.Event | None = None
        while self._begun < len(chunks):
            waits = chunks[self._begun].waits
            if waits and chunks[waits - 1].last_unit >= unit:
                break
            computed = copy_stream.computed() if computed is None else computed
            self._marks[self._begun] = copy_stream.copy(self._copy_schedule.copies[self._begun], computed)
            self._begun += 1
        if unit == self._copy_schedule.units - 1 and self._marks:
            # All copies end before the forward does, because a capture must join its streams.
            self._wait(max(self._marks))

    def _wait(self, chunk: int) -> None:
        """Let work that is launched from now on begin after the copies of the chunk with this index."""
        mark = self._marks.pop(chunk, None)
        if mark is not None:
            self._streaming.copy_stream.wait(mark)


def labelled_scales(stored: StoredWeight | None) -> Iterator[tuple[str, Tensor]]:
    """The scales of a weight in 4 or 8 bits, each with its label: ("scale 0", tensor), and so on. Empty for None."""
    if stored is not None:
        for index, scale in enumerate(stored.scales):
            yield f"scale {index}", scale


def room_of(size: int, device: torch.device) -> Tensor:
    """A new uninitialised buffer, (size,) of uint8, on a device. It is not an inference tensor, so it can be written in
    any mode. Raises torch.cuda.OutOfMemoryError."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device=device)


def size_of(spans: Sequence[MemorySpan]) -> int:
    """The bytes that these spans take one after the other, rounded up so that a tensor after them is aligned."""
    return aligned(sum(span.nbytes for span in spans))


def staged(spans: Sequence[MemorySpan], room: Tensor, start: int, copies: list[Copy]) -> Tensor:
    """A view of the buffer `room`, from the byte `start` on, with the shape of these tensors (rows, ...) one below the
    other. Nothing is copied yet: the copies that fill it are appended to `copies`. spans: of the tensors, which have
    one dtype, and equal shapes but for their rows."""
    (_, *shape), stride, dtype, _ = spans[0].layout
    end = start
    for span in spans:
        copies.append((end, span))
        end += span.nbytes
    rows = sum(span.layout[0][0] for span in spans)
    return room[start:end].view(dtype).as_strided((rows, *shape), stride)


def tensor_at(span: MemorySpan) -> Tensor:
    """A new tensor object over the memory of a span, with the layout of the tensor that it was made of. Raises
    ReferenceError if the memory was freed."""
    shape, stride, dtype, _ = span.layout
    return span.bytes().view(dtype).as_strided(shape, stride)


def merged_neighbours(copies: Sequence[Copy], room: Tensor) -> list[tuple[Tensor, MemorySpan]]:
    """The copies as (target, source), where copies that follow each other without a gap in both the source and the
    buffer `room` are merged into one, to save launches."""
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
    """Move a parameter in main memory to other memory there (Parameter.data), in which it has no gaps, and which is
    pinned if `pinned`. Does nothing if it is in such memory already, or on a GPU. Raises Refusal if there is no room.
    """
    has_no_gaps = is_contiguous_or_channels_last(parameter)
    if parameter.device.type != "cpu" or (has_no_gaps and (parameter.is_pinned() or not pinned)):
        return
    with torch.no_grad(), torch.inference_mode(parameter.is_inference()):
        source = parameter.data if has_no_gaps else copy_of(parameter, torch.contiguous_format)
        room = memory.empty(source.numel(), source.dtype, pinned)
        room.set_(room.untyped_storage(), room.storage_offset(), source.shape, source.stride())
        parameter.data = copy_into(room, source)


def is_contiguous_or_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, or an image or convolution weight in channels-last order."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
