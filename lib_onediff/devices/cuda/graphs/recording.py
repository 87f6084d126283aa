"""CUDA graphs recorded part by part on a stream, and how long work takes where a graph replays it."""
from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}
WARM_RUNS, RUNS_IN_GRAPH, REPLAYS = 2, 5, 5


class Address:
    """The memory of a tensor on a GPU, by its address alone: this does not keep it alive."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self._dtype, self._device = tensor.dtype, tensor.device
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": INTEGERS[size], "data": (tensor.data_ptr(), False), "version": 3, "stream": None,
        }

    @cached_property
    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device).view(self._dtype)


class GraphRecording:
    """Records CUDA graphs on a stream into a pool (None: one of each graph's own). What is between them runs on the
    stream that is current when this is made."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream, piece: int = 0) -> None:
        """piece: bytes that the pool gets in one piece before."""
        self._pool, self._stream, self._piece = pool, stream, piece
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
        graph, self._graph = self._graph, None
        try:
            if graph is None:
                raise RuntimeError("nothing is being recorded")
            graph.capture_end()
        finally:
            torch.cuda.set_stream(self._host)
        return graph

    def view(self, tensor: Tensor) -> Address:
        """The memory of a tensor that this knows."""
        return Address(tensor)

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """Inside, graphs can be recorded, and what fails leaves no recording and no broken generator behind."""
        with random_numbers_survive(self._stream.device), no_garbage_collected():
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self.stop()
                raise


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
