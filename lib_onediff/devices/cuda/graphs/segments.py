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
# The number of bytes of functions' results that a replay keeps at most. If there are more, and the replay then does not
# fit, all functions are called again.
MOST_KEPT = 256 << 20


class GraphRecording:
    """Captures CUDA graphs, one after another, on a stream into a memory pool: begin(), the work to record, then end()
    or stop(). Between captures, work runs on the stream that was current when this object was made.

    pool: torch's handle of the pool; None for a new pool.
    piece: bytes that the first capture allocates and frees at once, so that a new pool is one block; 0: none.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream, piece: int = 0) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = stream
        self._piece = piece
        self._host = torch.cuda.current_stream(stream.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        """Start a capture: kernels launched from now on are recorded, not run. Returns a new tensor in the graphs'
        memory for each given tensor. The captured work reads the new tensors; they are empty until end() copies the
        given tensors' values into them."""
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
        """End the capture, fill the tensors that begin() returned, and replay the graph once, which computes what was
        recorded. Returns the function that replays it again. Raises RuntimeError if there is no capture."""
        graph = self.stop()
        for inside, given in self._copies:
            inside.copy_(given)
        self._copies = []
        graph.replay()
        return graph.replay

    def stop(self) -> torch.cuda.CUDAGraph:
        """End the capture, and return its graph without running it; the tensors that begin() returned are not filled.
        Raises RuntimeError if there is no capture, or if an operation could not be captured."""
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
        """A tensor over the same memory that does not keep it alive: the memory belongs to the pool, in which later
        segments may reuse it. Valid while the pool is."""
        storage = tensor.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """A context for captures. If the code inside raises, the capture is ended, torch's random generator is repaired
        (see random_numbers_survive), and the exception is raised again. No garbage is collected inside."""
        with random_numbers_survive(self._stream.device), no_garbage_collected():
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.stop()
                self._forget()
                raise

    def _forget(self) -> None:
        """Tell torch, after a failed capture, that allocations no longer go to the pool. Otherwise it may regard the
        capture as unfinished, and would not free its cache when the host runs out of memory. Never raises."""
        name = "_cuda_endAllocateToPool"
        end = getattr(torch._C, name, None) or getattr(torch._C, name.replace("To", "CurrentStreamTo"), None)
        if end is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                end(self._stream.device.index, self._pool)


def time_in_graph(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """The median duration of one run of work() in milliseconds, without Python's launch overhead: a graph of
    RUNS_IN_GRAPH runs is captured on the stream and replayed REPLAYS times. Waits for the GPU.

    work() runs many times, so it may write only to its own tensors. Raises RuntimeError if it cannot be captured.
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
    """A context without Python's automatic garbage collection: freeing a graph or an event during a capture would make
    the capture fail. Afterwards it is on again if it was on before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def random_numbers_survive(device: torch.device) -> Iterator[None]:
    """A context that repairs torch's random generator of a CUDA device if a capture inside fails, and raises the
    exception again.

    After a failed capture, the generator regards itself as being captured, and every later torch.randn on the GPU
    raises. With torch 2.3 and older, it cannot be repaired and stays so.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state() if hasattr(generator, "clone_state") else None
    try:
        yield
    except BaseException:
        if spare is not None:
            generator.graphsafe_set_state(spare.graphsafe_get_state())
        raise


class KeptResults:
    """Copies of what the functions of other extensions have returned in one replay, in order. If a later function turns
    out not to fit the graphs (DoesNotFit), the forward is repeated with these results, so that no function is called
    twice (core.points.ResumedPoints).

    all: the copies, one for each call of a point's functions. is_complete: whether `all` has every result; False once
        they have exceeded MOST_KEPT bytes: all copies are then dropped.
    """

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.is_complete = True
        self._bytes = 0

    def keep(self, returned: Any) -> None:
        """Keep a copy of a function's result, because the function may reuse its memory at the next point. Does nothing
        once is_complete is False. returned: a tensor, several in a tuple or list, or another value."""
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


# One part of a replay, called as segment(patches, kept): either replays the graph of a part of the forward; or calls
# the functions of the call's patches at a point, and keeps copies of their results in `kept`.
Segment = Callable[[Any, KeptResults], object]


@dataclass(frozen=True)
class FunctionPoint:
    """A point with functions of other extensions, as a Segment between two graphs.

    name: of the point's method (core.points.Points).
    arguments: the point's arguments at the capture, with views of the graphs' memory instead of tensors.
    results: views of the next graph's inputs, to which the functions' results are copied.
    number: the index of the point among all points that the forward passes.
    """

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]
    number: int

    def __call__(self, patches: Points, kept: KeptResults) -> None:
        """Call the functions of `patches` at this point, with copies of the arguments. Copies of their results go to
        the next graph's inputs and to `kept`. Raises DoesNotFit if the results differ in number, shape, dtype or device
        from those at the capture, or one is no tensor; `kept` has the results also then."""
        given = getattr(patches, self.name)(*map(fresh, self.arguments))
        kept.keep(given)
        returned = tensors_of(given)
        if list(map(form, returned)) != list(map(form, self.results)):
            raise DoesNotFit(f"an extension's function returned another shape than before ({self.name})")
        for result, one in zip(self.results, returned, strict=True):
            result.copy_(one)


def graph_segment(replay: Callable[[], None]) -> Segment:
    """The Segment that replays a graph. replay: the function that does so."""
    return lambda patches, kept: replay()


def position_segment(name: str, arguments: tuple[Any, ...]) -> Segment:
    """The Segment for one of Points.position_points at which no function is set: it calls the point's method, which
    writes the position in the forward to the host's options. name: of the point. arguments: the point's at the capture;
    the method gets None instead of tensors, which it does not read."""
    plain = tuple(None if isinstance(one, Tensor) else one for one in arguments)
    return lambda patches, kept: getattr(patches, name)(*plain)


class RecordedPoints(EveryPoint):
    """The points of a call whose forward is being captured. At a point with functions, the capture is ended, the
    functions are called, and the next capture begins.

    patches: the call's points, whose functions are called. recording: captures the graphs; a capture is in progress.
    segments: the segments so far; the caller ends the last capture and adds its graph.
    points: the points that the forward has passed so far, without the functions' results.
    """

    def __init__(self, patches: Points, recording: GraphRecording) -> None:
        super().__init__(patches)
        self._recording = recording
        self.segments: list[Segment] = []
        self.points: list[PassedPoint] = []

    def at(self, point: str, *arguments: Any) -> Any:
        """The result of the point of this name for these arguments, called while the forward is captured. If no
        function is set there, it is the result of the point's own method.

        If one is set, the capture ends and its graph is replayed, the function is called with copies of the arguments,
        and a new capture begins. The result is then one tensor or a tuple: inputs of the new graph, into which the
        function's results are copied.
        """
        patches = self._patches
        recording = self._recording
        if not patches.has_function(point, *arguments):
            if point in self.position_points:
                self.segments.append(position_segment(point, arguments))
            returned = getattr(patches, point)(*arguments)
            is_bool = isinstance(returned, bool)
            self.points.append(PassedPoint(point, is_bool, returned if is_bool else None))
            return returned
        self.segments.append(graph_segment(recording.end()))
        views = tuple(recording.view(one) if isinstance(one, Tensor) else one for one in arguments)
        returned = getattr(patches, point)(*map(fresh, arguments))
        results = recording.begin(tensors_of(returned))
        self.segments.append(FunctionPoint(point, views, tuple(map(recording.view, results)), len(self.points)))
        self.points.append(PassedPoint(point, True))
        return tuple(results) if isinstance(returned, (tuple, list)) else results[0]


@dataclass
class GraphRunner:
    """Replays a captured forward for calls of one shape; implements core.device.Runner.

    segments: in the order of the forward.
    output: the static tensor that the last segment writes, of the latent's shape but for the channels.
    positions: Points.positions of the captured call; None if it had no functions.
    points: see RecordedPoints; empty without functions.
    inputs: the static inputs, into which those of each call are copied. own_bytes: their size.
    memory: the Pool of the graphs, which is alive as long as this object.
    """

    segments: list[Segment]
    output: Tensor
    positions: object
    points: list[PassedPoint]
    inputs: Call
    memory: Any
    own_bytes: int

    def run(self, call: Call) -> Tensor:
        """The network's output for a call of the captured shape, as a new tensor. Calls the call's functions.

        Raises DoesNotFit, with `passed`, if the call has functions at other points than the captured call (before any
        function is called), or if a function's results do not fit (see FunctionPoint).
        """
        patches = call.patches
        kept = KeptResults()
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

    def _passed(self, segment: Any, kept: KeptResults) -> list[PassedPoint] | None:
        """The points up to and including this FunctionPoint, at which the replay has stopped, with the functions'
        results in `kept`; None if `kept` is incomplete."""
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
    """Capture a forward, and return the runner that replays it. Call it inside recording.ended_on_failure().

    If `inputs` has functions of other extensions (patches), the forward is also computed, and they are called once;
    otherwise nothing is computed.
    inputs: a call whose tensors become the static inputs of the graphs. memory: see GraphRunner.
    compute: returns the network's output for a call.
    """
    # The runner must not keep the call's functions alive.
    patches = inputs.patches
    own = replace(inputs, patches=None)
    positions: object = None
    passed: list[PassedPoint] = []
    recording.begin()
    if patches is None:
        output = compute(own)
        segments = [graph_segment(recording.stop().replay)]
    else:
        points = RecordedPoints(patches, recording)
        positions = patches.positions
        output = compute(replace(inputs, patches=points))
        segments = [*points.segments, graph_segment(recording.end())]
        passed = points.points
    return GraphRunner(segments, output, positions, passed, own, memory, bytes_of(own))


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    """The values that a function has returned, as a tuple: the members of a tuple or list, or the single value."""
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def form(tensor: Any) -> tuple[Any, ...]:
    """The shape, dtype and device of a tensor that a function has returned. Raises DoesNotFit for anything else."""
    if not isinstance(tensor, Tensor):
        raise DoesNotFit(f"a function returned {type(tensor).__name__}")
    return tuple(tensor.shape), tensor.dtype, tensor.device


def fresh(argument: Any) -> Any:
    """A copy of a tensor; other values as they are. Functions of extensions get copies because they may keep or change
    their arguments."""
    return argument.clone() if isinstance(argument, Tensor) else argument
