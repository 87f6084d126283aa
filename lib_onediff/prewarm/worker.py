"""The pre-warm queue: makes sizes ready before an image needs them, between images and never during one.
It tells a load balancer whether this process may be sent images."""
from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from ..core.attempt import Outcome, attempted
from ..core.guard import first_line
from ..core.image import GRAPH, PLAIN
from ..core.refusal import Refusal
from ..core.settings import OFF_IN_SETTINGS
from ..core.sizes import TOKEN_CHOICES, TOKENS, Size, parse_prewarm
from ..core.table import State
from ..runtime.rows import ResolutionRow
from ..runtime.runtime import Runtime

log = logging.getLogger("onediff")
QUEUED = "queued"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
PENDING = (QUEUED, RUNNING)
# The first is checked against the host's own UNet, the second captures a graph, the third replays it.
CALLS_PER_SHAPE = 3
FINISHED_JOBS_KEPT = 50
# Python aborts when it ends below a thread that computes.
SECONDS_AT_EXIT = 20.0
# The hosts' queue lock goes to whoever is there first when it is released, and a thread that has just waited is not.
SECONDS_LEFT_TO_IMAGES = 0.02
WAITING = "waiting for the image that is being made"
DECODING = "checking the VAE's decode"
CHECKING = "checking against the WebUI's own"
CAPTURING = "capturing a graph"
MEASURING = "measuring"
# What each piece of a job's work takes, in calls that only compute: where this process has not measured it yet.
WEIGHTS = {CHECKING: 6.0, CAPTURING: 3.0, MEASURING: 1.0, DECODING: 6.0}
# Of a shape, in this order.
WORK_OF_A_SHAPE = (CHECKING, CAPTURING, MEASURING)
# What is shown of a job before it is over.
MOST_OF_A_JOB = 0.99
LOADING = "The WebUI is loading its checkpoint."
NO_CHECKPOINT = "Sizes wait to be pre-warmed, but no checkpoint is loaded yet: ask for one size by POST prewarm."


@dataclass
class Job:
    """One size in the queue. done and total count UNet calls, made those that were needed. seconds: what its work took;
    of_calls: the UNet calls alone. share: how much of the work is done, from 0 to 1, by the time that it takes.

    source: who asked, for people. reason: why it failed, or why it is done and yet has no graph, in one line. what:
    what is being done now, for people. shapes: of its UNet calls, how many latents each takes, and how many tokens.
    """

    id: int
    size: Size
    source: str
    state: str = QUEUED
    done: int = 0
    total: int = 0
    reason: str = ""
    seconds: float = 0.0
    tokens: int = TOKENS
    what: str = ""
    shapes: tuple[tuple[int, int], ...] = ()
    made: int = 0
    share: float = 0.0
    of_calls: float = 0.0

    @property
    def pending(self) -> bool:
        return self.state in PENDING


class WorkTimes:
    """How long each piece of a job's work takes, by what this process has measured."""

    def __init__(self) -> None:
        # Seconds of one pixel.
        self._measured: dict[str, float] = {}

    def note(self, what: str, pixels: int, seconds: float) -> None:
        """A piece of work was done for so many pixels."""
        self._measured[what] = seconds / pixels

    def estimate(self, what: str, pixels: int) -> float:
        """Seconds that a piece of work will take; in another unit before the first was measured."""
        known = self._measured.get(what)
        if known is not None:
            return known * pixels
        units = [seconds / WEIGHTS[one] for one, seconds in self._measured.items()]
        return WEIGHTS[what] * pixels * (sum(units) / len(units) if units else 1.0)


def check_tokens(tokens: int) -> None:
    """Raise ValueError with a sentence for a context of a length that no host makes."""
    if tokens < TOKENS or tokens % TOKENS or tokens > TOKEN_CHOICES[-1]:
        *choices, last = map(str, TOKEN_CHOICES)
        raise ValueError(f"A prompt takes {', '.join(choices)} or {last} tokens, not {tokens}.")


def rows_with_jobs(rows: Iterable[ResolutionRow], jobs: Iterable[Job], model: str | None) -> list[ResolutionRow]:
    """The rows, with the state "queued" or "warming 33 %" where a pending job has that resolution, and with what the
    last one that is done took.

    model: of the loaded checkpoint ("SD1"), for which the queue works; its row is marked, or made where there is none,
    and then stands first. None: not known, so that every row of that resolution is marked.
    """
    states: dict[str, str] = {}
    done: dict[str, Job] = {}
    for job in jobs:
        if job.state == DONE:
            done[job.size.resolution] = job
        # Of several jobs at one resolution the one that runs is told.
        if job.pending and (job.state != QUEUED or job.size.resolution not in states):
            states[job.size.resolution] = QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"
    told = list(rows)
    present = {row.resolution for row in told if is_meant(row, model)}
    new = [
        ResolutionRow(resolution, model or "", state) for resolution, state in states.items()
        if resolution not in present
    ]
    return new + [
        with_prewarm(replace(row, state=states.get(row.resolution, row.state)), done.get(row.resolution))
        if is_meant(row, model) else row for row in told
    ]


def with_prewarm(row: ResolutionRow, job: Job | None) -> ResolutionRow:
    """A row with what pre-warming it took, and what of that is no step that the first image needs anyway."""
    if job is None:
        return row
    steps = None if row.step_ms is None else job.made * row.step_ms / 1e3
    return replace(row, prewarm_s=job.seconds, saved_s=None if steps is None else max(0.0, job.of_calls - steps))


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    return not row.is_decode and model in (None, row.model)


class WarmUp:
    """The queue and its one worker thread, which lives while there is work. Safe to use from any thread. webui: see
    hosts.contract.WebUI."""

    def __init__(self, webui: Any, runtime: Runtime) -> None:
        self._webui = webui
        self._runtime = runtime
        self._had_checkpoint = False
        # What is over and what runs, then the queue in its order.
        self._jobs: list[Job] = []
        self._ids = count(1)
        self._times = WorkTimes()
        self._worker: threading.Thread | None = None
        self._lock = threading.RLock()

    @property
    def model(self) -> str | None:
        """The loaded model as the rows call it, which is what the queue makes ready."""
        return self._webui.model_name()

    def add(self, sizes: Iterable[Size], source: str, *, tokens: int = TOKENS, first: bool = False) -> list[Job]:
        """Queue sizes; one that waits already keeps its job. Returns the job of every size.

        tokens: the length of the context, 77 for each started 75 tokens of the prompt. first: before what waits.
        Raises ValueError with a sentence for a length that cannot be, and where OneDiff is switched off.
        """
        if not self._runtime.settings.enabled:
            raise ValueError(f"{OFF_IN_SETTINGS}, so nothing can be pre-warmed.")
        check_tokens(tokens)
        wanted = [(size, self._webui.call_shapes(size.batch, tokens)) for size in sizes]
        with self._lock:
            waiting = {(job.size, job.shapes): job for job in self._jobs if job.state == QUEUED}
            for size, shapes in wanted:
                if (size, shapes) not in waiting:
                    total = CALLS_PER_SHAPE * len(shapes)
                    job = Job(next(self._ids), size, source, total=total, tokens=tokens, shapes=shapes)
                    waiting[size, shapes] = job
                    self._jobs.append(job)
            if wanted and self._worker is None:
                self._worker = threading.Thread(target=self._work, name="onediff-warm-up", daemon=True)
                self._worker.start()
                atexit.register(self.stop, SECONDS_AT_EXIT)
            asked = [waiting[one] for one in wanted]
            if first:
                self._jobs.sort(key=lambda job: job.state == QUEUED and job not in asked)
            return list(map(replace, asked))

    def jobs(self) -> list[Job]:
        """As they are now: the last jobs that are over and the one that runs, in the order of asking, then the queue in
        its own."""
        with self._lock:
            return list(map(replace, self._jobs))

    def cancel(self, job_id: int) -> bool:
        """Take a job out of the queue, or end it after the UNet call in progress; False when it is over or unknown."""
        with self._lock:
            job = next((job for job in self._jobs if job.id == job_id and job.pending), None)
            if job is not None:
                self._end(job, CANCELLED)
            return job is not None

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every pending job and return how many; waits at most so long for the UNet call in progress."""
        cancelled = sum(self.cancel(job.id) for job in self.jobs())
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    # --- whether this process is ready ----------------------------------------------------------------------------

    def look_around(self) -> None:
        """After a reload of the scripts the checkpoint is there already, and nobody tells of it again."""
        self._had_checkpoint = self._webui.model_name() is not None or self._webui.why_not_served() is not None

    def checkpoint_loaded(self) -> None:
        """What a loaded checkpoint wants ready has been queued. Not earlier: the WebUI knows a new checkpoint before it
        tells, and for that moment nothing would be queued."""
        self._had_checkpoint = True

    def why_not_ready(self) -> str:
        """Why images should go elsewhere for now, as a sentence for a load balancer; "" where what the settings or
        users want ready is so."""
        if not self._had_checkpoint:
            if self._webui.loads_at_start():
                return LOADING
            if self._wants_sizes():
                return NO_CHECKPOINT
        count = sum(job.pending for job in self.jobs())
        if not count:
            return ""
        return f"{count} {'size is' if count == 1 else 'sizes are'} being made ready."

    def _wants_sizes(self) -> bool:
        """Whether the first checkpoint will have sizes made ready."""
        settings = self._runtime.settings
        history = self._runtime.history
        wanted = parse_prewarm(settings.prewarm)
        return settings.enabled and bool(wanted.sizes or wanted.most_used and history.rows(every_machine=True))

    # --- the worker -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._take()) is not None:
            ran = attempted(partial(self._run, job))
            if ran.is_ours:
                self._end(job, DONE, ran.given())
            elif ran.fault is not None:
                log.error("warming up %s failed", job.size, exc_info=ran.fault)
                self._end(job, FAILED, first_line(ran.fault))
            elif ran.outcome is Outcome.OUT_OF_MEMORY:
                self._end(job, FAILED, f"there is not enough GPU memory for {job.size}")
            else:
                self._end(job, FAILED, ran.reason)

    def _take(self) -> Job | None:
        """The next job, which runs from now on; None if none is queued."""
        with self._lock:
            job = next((job for job in self._jobs if job.state == QUEUED), None)
            if job is not None:
                job.state = RUNNING
            else:
                self._worker = None
                atexit.unregister(self.stop)
            return job

    def _say(self, job: Job, what: str) -> None:
        """What is being done for a job now, for people."""
        with self._lock:
            if job.state == RUNNING:
                job.what = what

    def _advance(self, job: Job, seconds: float, calls: int) -> None:
        """A call was made, which stands for so many; counted unless the job was cancelled meanwhile."""
        with self._lock:
            if job.state == RUNNING:
                job.done = job.done + calls
                job.made = job.made + 1
                job.seconds = job.seconds + seconds
                job.of_calls += seconds
                job.share = max(job.share, min(self._share(job), MOST_OF_A_JOB))

    def _share(self, job: Job) -> float:
        """How much of a job's work is done, by the seconds that it took, and those that what is left will take."""
        pixels = job.size.width * job.size.height
        left = 0.0
        for number in range(job.done, job.total):
            batch, _ = job.shapes[number // CALLS_PER_SHAPE]
            left += self._times.estimate(WORK_OF_A_SHAPE[number % CALLS_PER_SHAPE], batch * pixels)
        left += self._times.estimate(DECODING, job.size.batch * pixels)
        return job.seconds / (job.seconds + left)

    def _end(self, job: Job, state: str, reason: str = "") -> None:
        """A job is over; one that was cancelled meanwhile stays so."""
        with self._lock:
            if job.pending:
                job.state = state
                job.reason = reason
                job.what = ""
                job.share = 1.0 if state == DONE else job.share
                self._jobs.sort(key=lambda job: job.state == QUEUED)
                for old in [job for job in self._jobs if not job.pending][:-FINISHED_JOBS_KEPT]:
                    self._jobs.remove(old)

    def _run(self, job: Job) -> str:
        """Make a job's calls. Returns why it has no graph, if so. Raises Refusal, and what a call raises."""
        no_graph = ""
        while job.state == RUNNING and job.done < job.total:
            self._say(job, WAITING)
            no_graph = self._webui.exclusively(partial(self._call, job)) or no_graph
            time.sleep(SECONDS_LEFT_TO_IMAGES)
        self._webui.exclusively(partial(self._decode, job))
        return no_graph

    def _decode(self, job: Job) -> None:
        """Let the first decode at a size be checked now. Nothing depends on it: the first image would do it too."""
        size = job.size
        known = any(
            (entry.key.resolution, entry.key.batch) == (size.resolution, size.batch) and entry.state is not State.COLD
            for entry in self._runtime.table.entries() if entry.key.is_decode
        )
        if known or job.state != RUNNING:
            return
        self._say(job, DECODING)
        began = time.perf_counter()
        warmed = attempted(partial(self._warm_decode, size))
        if not warmed.is_ours:
            log.debug("no decode of %s was warmed up: %s", size, warmed.reason, exc_info=warmed.fault)
        took = time.perf_counter() - began
        job.seconds += took
        self._times.note(DECODING, size.batch * size.width * size.height, took)

    def _warm_decode(self, size: Size) -> None:
        with self._runtime.warming_up():
            self._webui.warm_decode(size.width, size.height, size.batch)
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)

    def _call(self, job: Job) -> str:
        """The next UNet call. Returns why the last of a shape was not replayed, where graphs are what makes it fast.

        Raises Refusal, and what the call raises.
        """
        if job.state != RUNNING:
            return ""
        place, number = divmod(job.done, CALLS_PER_SHAPE)
        devices = self._runtime.devices
        call_stats = self._runtime.call_stats
        standing = self._runtime.settings.backend
        captures = number == 1 and devices.has_graphs(call_stats.last_call.backend or standing)
        self._say(job, MEASURING if number == 1 and not captures else WORK_OF_A_SHAPE[number])
        began = time.perf_counter()
        with self._runtime.warming_up():
            self._webui.warm(job.size.width, job.size.height, *job.shapes[place])
        made = call_stats.last_call
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)
        if made.route not in (GRAPH, PLAIN):
            raise Refusal(made.reason or "the WebUI alone computes it")
        took = time.perf_counter() - began
        is_ready = made.route == GRAPH
        left = CALLS_PER_SHAPE - number
        self._times.note(WORK_OF_A_SHAPE[number], job.shapes[place][0] * job.size.width * job.size.height, took)
        self._advance(job, took, left if is_ready else 1)
        lacks_graph = left == 1 and not is_ready and devices.has_graphs(made.backend or standing)
        return made.reason if lacks_graph else ""
