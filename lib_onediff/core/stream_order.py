"""Runs the calls of several threads, each with its own CUDA stream, one after another on the GPU.

All calls of a shape share the static inputs and the memory of one graph. A lock serialises the launches of threads, and
events serialise the kernels of streams.
"""
from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch


class StreamOrder:
    """Orders the work of all threads on each GPU; see turn.

    lock: held by the thread whose turn it is. It may be taken again by the same thread.
    last: for each GPU, the stream of the last turn and the event at the end of its work.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def turn(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this thread has the lock, and kernels start after those of the last turn, in whichever
        stream. Only the GPU waits, not the thread.

        device is torch's current GPU inside, which Triton and CUDA graphs need. While the caller captures a CUDA graph
        of its own, nothing waits: a capture cannot wait for an event from outside. The context may be used again.
        """
        return Turn(self, device) if device.type == "cuda" else self.lock


class Turn:
    """StreamOrder.turn() on a GPU. A class, because every replay enters one and a generator is slower."""

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
