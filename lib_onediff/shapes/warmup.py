"""The pre-warm queue: makes sizes ready before a picture needs them, between pictures and never during one."""
from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from .sizes import Size

log = logging.getLogger("onediff")
Result = TypeVar("Result")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
PENDING = (QUEUED, RUNNING)
# The first is checked against the host's own UNet, the second captures a graph, the third replays it.
CALLS_PER_SHAPE = 3
TOKENS = 77
FINISHED_JOBS_KEPT = 50
# Python aborts when it ends below a thread that computes.
SECONDS_AT_EXIT = 20.0


class CannotWarm(Exception):
    """A size cannot be made ready; the message is the reason, in one line for the user."""


class Warms(Protocol):
    """What the queue asks of a WebUI."""

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the WebUI would, at a size in pixels; batch counts latents. Raises CannotWarm."""

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while no picture is being made, and return what it returns."""


class Reports(Protocol):
    """What the queue asks of the runtime."""

    def status(self) -> dict[str, Any]:
        """What the last UNet call was; "route" and "reason" among it."""

    def patience(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a UNet call waits for what is being compiled."""


@dataclass(frozen=True)
class Job:
    """One size in the queue, as it was when asked. done and total count UNet calls, seconds what they took.

    source: who asked, for people. reason: why it failed, in one line.
    """

    id: int
    size: Size
    source: str
    state: str = QUEUED
    done: int = 0
    total: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def pending(self) -> bool:
        return self.state in PENDING


class WarmUp:
    """The queue and its one worker thread, which lives while there is work. Safe to use from any thread."""

    def __init__(self, webui: Warms, runtime: Reports, *, unbatched: bool = True) -> None:
        """unbatched: besides the two halves of the guidance in one call, make the call for one half ready, as it is
        needed without guidance and for prompts of different lengths."""
        self._webui = webui
        self._runtime = runtime
        self._unbatched = unbatched
        self._jobs: dict[int, Job] = {}
        self._next_id = 1
        self._version = 0
        self._worker: threading.Thread | None = None
        self._changed = threading.Condition()

    def add(self, sizes: Iterable[Size], source: str) -> list[Job]:
        """Queue sizes; one that waits already keeps its place. Returns the job of every size."""
        with self._changed:
            waiting = {job.size: job for job in self._jobs.values() if job.state == QUEUED}
            wanted = list(sizes)
            for size in wanted:
                if size not in waiting:
                    waiting[size] = self._queue(size, source)
            if wanted and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="onediff-warm-up", daemon=True)
                self._worker.start()
                atexit.register(self.stop, SECONDS_AT_EXIT)
            return [waiting[size] for size in wanted]

    def jobs(self) -> list[Job]:
        """The jobs in the order of asking: all that are pending, and the last that are not."""
        with self._changed:
            return list(self._jobs.values())

    def busy(self) -> bool:
        """Whether any job is pending."""
        return any(job.pending for job in self.jobs())

    def cancel(self, job_id: int) -> bool:
        """Take a job out of the queue, or end it after the UNet call in progress; False when it is over or unknown."""
        with self._changed:
            job = self._jobs.get(job_id)
            if job is None or not job.pending:
                return False
            self._update(job, state=CANCELLED)
            return True

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every pending job and return how many; waits at most so long for the UNet call in progress."""
        cancelled = sum(self.cancel(job.id) for job in self.jobs())
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    def wait_for_change(self, version: int, seconds: float) -> int:
        """Wait until anything differs from what version stood for, at most so long, and return the version now."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version

    # --- the worker -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                self._run(job)
            except CannotWarm as refusal:
                self._fail(job, str(refusal))
            except Exception as error:
                log.exception("warming up %s failed", job.size)
                self._fail(job, first_line(error))

    def _take(self) -> Job | None:
        with self._changed:
            job = next((job for job in self._jobs.values() if job.state == QUEUED), None)
            if job is None:
                self._worker = None
                atexit.unregister(self.stop)
                return None
            return self._update(job, state=RUNNING)

    def _run(self, job: Job) -> None:
        for batch in self._batches(job.size):
            for _ in range(CALLS_PER_SHAPE):
                outcome = self._webui.exclusively(lambda batch=batch: self._call(job, batch))
                if outcome is None:
                    return
                if isinstance(outcome, Exception):
                    raise outcome
                self._advance(job, outcome)
        self._advance(job, 0.0, state=DONE)

    def _call(self, job: Job, batch: int) -> float | Exception | None:
        """One UNet call: its seconds, what went wrong, or None for a cancelled job.

        Returns exceptions rather than raising them, because a host may run this in a thread that prints tracebacks.
        """
        if not self._is_running(job):
            return None
        began = time.perf_counter()
        try:
            with self._runtime.patience():
                self._webui.warm(job.size.width, job.size.height, batch, TOKENS)
            status = self._runtime.status()
        except Exception as error:
            return error
        if status["route"] not in ("graph", "plain"):
            return CannotWarm(status["reason"] or "the WebUI's own UNet serves it")
        return time.perf_counter() - began

    def _is_running(self, job: Job) -> bool:
        with self._changed:
            return job.id in self._jobs and self._jobs[job.id].state == RUNNING

    def _batches(self, size: Size) -> tuple[int, ...]:
        return (2 * size.batch, size.batch) if self._unbatched else (2 * size.batch,)

    # --- the jobs; call these with the condition held -------------------------------------------------------------

    def _queue(self, size: Size, source: str) -> Job:
        total = CALLS_PER_SHAPE * len(self._batches(size))
        job = self._update(Job(self._next_id, size, source, total=total))
        self._next_id += 1
        return job

    def _update(self, job: Job, **changes: Any) -> Job:
        job = self._jobs[job.id] = replace(job, **changes)
        finished = [job_id for job_id, kept in self._jobs.items() if not kept.pending]
        for job_id in finished[:-FINISHED_JOBS_KEPT]:
            del self._jobs[job_id]
        self._version += 1
        self._changed.notify_all()
        return job

    # --- the jobs; these take the condition -----------------------------------------------------------------------

    def _advance(self, job: Job, seconds: float, state: str = RUNNING) -> None:
        """Count a call, unless the job was cancelled meanwhile."""
        with self._changed:
            if self._is_running(job):
                now = self._jobs[job.id]
                self._update(now, done=now.done + (state == RUNNING), seconds=now.seconds + seconds, state=state)

    def _fail(self, job: Job, reason: str) -> None:
        with self._changed:
            if self._is_running(job):
                self._update(self._jobs[job.id], state=FAILED, reason=reason)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
