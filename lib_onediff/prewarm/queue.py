"""The jobs of the pre-warm queue: their order and their progress. Knows no UNet and starts no thread."""
from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..options.sizes import Size
from ..runtime.rows import ResolutionRow
from .job import CALLS_PER_SHAPE, CANCELLED, QUEUED, RUNNING, Call, Job, Shape

FINISHED_JOBS_KEPT = 50
MEASUREMENTS_KEPT = 12
# Recording a graph launches every kernel once more, beside the step that it follows.
STEPS_OF_A_CAPTURE = 2
Known = Mapping[tuple[str, int, int], tuple[float, "float | None"]]


class Estimates:
    """Learns from the calls that were made. Not for several threads at once."""

    def __init__(self) -> None:
        # Seconds for one latent pixel, by the number of the call at its shape.
        self._rates: dict[int, deque[float]] = {}

    def note(self, call: Call, seconds: float) -> None:
        """A call took so long."""
        rates = self._rates.setdefault(call.number, deque(maxlen=MEASUREMENTS_KEPT))
        rates.append(seconds / pixels(call))

    def seconds(self, calls: Iterable[Call], known: Known) -> float | None:
        """What these calls will take; None while that is not known for each of them. known: see known_times."""
        times = [self._of(call, known) for call in calls]
        return None if any(time is None for time in times) else sum(times)  # type: ignore[arg-type]

    def _of(self, call: Call, known: Known) -> float | None:
        step_ms, host_ms = known.get((call.size.resolution, *call.shape), (None, None))
        if step_ms is not None:
            if call.number == 0:
                # The host's own is not faster than ours, as a rule.
                return (step_ms + (host_ms or step_ms)) / 1e3
            return step_ms * (STEPS_OF_A_CAPTURE if call.number == 1 else 1) / 1e3
        rates = self._rates.get(call.number)
        return statistics.median(rates) * pixels(call) if rates else None


def known_times(rows: Iterable[ResolutionRow], model: str | None) -> Known:
    """Milliseconds of our step and of the host's by (resolution, latents, tokens), where this model was measured."""
    return {
        (row.resolution, shape.batch, shape.tokens): (shape.step_ms, shape.host_ms)
        for row in rows if model in (None, row.model)
        for shape in row.shapes if shape.step_ms is not None and not shape.control
    }


def pixels(call: Call) -> int:
    """How much work a call is, about."""
    return call.size.width * call.size.height * call.shape.latents


class JobQueue:
    """Safe to use from any thread; nothing waits here but wait_for_change."""

    def __init__(self) -> None:
        # What is not queued any more stands before what is; the order of that is the queue's.
        self._jobs: dict[int, Job] = {}
        self._next_id = 1
        self._version = 0
        self._estimates = Estimates()
        self._known: Known = {}
        self._changed = threading.Condition()

    def add(self, wanted: Iterable[tuple[Size, int, tuple[Shape, ...]]], source: str, known: Known) -> list[Job]:
        """Queue (size, tokens, shapes) each; what waits already keeps its place. Returns the job of each.

        known: what was measured of any shape; see known_times.
        """
        with self._changed:
            self._known = known
            waiting = {(job.size, job.shapes): job for job in self._jobs.values() if job.state == QUEUED}
            jobs = []
            for size, tokens, shapes in wanted:
                if (size, shapes) not in waiting:
                    total = CALLS_PER_SHAPE * len(shapes)
                    job = Job(self._next_id, size, source, total=total, tokens=tokens, shapes=shapes)
                    self._next_id += 1
                    waiting[size, shapes] = self._update(job, estimated_seconds=self._estimate(job))
                jobs.append(waiting[size, shapes])
            return jobs

    def jobs(self) -> list[Job]:
        """The last jobs that are over and the one that runs, in the order of asking, then the queue in its own."""
        with self._changed:
            return list(self._jobs.values())

    def get(self, job: Job) -> Job:
        """A job as it is now, or as it was if it has been forgotten since."""
        with self._changed:
            return self._jobs.get(job.id, job)

    def take(self) -> Job | None:
        """The next job, which runs from now on; None if none is queued."""
        with self._changed:
            job = next((job for job in self._jobs.values() if job.state == QUEUED), None)
            return None if job is None else self._update(job, state=RUNNING)

    def cancel(self, job_id: int) -> bool:
        """Take a job out of the queue, or tell a running one to end; False when it is over or unknown."""
        with self._changed:
            job = self._jobs.get(job_id)
            if job is None or not job.pending:
                return False
            self._update(job, state=CANCELLED, what="", estimated_seconds=None)
            return True

    def move(self, job_id: int, to: int) -> bool:
        """Give a queued job another place: 0 is the next one. False when it is not queued (any more)."""
        with self._changed:
            job = self._jobs.get(job_id)
            if job is None or job.state != QUEUED:
                return False
            queued = [other for other in self._jobs.values() if other.state == QUEUED and other is not job]
            queued.insert(max(0, to), job)
            for other in queued:
                self._jobs[other.id] = self._jobs.pop(other.id)
            self._tell()
            return True

    def say(self, job: Job, what: str) -> None:
        """What is being done for a running job now, for people."""
        with self._changed:
            if self.is_running(job) and self._jobs[job.id].what != what:
                self._update(self._jobs[job.id], what=what)

    def advance(self, job: Job, call: Call, seconds: float, calls: int) -> None:
        """A call was made, which stands for so many; counted unless the job was cancelled meanwhile."""
        with self._changed:
            self._estimates.note(call, seconds)
            if self.is_running(job):
                now = self._jobs[job.id]
                now = replace(now, done=now.done + calls, seconds=now.seconds + seconds)
                self._update(now, estimated_seconds=self._estimate(now))

    def end(self, job: Job, state: str, reason: str) -> None:
        """A running job is over; one that was cancelled meanwhile stays so."""
        with self._changed:
            if self.is_running(job):
                self._update(self._jobs[job.id], state=state, reason=reason, what="", estimated_seconds=None)

    def is_running(self, job: Job) -> bool:
        """Whether a job was taken and is not over."""
        with self._changed:
            return job.id in self._jobs and self._jobs[job.id].state == RUNNING

    def wait_for_change(self, version: int, seconds: float) -> int:
        """Wait until anything differs from what version stood for, at most so long, and return the version now."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version

    # --- call these with the condition held -----------------------------------------------------------------------

    def _estimate(self, job: Job) -> float | None:
        return self._estimates.seconds(job.calls_left(), self._known)

    def _update(self, job: Job, **changes: Any) -> Job:
        job = self._jobs[job.id] = replace(job, **changes)
        finished = [job_id for job_id, kept in self._jobs.items() if not kept.pending]
        for job_id in finished[:-FINISHED_JOBS_KEPT]:
            del self._jobs[job_id]
        self._tell()
        return job

    def _tell(self) -> None:
        self._jobs = dict(sorted(self._jobs.items(), key=lambda item: item[1].state == QUEUED))
        self._version += 1
        self._changed.notify_all()
