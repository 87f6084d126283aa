"""Runs the calls of several threads, each with its own CUDA stream, one after another on the GPU.

All calls of a shape share the static inputs and the memory of one graph. A lock serialises the launches of threads, and
events serialise the kernels of streams.
"""
from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch


class StreamOrder:
    """Orders the work of all threads on each GPU: one thread after another has its turn (see turn). One object for the
    whole process.

    lock: held by the thread whose turn it is. It is reentrant: the same thread may take it again.
    last: for each GPU, the stream of the last turn, and the event recorded in it at the end of the turn's work.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def turn(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this thread has the lock, and its kernels on this device start after the kernels of the
        device's last turn have finished, also if these are in another stream. The thread waits only for the lock; the
        GPU waits for the kernels.

        Inside, device is torch's current GPU, which Triton and CUDA graphs need. While the caller captures a CUDA graph
        of its own, the GPU does not wait: a capture cannot wait for an event from outside. For a CPU, the context is
        the lock alone. Turns may be nested.
        """
        return Turn(self, device) if device.type == "cuda" else self.lock


class Turn:
    """The context of StreamOrder.turn() on a GPU. A class, because every replay enters one, and contextlib's generators
    are slower."""

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        self._order = order
        self._device = device
        self._card = torch.cuda.device(device)
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        """Take the lock, make the device current, and let this thread's current stream wait for the last turn's event,
        unless it was recorded in this stream, or this stream is being captured."""
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
        """Record the event at the end of this turn's work (not in a capture), make the earlier device current again,
        and release the lock."""
        try:
            if self._stream is not None:
                _, event = self._order.last.get(self._device, (None, None))
                event = torch.cuda.Event() if event is None else event
                event.record(self._stream)
                self._order.last[self._device] = self._stream, event
            self._card.__exit__(*raised)
        finally:
            self._order.lock.release()
