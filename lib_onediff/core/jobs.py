"""The list of jobs for users: images of the WebUI, comparisons, and sizes to pre-warm, that run, wait or have finished.
Of OneDiff's own jobs, one runs at a time."""
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
# Waits until the WebUI makes no image, calls the function given while it makes none, and returns its result.
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
# The names of the kinds in sentences for users, such as "waits for the image".
NAMES = {IMAGE: "the image", COMPARISON: "the comparison", PREWARM: "pre-warming"}
# The number of finished jobs of each kind that stay in the list. A comparison keeps its images in memory.
FINISHED_KEPT = {COMPARISON: 4, PREWARM: 50}
# The largest Job.share of a job that is not finished.
MOST_OF_A_JOB = 0.99
# How long Python's exit waits at most for the worker thread: Python aborts if a thread still computes then.
SECONDS_AT_EXIT = 20.0


class Stopped(Exception):
    """Raised by Job.work when it notices that it was asked to stop: the job ends as CANCELLED, not as FAILED."""


def nothing() -> None:
    """Does nothing: the default for Job.cancel and Job.refresh."""


def no_work() -> str:
    """Does nothing and returns "": the default for Job.work, for jobs that JobQueue does not run (the WebUI's images).
    """
    return ""


@dataclass(eq=False)
class Job:
    """A piece of work in the list, and its progress. JobQueue sets id and state, and work() the numbers of the
    progress. For an image, JobQueue sets the id, and the host's images (the function `images` of JobQueue) the rest.

    kind: IMAGE, COMPARISON or PREWARM.
    title: words for users that tell the job from others of its kind: "768x512 x2".
    source: where it was started, for users.
    id: a number that JobQueue gives it; 0 before.
    state: QUEUED, RUNNING, DONE, FAILED or CANCELLED.
    unit, done, total: how much is done, and how much there is to do, in units: "step" or "call".
    share: the part of the work that is done, from 0 to 1.
    seconds: the duration of the work so far, without waiting.
    what: words for users on what it is doing now, or "waits for ..."; "" if it has finished.
    reason: why it failed, or a remark about its result, for users.
    waits: whether it is RUNNING but waits until the WebUI makes no image; see JobQueue.in_turn.
    key: JobQueue.add takes no second pending job with an equal key; None: the job is like no other.
    work: does the work, and returns the value of `reason`. Raises Stopped if it was cancelled.
    cancel: asks the work to stop; called in another thread when the user cancels the job.
    refresh: updates the numbers; called before the jobs are listed while this one runs. Not called for images.
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
        """Whether it is QUEUED or RUNNING."""
        return self.state in PENDING

    @property
    def name(self) -> str:
        """The job's name in a sentence, kind and title: "the comparison Off and Exact"."""
        return f"{NAMES[self.kind]} {self.title}".strip()

    @property
    def seconds_left(self) -> float | None:
        """The estimated duration of the work that is left, in seconds, without waiting; None unless the job is RUNNING
        and a part is done."""
        if self.state != RUNNING or not self.share or not self.seconds:
            return None
        return self.seconds * (1 - self.share) / self.share


class JobQueue:
    """The list of jobs, and the thread that runs OneDiff's own jobs one by one. The WebUI's images are listed, but run
    by the WebUI itself. Safe to use from any thread."""

    def __init__(self, images: Callable[[], list[Job]] = list) -> None:
        """images: returns the Jobs, of kind IMAGE, of the WebUI's images that run or wait. An image must have the same
        Job object in each call."""
        self._images = images
        # The finished jobs and the running one, then the queued ones in their order.
        self._jobs: list[Job] = []
        # The job whose work the thread runs, until it has returned, and the one during which the WebUI makes no image.
        self._running: Job | None = None
        self._in_turn: Job | None = None
        self._ids = count(1)
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()

    def add(self, jobs: Iterable[AnyJob], ahead_of: str = "") -> list[AnyJob]:
        """Append jobs to the queue, start the worker thread if none runs, and return copies of the jobs in their order.
        A job with the key of a pending one is not queued; the copy is then of the pending one.

        ahead_of: a kind of jobs, such as PREWARM; "": none. All other queued jobs of this kind are moved to the end of
        the queue, behind the jobs that are returned.
        """
        with self._lock:
            pending = {job.key: job for job in self._jobs if job.pending and job.key is not None}
            wanted: list[Any] = []
            for job in jobs:
                known = pending.get(job.key)
                if known is None:
                    job.id = next(self._ids)
                    self._jobs.append(job)
                    if job.key is not None:
                        pending[job.key] = job
                wanted.append(known or job)
            if ahead_of:
                queued = [job for job in self._jobs if job.state == QUEUED and job.kind == ahead_of]
                later = [job for job in queued if job not in wanted]
                self._jobs = [job for job in self._jobs if job not in later] + later
            if wanted and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="onediff-jobs", daemon=True)
                self._worker.start()
                atexit.register(self.stop, seconds=SECONDS_AT_EXIT)
            return list(map(replace, wanted))

    def jobs(self) -> list[Job]:
        """Copies of all jobs: the finished jobs in the order of their ends, the running ones, and the queued ones in
        their order. The WebUI's images come first among the running and the queued jobs. Finished images are left out,
        and during in_turn() the running ones too, because a job of OneDiff makes them.
        """
        images = self._images()
        with self._lock:
            for job in images:
                job.id = job.id or next(self._ids)
            if self._running is not None and self._running.pending:
                self._running.refresh()
            if self._in_turn is not None:
                # The WebUI's running images are a part of this job.
                images = [job for job in images if job.state == QUEUED]
            every = [
                replace(job) for state in ((DONE, FAILED, CANCELLED), (RUNNING,), (QUEUED,))
                for job in (*images, *self._jobs) if job.state in state
            ]
            self._name_what_is_waited_for(every)
            return every

    def _name_what_is_waited_for(self, jobs: list[Job]) -> None:
        """Set `what` of the jobs that wait to "waits for ..." with the name of the job that they wait for, or to "" if
        there is none. `what` of other jobs stays."""
        running = [job for job in jobs if job.state == RUNNING]
        if self._running is not None and not self._running.pending:
            # It was cancelled, but its work has not returned yet.
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
        """Cancel a job, or ask the WebUI to stop an image. A job of OneDiff is CANCELLED at once; its work in progress
        is asked to stop, and may go on for a while. Returns False if the job is finished or unknown, else True."""
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
        """Cancel all pending jobs of OneDiff, and return their number. kind: only jobs of this kind; "": all. seconds:
        how long to wait at most until the worker thread has ended, which also runs the jobs of other kinds first; 0: do
        not wait."""
        with self._lock:
            pending = [job.id for job in self._jobs if job.pending and kind in ("", job.kind)]
        cancelled = sum(map(self.cancel, pending))
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    def clear(self) -> int:
        """Remove the finished jobs, failed and cancelled ones included, from the list, and return their number."""
        with self._lock:
            over = [job for job in self._jobs if not job.pending]
            self._jobs = [job for job in self._jobs if job.pending]
            return len(over)

    # --- for the work of jobs -------------------------------------------------------------------------------------

    def say(self, job: Job, what: str) -> None:
        """Set `what` of a running job: words for users for what it is doing now. Does nothing if it was cancelled."""
        with self._lock:
            if job.state == RUNNING:
                job.what = what

    def advance(self, job: Job, **values: Any) -> None:
        """Set attributes of a running job, such as done=3. Does nothing if it was cancelled. `share` never falls, and
        is at most MOST_OF_A_JOB."""
        with self._lock:
            if job.state != RUNNING:
                return
            for name, value in values.items():
                setattr(job, name, min(max(job.share, value), MOST_OF_A_JOB) if name == "share" else value)

    def in_turn(self, job: Job, exclusively: Exclusively, work: Callable[[], Result]) -> Result:
        """The result of work(), which runs while the WebUI makes no image. Job.work calls this. While it waits,
        job.waits is True, and the list shows what it waits for. exclusively: see Exclusively. Exceptions of work() are
        raised."""

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
        """Run queued jobs, one after another, until there are none. This is the worker thread's function."""
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
        """Mark the first queued job as RUNNING, and return it; None if none is queued, and the worker must end."""
        with self._lock:
            self._running = next((job for job in self._jobs if job.state == QUEUED), None)
            if self._running is not None:
                self._running.state = RUNNING
            else:
                self._worker = None
                atexit.unregister(self.stop)
            return self._running

    def _end(self, job: Job, state: str, reason: str = "") -> None:
        """Set the final state of a job, and drop the oldest finished ones beyond FINISHED_KEPT. Does nothing if it was
        cancelled meanwhile."""
        with self._lock:
            if not job.pending:
                return
            job.state = state
            job.reason = reason
            job.what = ""
            job.share = 1.0 if state == DONE else job.share
            # Finished jobs are in the order of their ends.
            self._jobs.remove(job)
            waiting = [other for other in self._jobs if other.pending]
            over = [other for other in self._jobs if not other.pending]
            over.append(job)
            for kind, kept in FINISHED_KEPT.items():
                for old in [other for other in over if other.kind == kind][:-kept]:
                    over.remove(old)
            self._jobs = over + waiting
