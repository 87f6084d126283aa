"""A forward as CUDA graphs: one of all of it, or of what lies between the functions of other extensions in it.

With functions, it is recorded while it is computed: where one is called, the recording ends, what was recorded is
replayed, and the function is called with its result; what it returns is copied to where the next recording reads it. A
replay does the same with the functions and options of its own call. The parts lie over each other in the graphs' memory
like those of one graph, so only addresses are kept of what passes between them, and functions get copies: they may keep
them.
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

WARM_RUNS = 2
RUNS_IN_GRAPH = 5
REPLAYS = 5
# Points that the host's options are told of, with a function there or without.
NOTED = ("before_stage", "join", "begin_block", "end_transformer")
# Bytes of what functions return in a replay. Beyond, a replay that does not fit has its functions called again.
MOST_KEPT = 256 << 20


class GraphRecording:
    """Records CUDA graphs on a stream into a pool (None: a new one). What is between them runs on the stream that is
    current when this is made."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream, piece: int = 0) -> None:
        """piece: bytes that the pool gets in one piece before."""
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = stream
        self._piece = piece
        self._host = torch.cuda.current_stream(stream.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        """Record from now on. Returns tensors of the graphs' memory, which hold what is given when this part is
        replayed."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(self._stream)
        # Not torch.cuda.graph: it waits for the GPU and empties torch's cache, and the image's step is still running.
        # thread_local: other threads of the WebUI (previews, the API) may use the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph
        if self._piece:
            torch.empty(self._piece, dtype=torch.uint8, device=self._stream.device)
            self._piece = 0
        self._copies = [(torch.empty_like(one), one) for one in given]
        return [inside for inside, _ in self._copies]

    def end(self) -> Callable[[], None]:
        """What replays the part; it has replayed once already."""
        graph = self.stop()
        for inside, given in self._copies:
            inside.copy_(given)
        self._copies = []
        graph.replay()
        return graph.replay

    def stop(self) -> torch.cuda.CUDAGraph:
        """The graph of what was recorded, which was not replayed yet; launches go where the host's do again. Raises
        RuntimeError where nothing is being recorded."""
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
        """The same tensor by its address alone: it does not keep its memory alive."""
        storage = tensor.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """Inside, graphs can be recorded, and what fails leaves no recording and no broken generator behind."""
        with random_numbers_survive(self._stream.device), no_garbage_collected():
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.stop()
                self._forget()
                raise

    def _forget(self) -> None:
        """After a failure, torch may believe that it records still. It would not give back what it keeps unused where a
        host runs out of memory."""
        name = "_cuda_endAllocateToPool"
        end = getattr(torch._C, name, None) or getattr(torch._C, name.replace("To", "CurrentStreamTo"), None)
        if end is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                end(self._stream.device.index, self._pool)


def time_in_graph(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """The median time of a run in milliseconds, by replays of a graph of several runs, recorded on a stream: what
    Python needs to launch it is not in it.

    work may write into its own tensors. Raises RuntimeError where it cannot be recorded.
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
    """A graph or an event that is destroyed during a capture would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def random_numbers_survive(device: torch.device) -> Iterator[None]:
    """Give the device's random generator a sound state back if a capture inside fails.

    A failed capture leaves the generator believing that it is still being captured, and every later torch.randn on
    the GPU raises. torch 2.3 has no way to put that right.
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
    """What functions return in one replay, in order, until it takes too much memory to keep."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.is_complete = True
        self._bytes = 0

    def keep(self, returned: Any) -> None:
        """Keep a copy: a function may use its memory again at the next point."""
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


# Replays a part of the forward, or calls the functions of a call at a point and keeps what they return.
Segment = Callable[[Any, Returned], object]


@dataclass(frozen=True)
class FunctionPoint:
    """A point where functions stand. arguments: views instead of tensors. results: where the next part reads what
    they return. number: of this point among those of the forward."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]
    number: int

    def __call__(self, patches: Points, kept: Returned) -> None:
        given = getattr(patches, self.name)(*map(fresh, self.arguments))
        kept.keep(given)
        returned = tensors_of(given)
        if list(map(form, returned)) != list(map(form, self.results)):
            raise DoesNotFit(f"a function of another extension returned another shape than before ({self.name})")
        for result, one in zip(self.results, returned, strict=True):
            result.copy_(one)


def replaying(replay: Callable[[], None]) -> Segment:
    """What was recorded between two functions."""
    return lambda patches, kept: replay()


def noting(name: str, arguments: tuple[Any, ...]) -> Segment:
    """A point without functions, which the host's options are told of. Nobody reads the tensors."""
    plain = tuple(None if isinstance(one, Tensor) else one for one in arguments)
    return lambda patches, kept: getattr(patches, name)(*plain)


class RecordedPoints(EveryPoint):
    """The points of a call whose forward is being recorded. segments: recorded so far. points: those that the forward
    has passed; what functions have returned is not kept."""

    def __init__(self, patches: Points, recording: GraphRecording) -> None:
        super().__init__(patches)
        self._recording = recording
        self.segments: list[Segment] = []
        self.points: list[PassedPoint] = []

    def at(self, point: str, *arguments: Any) -> Any:
        patches = self._patches
        recording = self._recording
        if not patches.has_function(point, *arguments):
            if point in NOTED:
                self.segments.append(noting(point, arguments))
            returned = getattr(patches, point)(*arguments)
            says = isinstance(returned, bool)
            self.points.append(PassedPoint(point, says, returned if says else None))
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
    """core.device.Runner by the graphs of a forward's parts. output: (batch, out channels, height, width), where the
    last part writes it. positions: see Points; None where no functions run within it. points: see RecordedPoints.
    memory: the pool that the graphs were captured in."""

    segments: list[Segment]
    output: Tensor
    positions: object
    points: list[PassedPoint]
    inputs: Call
    memory: Any
    own_bytes: int

    def run(self, call: Call) -> Tensor:
        """The output for a call, as a new tensor. Raises DoesNotFit, before any function was called, if functions
        stand at other points."""
        patches = call.patches
        kept = Returned()
        if (None if patches is None else patches.positions) != self.positions:
            misfit = DoesNotFit("functions stand at other points than before")
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
        """The points up to this function, which is the last that was called."""
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
    """Record a forward of inputs that are the graphs' own; with functions within it, it is computed too, and they are
    called. compute: the forward. memory: see GraphRunner."""
    # Whose functions they were must not be kept.
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
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def form(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, Tensor):
        raise DoesNotFit(f"a function returned {type(tensor).__name__}")
    return tuple(tensor.shape), tensor.dtype, tensor.device


def fresh(argument: Any) -> Any:
    """A function may keep what it is given, and write to it."""
    return argument.clone() if isinstance(argument, Tensor) else argument
