"""How long work takes where a graph replays it: what Python needs to launch it is not in it."""
from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable

import torch

WARM_RUNS, RUNS_IN_GRAPH, REPLAYS = 2, 5, 5


def time_in_graph(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """The median time of a run in milliseconds, by replays of a graph of several runs, captured on a stream.

    work may write into its own tensors. Raises RuntimeError where it cannot be captured.
    """
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_RUNS):
            work()
        stream.synchronize()
        # thread_local: other threads of the WebUI may use the GPU meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(RUNS_IN_GRAPH):
                work()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
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
