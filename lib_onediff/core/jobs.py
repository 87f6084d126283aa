"""What runs and waits: images, comparisons and sizes to pre-warm, in one list. Of ours, one runs at a time."""
from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from .attempt import Outcome, attempted
from .guard import first_line

log = logging.getLogger("onediff")
Result = TypeVar("Result")
AnyJob = TypeVar("AnyJob", bound="Job")
# Runs work while the WebUI makes no image, and returns what work returns.
Exclusively = Callable[[Callable[[], Any]], Any]

QUEUED = "queued"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
PENDING = (QUEUED, RUNNING)

IMAGE = "image"
COMPARISON = "comparison"
PREWARM = "prewarm"
# What a job of each kind is called where something waits for it.
NAMES = {IMAGE: "the image", COMPARISON: "the comparison", PREWARM: "pre-warming"}
# How many jobs that are over stay in the list. A comparison holds its images.
FINISHED_KEPT = {COMPARISON: 4, PREWARM: 50}
# The largest share that is shown of a job before it is over.
MOST_OF_A_JOB = 0.99
# Python aborts when it ends below a thread that computes.
SECONDS_AT_EXIT = 20.0


class Stopped(Exception):
    """Raised by a job's work that somebody has stopped: the job is cancelled, and has not failed."""


def nothing() -> None:
    """Stands for what a job has no need of."""


def no_work() -> str:
    """The work of a job that somebody else does."""
    return ""


@dataclass(eq=False)
class Job:
    """Work that somebody has asked for, and how far it is.

    kind: IMAGE, COMPARISON or PREWARM. title: what it is for, for people: "768x512 x2". source: who asked, for people.
    done, total: numbers of its unit, "step" or "call". share: the share of the work that is done, from 0 to 1.
    seconds: of work so far, without those of waiting. what: what is being done now, or what it waits for, for people.
    reason: why it failed, or what is to be known of how it ended. waits: whether it runs, but another image has the
    WebUI's turn. key: equal keys mean the same work; None: work of its own.

    work: does it, and returns the reason. cancel: stops what is in progress, when the job is cancelled. refresh: brings
    the numbers of a running job up to date.
    """

    kind: str
    title: str
    source: str = ""
    id: int = 0
    state: str = QUEUED
    unit: str = "step"
    done: int = 0
    total: int = 0
    share: float = 0.0
    seconds: float = 0.0
    what: str = ""
    reason: str = ""
    waits: bool = False
    key: Hashable = None
    work: Callable[[], str] = field(default=no_work, repr=False)
    cancel: Callable[[], None] = field(default=nothing, repr=False)
    refresh: Callable[[], None] = field(default=nothing, repr=False)

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def name(self) -> str:
        """For a sentence: "the comparison Off and Exact"."""
        return f"{NAMES[self.kind]} {self.title}".strip()

    @property
    def seconds_left(self) -> float | None:
        """An estimate, without what it may have to wait; None where it is unknown."""
        if self.state != RUNNING or not self.share or not self.seconds:
            return None
        return self.seconds * (1 - self.share) / self.share


class JobQueue:
    """The list of jobs, and the thread that does ours, one by one, while there are any. Safe to use from any thread."""

    def __init__(self, images: Callable[[], list[Job]] = list) -> None:
        """images: the WebUI's own jobs, of kind IMAGE: those that run and those that wait, the same objects each
        time."""
        self._images = images
        # What is over and what runs, then the queue in its order.
        self._jobs: list[Job] = []
        # The one that runs, until its work has returned; and the one that keeps the WebUI from making images.
        self._running: Job | None = None
        self._in_turn: Job | None = None
        self._ids = count(1)
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()

    def add(self, jobs: Iterable[AnyJob], ahead_of: str = "") -> list[AnyJob]:
        """Queue jobs, and return copies of them. In place of a job whose key another pending one has, that one is
        returned: it keeps its place, or goes ahead with the others.

        ahead_of: the kind of jobs that have to wait longer.
        """
        with self._lock:
            pending = {job.key: job for job in self._jobs if job.pending and job.key is not None}
            asked: list[Any] = []
            for job in jobs:
                known = pending.get(job.key)
                if known is None:
                    job.id = next(self._ids)
                    self._jobs.append(job)
                    pending[job.key] = job
                asked.append(known or job)
            if ahead_of:
                later = [job for job in self._jobs if job.state == QUEUED and job.kind == ahead_of and job not in asked]
                self._jobs = [job for job in self._jobs if job not in later] + later
            if asked and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="onediff-jobs", daemon=True)
                self._worker.start()
                atexit.register(self.stop, seconds=SECONDS_AT_EXIT)
            return list(map(replace, asked))

    def jobs(self) -> list[Job]:
        """Copies of the jobs: those that are over in the order in which they ended, those that run, and those that
        wait in their order. The WebUI's images come first among the last two; there is none that is over."""
        images = self._images()
        with self._lock:
            for job in images:
                job.id = job.id or next(self._ids)
            if self._running is not None and self._running.pending:
                self._running.refresh()
            if self._in_turn is not None:
                # What the WebUI makes now is a part of it.
                images = [job for job in images if job.state == QUEUED]
            every = [
                replace(job) for state in ((DONE, FAILED, CANCELLED), (RUNNING,), (QUEUED,))
                for job in (*images, *self._jobs) if job.state in state
            ]
            self._say_what_is_waited_for(every)
            return every

    def _say_what_is_waited_for(self, jobs: list[Job]) -> None:
        running = [job for job in jobs if job.state == RUNNING]
        if self._running is not None and not self._running.pending:
            # It was cancelled, and ends what it has begun.
            running.append(self._running)
        has_turn = next((job for job in running if job.kind == IMAGE), None) or self._in_turn
        for job in jobs:
            if job.waits and job.pending and has_turn is not None:
                job.what = f"waits for {has_turn.name}"
            elif job.state == QUEUED:
                ours_first = None if job.kind == IMAGE else self._running
                before = ours_first or has_turn or next(iter(running), None)
                job.what = "" if before is None else f"waits for {before.name}"

    def cancel(self, job_id: int) -> bool:
        """Cancel a job; what it has in progress ends soon after. Returns False if it is over or unknown."""
        images = self._images()
        with self._lock:
            job = next((job for job in (*images, *self._jobs) if job.id == job_id and job.pending), None)
            if job is None:
                return False
            if job in self._jobs:
                self._end(job, CANCELLED)
        job.cancel()
        return True

    def stop(self, kind: str = "", seconds: float = 0.0) -> int:
        """Cancel every pending job of ours, or of one kind, and return their number. Waits at most so long for what is
        in progress."""
        with self._lock:
            pending = [job.id for job in self._jobs if job.pending and kind in ("", job.kind)]
        cancelled = sum(map(self.cancel, pending))
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    def clear(self) -> int:
        """Take the jobs that are over out of the list, and return their number."""
        with self._lock:
            over = [job for job in self._jobs if not job.pending]
            self._jobs = [job for job in self._jobs if job.pending]
            return len(over)

    # --- for the work of jobs -------------------------------------------------------------------------------------

    def say(self, job: Job, what: str) -> None:
        """Set what is being done for a job now, for people."""
        with self._lock:
            if job.state == RUNNING:
                job.what = what

    def advance(self, job: Job, **values: Any) -> None:
        """Set the numbers of a job, unless it was cancelled meanwhile. share: never falls, and is not whole before the
        end."""
        with self._lock:
            if job.state != RUNNING:
                return
            for name, value in values.items():
                setattr(job, name, min(max(job.share, value), MOST_OF_A_JOB) if name == "share" else value)

    def in_turn(self, job: Job, exclusively: Exclusively, work: Callable[[], Result]) -> Result:
        """What work() returns or raises, run while the WebUI makes no image; until then, the job waits."""

        def begin() -> Result:
            job.waits = False
            self._in_turn = job
            try:
                return work()
            finally:
                self._in_turn = None

        job.waits = True
        try:
            result: Result = exclusively(begin)
            return result
        finally:
            job.waits = False

    # --- the worker -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._take()) is not None:
            ran = attempted(job.work)
            if ran.is_ours:
                self._end(job, DONE, ran.given())
            elif isinstance(ran.fault, Stopped):
                self._end(job, CANCELLED)
            elif ran.fault is not None:
                log.error("%s failed", job.name, exc_info=ran.fault)
                self._end(job, FAILED, first_line(ran.fault))
            elif ran.outcome is Outcome.OUT_OF_MEMORY:
                self._end(job, FAILED, f"there is not enough GPU memory for {job.title}")
            else:
                self._end(job, FAILED, ran.reason)

    def _take(self) -> Job | None:
        """The next job, which runs from now on; None if none is queued."""
        with self._lock:
            self._running = next((job for job in self._jobs if job.state == QUEUED), None)
            if self._running is not None:
                self._running.state = RUNNING
            else:
                self._worker = None
                atexit.unregister(self.stop)
            return self._running

    def _end(self, job: Job, state: str, reason: str = "") -> None:
        """End a job; one that was cancelled meanwhile stays cancelled."""
        with self._lock:
            if not job.pending:
                return
            job.state = state
            job.reason = reason
            job.what = ""
            job.share = 1.0 if state == DONE else job.share
            # The last that has ended stands last of those that are over.
            self._jobs.remove(job)
            waiting = [other for other in self._jobs if other.pending]
            over = [other for other in self._jobs if not other.pending]
            over.append(job)
            for kind, kept in FINISHED_KEPT.items():
                for old in [other for other in over if other.kind == kind][:-kept]:
                    over.remove(old)
            self._jobs = over + waiting
