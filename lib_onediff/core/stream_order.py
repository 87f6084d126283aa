"""Orders the calls of several threads, each with a CUDA stream of its own, one after another on the GPU.

All calls of a network share the inputs and the memory of a graph. A lock keeps their launches apart, and events keep
the kernels of two streams apart.
"""
from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch


class StreamOrder:
    """Remembers, for each GPU, the stream of the last work and the event at its end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def turn(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside, this thread has the lock, and kernels start on the GPU when those of the last turn, in whichever
        stream, have ended. No thread waits for that. The GPU is torch's current one inside, as Triton and graphs want
        it. Waits for nothing while the caller captures a CUDA graph of its own: a capture cannot wait for an event
        from outside. It may be entered again once it was left."""
        return Turn(self, device) if device.type == "cuda" else self.lock


class Turn:
    """StreamOrder.turn() on a GPU. A class, because a generator would be slower, and every replay enters one."""

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        self._order = order
        self._device = device
        self._card = torch.cuda.device(device)
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        self._order.lock.acquire()
        self._stream = None
        try:
            self._card.__enter__()
            if torch.cuda.is_current_stream_capturing():
                return
            stream = torch.cuda.current_stream(self._device)
            before, event = self._order.last.get(self._device, (stream, None))
            if event is not None and before != stream:
                stream.wait_event(event)
            self._stream = stream
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            if self._stream is not None:
                _, event = self._order.last.get(self._device, (None, None))
                event = torch.cuda.Event() if event is None else event
                event.record(self._stream)
                self._order.last[self._device] = self._stream, event
            self._card.__exit__(*raised)
        finally:
            self._order.lock.release()
