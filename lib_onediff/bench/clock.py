"""Time calls, and count the GPU memory and the compiled kernels that they take."""
from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MIB = 2**20
CALLS_IN_TURN = 5

Call = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Call, device: torch.device) -> float:
    """Seconds until a call's work is done, by the clock."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def milliseconds(call: Call, device: torch.device) -> float:
    """Milliseconds of one call: by events on a GPU, else by the clock."""
    if device.type != "cuda":
        return seconds(call, device) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turn(calls: Sequence[Call], runs: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of runs calls of each, a few at a time, so that a drift of the machine meets all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(max(1, runs // CALLS_IN_TURN)):
        for call, taken in zip(calls, times, strict=True):
            call()
            taken += [milliseconds(call, device) for _ in range(CALLS_IN_TURN)]
    return times


@dataclass
class MemoryUse:
    """MiB over what was allocated before: at the peak, and what is still held. None without a GPU."""

    peak_mib: float | None = None
    held_mib: float | None = None


@contextlib.contextmanager
def memory_use(device: torch.device) -> Iterator[MemoryUse]:
    """Counts what the calls inside take; known when they are done."""
    used = MemoryUse()
    give_back_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield used
    if device.type == "cuda":
        used.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        used.held_mib = (torch.cuda.memory_allocated(device) - before) / MIB


def give_back_memory() -> None:
    """Free what nothing refers to, for Python and for the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Compilations:
    """count: kernels that were compiled, or read from Triton's cache on the disk, since this process had not used
    them in that form before. None: this Triton does not tell, or there is none."""

    count: int | None = None


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts while the body runs."""
    counted = Compilations()
    place = hook_place()
    if place is None:
        yield counted
        return
    owner, name = place
    before: Callable[..., Any] | None = getattr(owner, name)
    counted.count = 0

    def hook(*args: Any, **kwargs: Any) -> Any:
        counted.count = (counted.count or 0) + 1
        return None if before is None else before(*args, **kwargs)

    setattr(owner, name, hook)
    try:
        yield counted
    finally:
        setattr(owner, name, before)


def hook_place() -> tuple[Any, str] | None:
    """Where this Triton takes a function that it calls for every kernel that it has to build: (object, attribute)."""
    try:
        import triton
    except ImportError:
        return None
    settings = getattr(getattr(triton, "knobs", None), "runtime", None)
    if hasattr(settings, "jit_post_compile_hook"):
        return settings, "jit_post_compile_hook"
    for name in ("compiled_hook", "cache_hook"):  # before Triton 3.4
        if hasattr(triton.JITFunction, name):
            return triton.JITFunction, name
    return None
