"""A forward as CUDA graphs: one graph, or one for each segment between functions of other extensions.

With functions, the forward is captured while it is computed. At a function, the capture of the segment ends, the graph
is replayed, and the function is called with copies of its outputs; the function's results are copied to the inputs of
the next segment. A replay does the same with the functions and options of its own call.

The tensors of all segments overlap in the graphs' memory pool like those of one graph. So between segments only
addresses are kept (views), and functions get copies, because they may keep their arguments.
"""
from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....core.call import Call
from ....core.inputs import bytes_of, copy_inputs
from ....core.points import DoesNotFit, EveryPoint, PassedPoint, Points

# For time_in_graph: runs before the capture, runs in the graph, and replays of the graph.
WARM_RUNS = 2
RUNS_IN_GRAPH = 5
REPLAYS = 5
# Points whose methods are called also without a function there, because they write the host's options.
NOTED = ("before_stage", "join", "begin_block", "end_transformer")
# The largest bytes of functions' results that a replay keeps. Beyond it, a replay that does not fit must call its
# functions again.
MOST_KEPT = 256 << 20


class GraphRecording:
    """Captures CUDA graphs on a stream into a memory pool. Between captures, work runs on the stream that was current
    when this was made.

    pool: the pool's handle; None for a new pool. piece: bytes that the first capture allocates for the pool in one
        piece; 0: none.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream, piece: int = 0) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = stream
        self._piece = piece
        self._host = torch.cuda.current_stream(stream.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        """Start a capture. Returns static copies of the given tensors, in the graphs' memory, for the captured work to
        read; end() fills them before the replay."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(self._stream)
        # Not torch.cuda.graph(), which waits for the GPU and empties torch's cache while the image's step still runs.
        # "thread_local", because other threads of the WebUI (previews, the API) may use the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph
        if self._piece:
            torch.empty(self._piece, dtype=torch.uint8, device=self._stream.device)
            self._piece = 0
        self._copies = [(torch.empty_like(one), one) for one in given]
        return [inside for inside, _ in self._copies]

    def end(self) -> Callable[[], None]:
        """End the capture, fill the static copies and replay the graph once. Returns the function that replays it."""
        graph = self.stop()
        for inside, given in self._copies:
            inside.copy_(given)
        self._copies = []
        graph.replay()
        return graph.replay

    def stop(self) -> torch.cuda.CUDAGraph:
        """End the capture, and return its graph without replaying it. Raises RuntimeError if there is no capture."""
        graph = self._graph
        self._graph = None
        try:
            if graph is None:
                raise RuntimeError("nothing is being recorded")
            graph.capture_end()
        finally:
            torch.cuda.set_stream(self._host)
        return graph

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not keep it alive."""
        storage = tensor.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """A context for captures. If the code inside fails, the capture is ended and the random generator is
        repaired."""
        with random_numbers_survive(self._stream.device), no_garbage_collected():
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.stop()
                self._forget()
                raise

    def _forget(self) -> None:
        """After a failed capture, end torch's allocation to the pool: torch may regard the capture as unfinished, and
        would not free its cache when the host runs out of memory."""
        name = "_cuda_endAllocateToPool"
        end = getattr(torch._C, name, None) or getattr(torch._C, name.replace("To", "CurrentStreamTo"), None)
        if end is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                end(self._stream.device.index, self._pool)


def time_in_graph(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """The median time of work() in milliseconds, without Python's launch overhead: a graph of RUNS_IN_GRAPH runs is
    captured on the stream and replayed.

    work() may write to its own tensors. Raises RuntimeError if it cannot be captured.
    """
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        recording = GraphRecording(None, stream)
        with recording.ended_on_failure():
            for _ in range(WARM_RUNS):
                work()
            stream.synchronize()
            recording.begin()
            for _ in range(RUNS_IN_GRAPH):
                work()
            graph = recording.stop()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            stream.synchronize()
    current.wait_stream(stream)
    graph.reset()
    times = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
    return statistics.median(times) / RUNS_IN_GRAPH


@contextlib.contextmanager
def no_garbage_collected() -> Iterator[None]:
    """A context without garbage collection: freeing a graph or an event during a capture would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def random_numbers_survive(device: torch.device) -> Iterator[None]:
    """A context that repairs the device's random generator if a capture inside fails.

    After a failed capture, the generator regards itself as being captured, and every later torch.randn on the GPU
    raises. torch 2.3 and older cannot repair it.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state() if hasattr(generator, "clone_state") else None
    try:
        yield
    except BaseException:
        if spare is not None:
            generator.graphsafe_set_state(spare.graphsafe_get_state())
        raise


class Returned:
    """Copies of the results of functions in one replay, in order. If the replay does not fit in the end, the forward is
    repeated with these results (core.points.ResumedPoints). If they exceed MOST_KEPT bytes, all are dropped.

    all: the results. is_complete: False if they were dropped.
    """

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.is_complete = True
        self._bytes = 0

    def keep(self, returned: Any) -> None:
        """Keep a copy of a result: the function may reuse its memory at the next point."""
        if not self.is_complete:
            return
        tensors = [one for one in tensors_of(returned) if isinstance(one, Tensor)]
        self._bytes += sum(tensor.nbytes for tensor in tensors)
        if self._bytes > MOST_KEPT:
            self.is_complete = False
            self.all.clear()
        else:
            several = isinstance(returned, (tuple, list))
            self.all.append(tuple(map(fresh, returned)) if several else fresh(returned))


# One step of a replay, segment(patches, kept): replays the graph of a part of the forward; or calls the functions of a
# call's patches at a point, and keeps their results.
Segment = Callable[[Any, Returned], object]


@dataclass(frozen=True)
class FunctionPoint:
    """A point with functions of other extensions, as a Segment between two graphs. Calling it calls the functions of a
    call. Raises DoesNotFit if they return other shapes than at the capture.

    arguments: the point's arguments, with views instead of tensors.
    results: views of the next segment's inputs, to which the functions' results are copied.
    number: the index of the point in the forward.
    """

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]
    number: int

    def __call__(self, patches: Points, kept: Returned) -> None:
        """Call the functions of `patches` at this point, copy their results to the next segment's inputs, and keep them
        in `kept`."""
        given = getattr(patches, self.name)(*map(fresh, self.arguments))
        kept.keep(given)
        returned = tensors_of(given)
        if list(map(form, returned)) != list(map(form, self.results)):
            raise DoesNotFit(f"an extension's function returned another shape than before ({self.name})")
        for result, one in zip(self.results, returned, strict=True):
            result.copy_(one)


def replaying(replay: Callable[[], None]) -> Segment:
    """The Segment that replays a graph."""
    return lambda patches, kept: replay()


def noting(name: str, arguments: tuple[Any, ...]) -> Segment:
    """The Segment for one of the NOTED points without a function: its method is called in every replay, because it
    notes the forward's position in the host's options. It gets None instead of tensors, which it does not read."""
    plain = tuple(None if isinstance(one, Tensor) else one for one in arguments)
    return lambda patches, kept: getattr(patches, name)(*plain)


class RecordedPoints(EveryPoint):
    """The points of a call whose forward is being captured. At a point with functions, the capture is ended, the
    functions are called, and the next capture begins.

    recording: captures the segments.
    segments: the segments so far.
    points: the points that the forward has passed, without the functions' results.
    """

    def __init__(self, patches: Points, recording: GraphRecording) -> None:
        super().__init__(patches)
        self._recording = recording
        self.segments: list[Segment] = []
        self.points: list[PassedPoint] = []

    def at(self, point: str, *arguments: Any) -> Any:
        """See EveryPoint.at."""
        patches = self._patches
        recording = self._recording
        if not patches.has_function(point, *arguments):
            if point in NOTED:
                self.segments.append(noting(point, arguments))
            returned = getattr(patches, point)(*arguments)
            is_bool = isinstance(returned, bool)
            self.points.append(PassedPoint(point, is_bool, returned if is_bool else None))
            return returned
        self.segments.append(replaying(recording.end()))
        views = tuple(recording.view(one) if isinstance(one, Tensor) else one for one in arguments)
        returned = getattr(patches, point)(*map(fresh, arguments))
        results = recording.begin(tensors_of(returned))
        self.segments.append(FunctionPoint(point, views, tuple(map(recording.view, results)), len(self.points)))
        self.points.append(PassedPoint(point, True))
        return tuple(results) if isinstance(returned, (tuple, list)) else results[0]


@dataclass
class GraphRunner:
    """The core.device.Runner with the graphs of a forward's segments.

    segments: in the order of the forward.
    output: (batch, out channels, height, width), written by the last segment.
    positions: Points.positions of the captured call; None if it had no functions.
    points: see RecordedPoints.
    inputs, own_bytes: see Runner. memory: the Pool of the graphs.
    """

    segments: list[Segment]
    output: Tensor
    positions: object
    points: list[PassedPoint]
    inputs: Call
    memory: Any
    own_bytes: int

    def run(self, call: Call) -> Tensor:
        """The output for a call, as a new tensor. Raises DoesNotFit: before any function is called, if the call has
        functions at other points; later, if a function returns another shape."""
        patches = call.patches
        kept = Returned()
        if (None if patches is None else patches.positions) != self.positions:
            misfit = DoesNotFit("extensions' functions are called at other points than before")
            misfit.passed = []
            raise misfit
        copy_inputs(call, self.inputs)
        if patches is not None:
            patches.begin(call.latent)
        for segment in self.segments:
            try:
                segment(patches, kept)
            except DoesNotFit as misfit:
                misfit.passed = self._passed(segment, kept)
                raise
        return self.output.clone()

    def _passed(self, segment: Any, kept: Returned) -> list[PassedPoint] | None:
        """The points up to and including this FunctionPoint, the last one whose functions were called; None if results
        are missing."""
        if not kept.is_complete:
            return None
        functions = {one.number for one in self.segments if isinstance(one, FunctionPoint)}
        answers = iter(kept.all)
        return [
            point._replace(answer=next(answers)) if number in functions else point
            for number, point in enumerate(self.points[:segment.number + 1])
        ]


def record(
    recording: GraphRecording, inputs: Call, memory: Any, compute: Callable[[Call], Tensor]
) -> GraphRunner:
    """Capture a forward. With functions of other extensions, it is also computed, and they are called.

    inputs: the static inputs of the graphs. compute: the forward. memory: see GraphRunner.
    """
    # The runner must not keep the call's functions alive.
    patches = inputs.patches
    own = replace(inputs, patches=None)
    positions: object = None
    passed: list[PassedPoint] = []
    recording.begin()
    if patches is None:
        output = compute(own)
        segments = [replaying(recording.stop().replay)]
    else:
        points = RecordedPoints(patches, recording)
        positions = patches.positions
        output = compute(replace(inputs, patches=points))
        segments = [*points.segments, replaying(recording.end())]
        passed = points.points
    return GraphRunner(segments, output, positions, passed, own, memory, bytes_of(own))


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    """A function's results as a tuple."""
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def form(tensor: Any) -> tuple[Any, ...]:
    """The shape, dtype and device of a tensor. Raises DoesNotFit for anything else."""
    if not isinstance(tensor, Tensor):
        raise DoesNotFit(f"a function returned {type(tensor).__name__}")
    return tuple(tensor.shape), tensor.dtype, tensor.device


def fresh(argument: Any) -> Any:
    """A copy of a tensor, for a function that may keep its argument or write to it; other values as they are."""
    return argument.clone() if isinstance(argument, Tensor) else argument
