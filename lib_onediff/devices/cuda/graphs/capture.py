"""Captures one CUDA graph for each shape: the kernel launches of a network's forward are recorded once and replayed by
one launch.

The graphs of an architecture share one memory pool, in which their intermediate tensors overlap. This is safe, because
one replay ends before the next begins, and outputs are copied out. A graph contains addresses, not tensors:
before a replay, its caller makes sure that the weights have not moved.
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
# torch rounds the size of an allocation up to a multiple of this, in bytes.
PIECE = 512
# The largest number of allocations recorded. A UNet allocates a few thousand tensors in a call.
MOST_EVENTS = 1_000_000
# The value of max_split_size in torch's statistics if the user has not set max_split_size_mb.
UNLIMITED = -1


class Pool:
    """The memory pool that the graphs of one architecture share on one device.

    The memory is kept as long as this object, with or without graphs in it, and the next graph reuses it. When the
    object is gone, torch frees the memory as soon as its cache is emptied.

    device: of the memory. stream: the stream on which graphs are captured.
    handle: torch's handle of the pool. bytes: the pool's size, as of the last grown_since().
    is_fresh: whether no forward has been captured into it yet.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.bytes = 0
        self.is_fresh = True
        # torch frees a pool with its last graph. This small graph keeps it.
        before = torch.cuda.memory_reserved(device)
        recording = GraphRecording(self.handle, stream)
        with recording.ended_on_failure():
            recording.begin()
            self._anchored = torch.zeros(1, dtype=torch.float32, device=device)
            self._anchor = recording.stop()
        self.grown_since(before)

    def grown_since(self, reserved: int) -> None:
        """Set `bytes` to the pool's present size. Call it after each capture. reserved: torch.cuda.memory_reserved()
        from before the capture, by which the growth is estimated if the allocator does not list its segments."""
        try:
            # Exact, also if other threads have allocated memory meanwhile.
            self.bytes = sum(
                segment["total_size"] for segment in torch.cuda.memory_snapshot()
                if tuple(segment["segment_pool_id"]) == tuple(self.handle)
            )
        except (RuntimeError, KeyError):
            # Only torch's native allocator has segments.
            self.bytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)


class CudaGraphs:
    """The core.device.GraphMaker for CUDA: one memory pool per architecture, and one capture stream per device.

    One stream, because cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has run on.

    output: computes a call; see Families.output.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        # Weak references, because the graphs in a pool keep it alive.
        self._pools: weakref.WeakValueDictionary[tuple[torch.device, str], Pool] = weakref.WeakValueDictionary()
        # All pools that exist, also those that were removed from _pools after a failed capture. Read by other threads.
        self._alive: WeakDictionary[Pool, None] = WeakDictionary()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(
        self, architecture: str, source: Source, ops: Operators, inputs: Call, needs: int = 0
    ) -> GraphRunner:
        """Capture the forward for calls of this shape. Returns the runner that replays it.

        architecture: of the network's layout; its graphs share a pool. source: the layout and the weights. inputs: a
        call of this shape whose tensors are clones (core.inputs.cloned_inputs); they become the runner's static inputs.
        Such a call must have been computed in this thread before, by the same operators, because a capture must not
        load kernels or choose algorithms. With functions of other extensions, the forward is also computed, and they
        are called.

        needs: bytes that the graph will take of the pool. A new pool gets them in one piece, which wastes less than
        many pieces, and which smaller graphs fit into as well.
        Raises RuntimeError if an operation cannot be captured, torch.cuda.OutOfMemoryError, and what the forward and
        the functions raise. After a failure, the architecture's next graph gets a new pool; earlier graphs stay valid.
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
                # torch may regard this pool as still being captured into, and would refuse other captures.
                del self._pools[device, architecture]
                raise
            pool.is_fresh = False
            pool.grown_since(before)
        return runner

    def bytes(self, device: torch.device, architecture: str | None = None) -> int:
        """The bytes of all pools on a device; or, with an architecture, of the pool that its next graph will use. 0 if
        there is none."""
        if architecture is not None:
            pool = self._pools.get((device, architecture))
            return 0 if pool is None else pool.bytes
        return sum(pool.bytes for pool in self._alive if pool.device == device)

    def devices(self) -> set[torch.device]:
        """The torch.devices on which there are pools."""
        return {pool.device for pool in self._alive}

    def in_one_piece(self, device: torch.device) -> bool:
        """Whether a new pool on this device is allocated as one large block. False if the user has set
        max_split_size_mb: torch then does not split large blocks for small allocations. True for other devices than
        CUDA."""
        return device.type != "cuda" or torch.cuda.memory_stats(device).get("max_split_size") == UNLIMITED

    def peak(self, device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
        """The result of work(), and the largest number of bytes that its tensors took at one time; 0 for another device
        than CUDA. Raises what work() raises.

        torch's own peak statistics are not reset for this, because hosts show them to users (A1111 below every image).
        Instead, torch's memory history records all allocations during work(). If torch cannot record, or another
        program already does, the result is an upper bound from torch's peak statistics.
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
                # This also drops the recorded events.
                torch.cuda.memory._record_memory_history(None)
        if events is not None:
            return result, most_in_use(events)
        return result, max(highest, torch.cuda.max_memory_allocated(device)) - before

    def time_ms(self, device: torch.device, dtype: torch.dtype, work: Callable[[], object]) -> float:
        """The median duration of work() in milliseconds, measured in a CUDA graph, so without Python's overhead: see
        time_in_graph, which is called again after torch's cache was emptied if it runs out of memory. dtype: of the
        matrix products in work(). Raises RuntimeError if work() cannot be captured, and torch.cuda.OutOfMemoryError."""
        with torch.cuda.device(device):
            try:
                return time_in_graph(work, self._stream(device, dtype))
            except torch.cuda.OutOfMemoryError:
                # A capture cannot use memory that torch keeps reserved outside of its pool.
                Card.empty_cache()
                return time_in_graph(work, self._stream(device, dtype))

    def _stream(self, device: torch.device, dtype: torch.dtype) -> torch.cuda.Stream:
        """The capture stream of a device, made at the first call. The device must be torch's current one. dtype: of the
        matrix products by which give_workspaces prepares a new stream."""
        if device not in self._streams:
            stream = torch.cuda.Stream()
            give_workspaces(stream, dtype)
            self._streams[device] = stream
        return self._streams[device]

    def _pool(self, device: torch.device, architecture: str, stream: torch.cuda.Stream) -> Pool:
        """The pool of an architecture on a device. If there is none, torch's cache is emptied and a pool made, whose
        graphs are captured on `stream`."""
        pool = self._pools.get((device, architecture))
        if pool is None:
            # Free old pools first, because a capture cannot use memory that torch keeps reserved for them.
            Card.empty_cache()
            pool = self._pools[device, architecture] = Pool(device, stream)
            self._alive[pool] = None
        return pool


def give_workspaces(stream: torch.cuda.Stream, dtype: torch.dtype) -> None:
    """Compute small matrix products in this dtype on a stream, so that the libraries (cuBLAS) allocate their workspaces
    for the stream now. In a capture, they would allocate them in the graph's pool. Waits for the stream."""
    with torch.cuda.stream(stream):
        square = torch.ones((64, 64), device=stream.device, dtype=dtype)
        torch.nn.functional.linear(square, square, square[0])
        torch.bmm(square[None], square[None])
    stream.synchronize()


def begin_recording() -> bool:
    """Let torch record allocations from now on, without stack traces, and return True. The caller ends the recording.
    Returns False, and changes nothing, if torch cannot record, or does so already for another program."""
    is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if is_recording is None or is_recording():
        return False
    try:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
    except (AttributeError, TypeError, RuntimeError) as refusal:
        log.debug("torch cannot record allocations here: %s", refusal)
        return False
    return True


def recorded(device: torch.device) -> list[Mapping[str, Any]] | None:
    """Torch's records of allocations and frees on a device since begin_recording(), oldest first; None if torch does
    not return them. Each has "action", "addr" and "size" in bytes."""
    try:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        return traces[device.index if device.index is not None else torch.cuda.current_device()]
    except (AttributeError, RuntimeError, KeyError, IndexError) as refusal:
        log.debug("torch does not return the recorded allocations: %s", refusal)
        return None


def most_in_use(events: Iterable[Mapping[str, Any]]) -> int:
    """The largest number of bytes in use at one time, according to these events (see recorded). Memory that was
    allocated before the first event is not counted. Sizes are rounded up to PIECE, as torch allocates them."""
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
