"""How much GPU memory some work has in use at most, without a trace in torch's own statistics.

torch's peak can only be begun anew for everybody, and a host shows it to its user. So every allocation is recorded
while the work runs, by what torch offers for memory snapshots, and added up.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

log = logging.getLogger("onediff")
Result = TypeVar("Result")
# torch hands out memory in such pieces.
PIECE = 512
# What a UNet allocates in one call is a few thousand tensors.
MOST_EVENTS = 1_000_000


def peak(device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
    """What work() returns, and the bytes that it had in use at most, beside what was in use before.

    Where torch cannot record, or somebody else does: no less than these bytes, by torch's own peak.
    """
    before, highest = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
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
    in_use = most = 0
    for event in events:
        if event["action"] == "alloc":
            sizes[event["addr"]] = size = -(-event["size"] // PIECE) * PIECE
            in_use += size
            most = max(most, in_use)
        elif event["action"] == "free_completed":
            in_use -= sizes.pop(event["addr"], 0)
    return most
