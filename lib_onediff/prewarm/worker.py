"""The pre-warm queue: makes sizes ready before an image needs them, between images and never during one. It also
answers a load balancer's question whether this process is ready for images."""
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
# Between two calls, so that an image that waits for the WebUI's queue lock gets it: the lock is not fair.
SECONDS_LEFT_TO_IMAGES = 0.02
WAITING = "waiting for the image that is being made"
DECODING = "checking the VAE's decode"
CHECKING = "checking against the WebUI's own"
CAPTURING = "capturing a graph"
MEASURING = "measuring"
# The duration of each piece of work, in plain calls: used until this process has measured it.
WEIGHTS = {CHECKING: 6.0, CAPTURING: 3.0, MEASURING: 1.0, DECODING: 6.0}
# The work of the calls of a shape, in their order.
WORK_OF_A_SHAPE = (CHECKING, CAPTURING, MEASURING)
# The largest share that is shown of a job before it is over.
MOST_OF_A_JOB = 0.99
LOADING = "The WebUI is loading its checkpoint."
NO_CHECKPOINT = "Sizes wait to be pre-warmed, but no checkpoint is loaded yet: ask for one size by POST prewarm."


@dataclass
class Job:
    """One size in the queue. done, total: numbers of UNet calls; a call that finds its shape ready counts for the calls
    that it saves. made: the number of calls that were made. seconds: the time of all work; of_calls: of the UNet calls
    alone. share: the share of the work that is done, from 0 to 1, by time.

    source: who asked, for people. reason: why it failed, or why it is done without a graph, in one line. what: what is
    being done now, for people. shapes: of its UNet calls, pairs of the number of latents and of tokens.
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
    """Estimates the duration of each piece of a job's work from what this process has measured."""

    def __init__(self) -> None:
        # Seconds of one pixel.
        self._measured: dict[str, float] = {}

    def note(self, what: str, pixels: int, seconds: float) -> None:
        """Note the duration of a piece of work for so many pixels."""
        self._measured[what] = seconds / pixels

    def estimate(self, what: str, pixels: int) -> float:
        """Seconds that a piece of work will take; before anything was measured, in an arbitrary unit."""
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
    """The rows, with the state "queued" or "warming 33 %" where a pending job has their resolution, and with the times
    of the last job that is done.

    model: of the loaded checkpoint ("SD1"), for which the queue works: its row gets the state, or a new row at the
    beginning if there is none. None: unknown, so every row of the resolution gets it.
    """
    states: dict[str, str] = {}
    done: dict[str, Job] = {}
    for job in jobs:
        if job.state == DONE:
            done[job.size.resolution] = job
        # Of several jobs at one resolution, the running one is shown.
        if job.pending and (job.state != QUEUED or job.size.resolution not in states):
            states[job.size.resolution] = QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"
    known = list(rows)
    present = {row.resolution for row in known if is_meant(row, model)}
    new = [
        ResolutionRow(resolution, model or "", state) for resolution, state in states.items()
        if resolution not in present
    ]
    for index, row in enumerate(known):
        if is_meant(row, model):
            state = states.get(row.resolution, row.state)
            known[index] = with_prewarm(replace(row, state=state), done.get(row.resolution))
    return new + known


def with_prewarm(row: ResolutionRow, job: Job | None) -> ResolutionRow:
    """A row with the seconds of its pre-warming, and those of them that the first image is spared."""
    if job is None:
        return row
    steps = None if row.step_ms is None else job.made * row.step_ms / 1e3
    return replace(row, prewarm_s=job.seconds, saved_s=None if steps is None else max(0.0, job.of_calls - steps))


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    """Whether jobs for this model make this row ready."""
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
        """The name of the loaded model, for which the queue works, as in ResolutionRow.model."""
        return self._webui.model_name()

    def add(self, sizes: Iterable[Size], source: str, *, tokens: int = TOKENS, first: bool = False) -> list[Job]:
        """Queue sizes, and return the job of each; a size that is queued already keeps its job.

        tokens: the length of the context, 77 for each started 75 tokens of the prompt. first: ahead of the queue.
        Raises ValueError with a sentence for a length that no context has, and where OneDiff is switched off.
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
        """Copies of the jobs: the last ones that are over and the running one, in the order in which they were added,
        then the queue in its order."""
        with self._lock:
            return list(map(replace, self._jobs))

    def cancel(self, job_id: int) -> bool:
        """Cancel a job, a running one after its UNet call in progress. Returns False if it is over or unknown."""
        with self._lock:
            job = next((job for job in self._jobs if job.id == job_id and job.pending), None)
            if job is not None:
                self._end(job, CANCELLED)
            return job is not None

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every pending job, and return their number. Waits at most so long for the UNet call in progress."""
        cancelled = sum(self.cancel(job.id) for job in self.jobs())
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    # --- whether this process is ready ----------------------------------------------------------------------------

    def look_around(self) -> None:
        """Look for a checkpoint that was loaded before the scripts: after a reload, the WebUI does not announce it."""
        self._had_checkpoint = self._webui.model_name() is not None or self._webui.why_not_served() is not None

    def checkpoint_loaded(self) -> None:
        """The sizes for a loaded checkpoint have been queued. To be called no earlier: between the load and the
        queueing, why_not_ready would find nothing queued."""
        self._had_checkpoint = True

    def why_not_ready(self) -> str:
        """Why images should go elsewhere for now, as a sentence for a load balancer; "" if all sizes that the settings
        or users want are ready."""
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
        """Whether sizes will be made ready for the first checkpoint."""
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
        """Set what is being done for a job now, for people."""
        with self._lock:
            if job.state == RUNNING:
                job.what = what

    def _advance(self, job: Job, seconds: float, calls: int) -> None:
        """Count one call, which did the work of so many, unless the job was cancelled meanwhile."""
        with self._lock:
            if job.state == RUNNING:
                job.done = job.done + calls
                job.made = job.made + 1
                job.seconds = job.seconds + seconds
                job.of_calls += seconds
                job.share = max(job.share, min(self._share(job), MOST_OF_A_JOB))

    def _share(self, job: Job) -> float:
        """The share of a job's work that is done: its seconds until now, of these and the estimate for the rest."""
        pixels = job.size.width * job.size.height
        left = 0.0
        for number in range(job.done, job.total):
            batch, _ = job.shapes[number // CALLS_PER_SHAPE]
            left += self._times.estimate(WORK_OF_A_SHAPE[number % CALLS_PER_SHAPE], batch * pixels)
        left += self._times.estimate(DECODING, job.size.batch * pixels)
        return job.seconds / (job.seconds + left)

    def _end(self, job: Job, state: str, reason: str = "") -> None:
        """End a job; one that was cancelled meanwhile stays cancelled."""
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
        """Make a job's calls. Returns why it has no graph; "" if it has one. Raises Refusal, and what a call raises."""
        no_graph = ""
        while job.state == RUNNING and job.done < job.total:
            self._say(job, WAITING)
            no_graph = self._webui.exclusively(partial(self._call, job)) or no_graph
            time.sleep(SECONDS_LEFT_TO_IMAGES)
        self._webui.exclusively(partial(self._decode, job))
        return no_graph

    def _decode(self, job: Job) -> None:
        """Make the first decode at a size, which is checked. A failure is no failure of the job: the first image would
        do the check, too."""
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
        """Make the next UNet call. Returns why the last call of a shape was not replayed, if its backend has graphs;
        else "". Raises Refusal, and what the call raises.
        """
        if job.state != RUNNING:
            return ""
        shape, number = divmod(job.done, CALLS_PER_SHAPE)
        devices = self._runtime.devices
        call_stats = self._runtime.call_stats
        standing = self._runtime.settings.backend
        captures = number == 1 and devices.has_graphs(call_stats.last_call.backend or standing)
        self._say(job, MEASURING if number == 1 and not captures else WORK_OF_A_SHAPE[number])
        began = time.perf_counter()
        with self._runtime.warming_up():
            self._webui.warm(job.size.width, job.size.height, *job.shapes[shape])
        made = call_stats.last_call
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)
        if made.route not in (GRAPH, PLAIN):
            raise Refusal(made.reason or "the WebUI alone computes it")
        took = time.perf_counter() - began
        is_ready = made.route == GRAPH
        left = CALLS_PER_SHAPE - number
        self._times.note(WORK_OF_A_SHAPE[number], job.shapes[shape][0] * job.size.width * job.size.height, took)
        self._advance(job, took, left if is_ready else 1)
        lacks_graph = left == 1 and not is_ready and devices.has_graphs(made.backend or standing)
        return made.reason if lacks_graph else ""
