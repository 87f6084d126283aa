"""One CUDA graph per shape: the launches of a whole UNet are recorded once and replayed as one.

The graphs of an architecture share one memory pool, so their intermediates lie over each other; this is safe because
one replay ends before the next begins and outputs are copied out. A graph holds addresses, not tensors: whoever replays
it must know that the weights still lie where they were.
"""
from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ....core.call import Call
from ....core.device_memory import Card
from ....core.family import Output
from ....core.layer_weights import Source
from ....core.operators import Operators
from ....core.weak_dictionary import WeakDictionary
from .segments import GraphRecording, GraphRunner, record, time_in_graph

log = logging.getLogger("onediff")
Result = TypeVar("Result")
# torch hands out memory in such pieces.
PIECE = 512
# What a UNet allocates in one call is a few thousand tensors.
MOST_EVENTS = 1_000_000
# What torch says of its max_split_size_mb where the user has set none.
UNLIMITED = -1


class Pool:
    """The memory that the graphs of one architecture share on one device.

    It lives as long as anybody holds this, with or without graphs in it: what a graph leaves, the next one takes. Then
    torch gives it back when its cache is emptied.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.bytes = 0
        self.is_fresh = True
        # torch gives a pool up with its last graph, so there is one that stays.
        before = torch.cuda.memory_reserved(device)
        recording = GraphRecording(self.handle, stream)
        with recording.ended_on_failure():
            recording.begin()
            self._anchored = torch.zeros(1, dtype=torch.float32, device=device)
            self._anchor = recording.stop()
        self.grown_since(before)

    def grown_since(self, reserved: int) -> None:
        """Note how large it is now. reserved: what torch held before it grew."""
        try:
            # Exact, whatever other threads have allocated meanwhile.
            self.bytes = sum(
                segment["total_size"] for segment in torch.cuda.memory_snapshot()
                if tuple(segment["segment_pool_id"]) == tuple(self.handle)
            )
        except (RuntimeError, KeyError):
            # Other allocators than torch's own show no segments.
            self.bytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)


class CudaGraphs:
    """Makes graphs on one memory pool per architecture and one capture stream per device.

    One stream, because cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever run on.
    """

    def __init__(self, output: Output) -> None:
        """output: computes a call; see Families.output."""
        self._output = output
        # Nothing here keeps a pool alive: its graphs do, and who has made graphs in it.
        self._pools: weakref.WeakValueDictionary[tuple[torch.device, str], Pool] = weakref.WeakValueDictionary()
        # Those that a capture has failed in are no longer in the other. Looked at by threads that make no graphs.
        self._alive: WeakDictionary[Pool, None] = WeakDictionary()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(
        self, architecture: str, source: Source, ops: Operators, inputs: Call, needs: int = 0
    ) -> GraphRunner:
        """Capture the forward for calls of this shape, with cloned_inputs of one. Such a call must have been made in
        this thread before, by the same operators: it loaded kernels and chose algorithms, which a capture must not do.
        Where functions of other extensions run within it, it is computed and they are called.

        needs: what the graph will take of the pool. A new pool gets that in one piece: with less waste than in many,
        and what smaller graphs take fits into it too.
        Raises RuntimeError where an operation cannot be captured and torch.cuda.OutOfMemoryError.
        """
        device = inputs.latent.device
        with torch.cuda.device(device):
            stream = self._stream(device, source.dtype)
            pool = self._pool(device, architecture, stream)
            before = torch.cuda.memory_reserved(device)
            piece = needs if pool.is_fresh and self.in_one_piece(device) else 0
            stream.wait_stream(torch.cuda.current_stream())
            recording = GraphRecording(pool.handle, stream, piece)
            weights = source.weights()
            try:
                with recording.ended_on_failure():
                    runner = record(
                        recording, inputs, pool, lambda call: self._output(source.layout, weights, ops, call)
                    )
            except BaseException:
                # torch may believe that this pool is still being recorded to, and would refuse every further capture.
                del self._pools[device, architecture]
                raise
            pool.is_fresh = False
            pool.grown_since(before)
        return runner

    def bytes(self, device: torch.device, architecture: str | None = None) -> int:
        """How much memory the pools of a device hold, or that of one architecture alone."""
        if architecture is not None:
            pool = self._pools.get((device, architecture))
            return 0 if pool is None else pool.bytes
        return sum(pool.bytes for pool in self._alive if pool.device == device)

    def devices(self) -> set[torch.device]:
        """Those that have pools."""
        return {pool.device for pool in self._alive}

    def in_one_piece(self, device: torch.device) -> bool:
        """Whether torch serves small requests from a block of any size, and a new pool can be one (no max_split_size_mb
        in its configuration)."""
        return device.type != "cuda" or torch.cuda.memory_stats(device).get("max_split_size") == UNLIMITED

    def peak(self, device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
        """What work() returns, and the bytes that it had in use at most, beside what was in use before.

        torch's peak can only be begun anew for everybody, and a host shows it to its user (A1111 below every image). So
        every allocation is recorded while the work runs, by what torch offers for memory snapshots, and added up.
        Where torch cannot record, or somebody else does: no less than these bytes, by torch's own peak.
        """
        if device.type != "cuda":
            return work(), 0
        before = torch.cuda.memory_allocated(device)
        highest = torch.cuda.max_memory_allocated(device)
        recording = begin_recording()
        try:
            result = work()
            events = recorded(device) if recording else None
        finally:
            if recording:
                # What was recorded is dropped with this.
                torch.cuda.memory._record_memory_history(None)
        if events is not None:
            return result, most_in_use(events)
        return result, max(highest, torch.cuda.max_memory_allocated(device)) - before

    def time_ms(self, device: torch.device, dtype: torch.dtype, work: Callable[[], object]) -> float:
        """How long a run of work takes in a graph. dtype: of its matrix products. Raises RuntimeError where it cannot
        be captured."""
        with torch.cuda.device(device):
            try:
                return time_in_graph(work, self._stream(device, dtype))
            except torch.cuda.OutOfMemoryError:
                # A capture cannot ask torch for what it keeps unused.
                Card.empty_cache()
                return time_in_graph(work, self._stream(device, dtype))

    def _stream(self, device: torch.device, dtype: torch.dtype) -> torch.cuda.Stream:
        if device not in self._streams:
            stream = torch.cuda.Stream()
            give_workspaces(stream, dtype)
            self._streams[device] = stream
        return self._streams[device]

    def _pool(self, device: torch.device, architecture: str, stream: torch.cuda.Stream) -> Pool:
        pool = self._pools.get((device, architecture))
        if pool is None:
            # A pool that was given up may still be there, and a capture cannot ask torch for its memory.
            Card.empty_cache()
            pool = self._pools[device, architecture] = Pool(device, stream)
            self._alive[pool] = None
        return pool


def give_workspaces(stream: torch.cuda.Stream, dtype: torch.dtype) -> None:
    """Let the matrix libraries allocate what they keep for a stream now, and not in the memory of the first graph."""
    with torch.cuda.stream(stream):
        square = torch.ones((64, 64), device=stream.device, dtype=dtype)
        torch.nn.functional.linear(square, square, square[0])
        torch.bmm(square[None], square[None])
    stream.synchronize()


def begin_recording() -> bool:
    """Have torch record allocations, without their places in the code; whether it does, and nobody had it do so."""
    is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_recording is None or is_recording():
        return False
    try:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
    except (AttributeError, TypeError, RuntimeError) as refusal:
        log.debug("torch records no allocations here: %s", refusal)
        return False
    return True


def recorded(device: torch.device) -> list[Mapping[str, Any]] | None:
    """What was allocated and freed on a device since the recording began; None where torch does not say."""
    try:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        return traces[device.index if device.index is not None else torch.cuda.current_device()]
    except (AttributeError, RuntimeError, KeyError, IndexError) as refusal:
        log.debug("torch does not say what it recorded: %s", refusal)
        return None


def most_in_use(events: Iterable[Mapping[str, Any]]) -> int:
    """The most bytes that were in use at a time, of what was allocated in these events."""
    sizes: dict[int, int] = {}
    in_use = 0
    most = 0
    for event in events:
        if event["action"] == "alloc":
            size = -(-event["size"] // PIECE) * PIECE
            sizes[event["addr"]] = size
            in_use += size
            most = max(most, in_use)
        elif event["action"] == "free_completed":
            in_use -= sizes.pop(event["addr"], 0)
    return most
