"""Calls of several threads, each with a CUDA stream of its own, follow one another on the GPU.

A graph's inputs, its memory and the prompts' keys and values are shared by all calls of a UNet. The runtime's lock
keeps the launches apart; without this, the kernels of two streams would still overlap.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ....core.card import on_card


class StreamOrder:
    """Remembers, for each GPU, the stream of the last work and the event at its end. Whoever uses it holds the
    runtime's lock."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def after_the_last(self, device: torch.device) -> Iterator[None]:
        """Kernels launched inside start on the GPU when those of the last use, in whichever stream, have ended. No
        thread waits for that. The GPU is torch's current one inside, as Triton and graphs want it. Waits for nothing
        while the caller captures a CUDA graph of its own: a capture cannot wait for an event from outside."""
        with on_card(device), self._after_the_last(device):
            yield

    @contextlib.contextmanager
    def _after_the_last(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream(device)
        before, event = self._last.get(device, (stream, None))
        if event is None:
            event = torch.cuda.Event()
        elif before != stream:
            stream.wait_event(event)
        try:
            yield
        finally:
            event.record(stream)
            self._last[device] = stream, event
