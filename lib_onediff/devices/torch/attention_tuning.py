"""Measure implementations of attention against each other, at the shapes that a UNet will use."""
from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
TimeMs = Callable[[Callable[[], Tensor]], float]

WARM_RUNS = 3
TIMED_RUNS = 5
# Between two exact implementations at random inputs, relative to the output's norm; a wrong one is off by about 1.
WORST_ERROR = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 2e-3}
# Torch's own pick needs no switching; another must be better than what two measurements differ by.
WORTH_SWITCHING = 0.97
# A run that takes longer than this is not launched slower than it runs.
LAUNCH_BOUND_MS = 0.2
HEAD_START_BYTES = 64 << 20
HEAD_START_LAUNCHES = 32


def fastest(works: Mapping[str, Callable[[], Tensor]], expected: Tensor, time_ms: TimeMs) -> dict[str, Any] | None:
    """The fastest of these implementations whose output is as expected, as {"backend": name, "ms": {name: median}};
    None if there is none. One that raises is out, and so is one whose output is not finite."""
    limit = WORST_ERROR.get(expected.dtype, WORST_ERROR[torch.float32])
    found: dict[str, float] = {}
    for name, work in works.items():
        # torch warns of the reasons for which an implementation cannot be used: nobody asked for them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                # A NaN is not within the limit either.
                if relative_error(work(), expected) <= limit:
                    found[name] = time_ms(work)
            except RuntimeError:
                continue
    if not found:
        return None
    best = min(found, key=found.__getitem__)
    if found.get("torch", float("inf")) * WORTH_SWITCHING <= found[best]:
        best = "torch"
    return {"backend": best, "ms": {name: round(ms, 4) for name, ms in found.items()}}


def relative_error(output: Tensor, expected: Tensor) -> float:
    return float((output.float() - expected.float()).norm() / expected.float().norm())


def time_on_gpu(work: Callable[[], object]) -> float:
    """The median time of a run on the current GPU in milliseconds, without the time that Python takes to launch it."""
    for _ in range(WARM_RUNS):
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.current_stream().synchronize()
        took_ms = (time.perf_counter() - began) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_RUNS + 1)]
    if took_ms < LAUNCH_BOUND_MS:
        # While the GPU does this, the launches below queue up; in a graph they will follow each other like that.
        busy = torch.empty(HEAD_START_BYTES, dtype=torch.uint8, device="cuda")
        for _ in range(HEAD_START_LAUNCHES):
            busy.zero_()
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    times: list[float] = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
    return statistics.median(times)


def random_inputs(
    query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of these shapes (batch, heads, tokens, width), lying in memory as our forward has them:
    parts of what one GEMM gave, (batch, tokens, heads * width) each."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, queries, width = query_shape
    keys, parts = key_shape[2], 3 if key_shape == query_shape else 2

    def split(tokens: int, count: int) -> list[Tensor]:
        fused = torch.randn(batch, tokens, count * heads * width, generator=generator, device=device, dtype=dtype)
        return [part.unflatten(-1, (heads, width)).transpose(1, 2) for part in fused.chunk(count, dim=-1)]

    tensors = split(keys, parts) if parts == 3 else [*split(queries, 1), *split(keys, 2)]
    return tensors[0], tensors[1], tensors[2]
