"""Pre-warming: makes sizes ready before an image needs them, between images and never during one. Load balancers ask
WarmUp.why_not_ready whether this process is ready for images."""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ..core.attempt import attempted
from ..core.image import GRAPH, PLAIN
from ..core.jobs import DONE, PREWARM, QUEUED, RUNNING, Job, JobQueue
from ..core.refusal import Refusal
from ..core.settings import OFF_IN_SETTINGS
from ..core.sizes import TOKEN_CHOICES, TOKENS, Size, parse_prewarm, parse_size
from ..core.table import State
from ..runtime.rows import ResolutionRow
from ..runtime.runtime import Runtime

log = logging.getLogger("onediff")
# UNet calls that make a shape ready: the first is compared with the host's own UNet, the second captures a graph, and
# the third replays the graph.
CALLS_PER_SHAPE = 3
# The pause after each call, in which an image that waits for the WebUI's queue lock can get it: the lock is not fair.
SECONDS_LEFT_TO_IMAGES = 0.02
# The kinds of work of a job, in words for users (Job.what).
DECODING = "checking the VAE's decode"
CHECKING = "comparing with the WebUI's own UNet"
CAPTURING = "capturing a graph"
MEASURING = "measuring"
# How long each kind of work takes, as a multiple of a usual call. Checking and capturing also take some seconds that do
# not depend on the size, so their times at one size say little about another.
WEIGHTS = {CHECKING: 6.0, CAPTURING: 3.0, MEASURING: 1.0, DECODING: 6.0}
# A call of twice the pixels takes 2 ** (1 + GROWTH) times as long, because of attention. Of emoji-sd on a CPU, 768x768
# took 21 times as long as 256x256. Used for sizes larger than the one that was timed.
GROWTH = 0.35
# The times of a size are not extrapolated to more than this many times its pixels: calls of small sizes take nearly as
# long as those of still smaller ones, so an estimate far from what was timed may be many times too high.
MOST_TIMES_THE_PIXELS = 4
# The work of each of the CALLS_PER_SHAPE calls, in their order.
WORK_OF_A_SHAPE = (CHECKING, CAPTURING, MEASURING)
# The reasons of WarmUp.why_not_ready before the first checkpoint, for users and load balancers.
LOADING = "The WebUI is loading its checkpoint."
NO_CHECKPOINT = (
    "The settings want sizes pre-warmed, but no checkpoint is loaded yet: POST prewarm with any one size loads the "
    "checkpoint."
)


@dataclass(eq=False)
class SizeJob(Job):
    """The job of pre-warming one size.

    done, total: numbers of UNet calls; total is CALLS_PER_SHAPE for each shape. If a shape is ready after fewer calls,
        its remaining calls are not made, and count as done.
    size: in pixels, with the number of images at once.
    tokens: the length of the prompt's context.
    shapes: (number of latents, tokens) for each kind of UNet call that the WebUI makes for images of this size.
    made: the number of UNet calls that were really made.
    of_calls: the seconds that the UNet calls took; Job.seconds has the decode's too.
    """

    size: Size = Size(512, 512)
    tokens: int = TOKENS
    shapes: tuple[tuple[int, int], ...] = ()
    made: int = 0
    of_calls: float = 0.0


class TimedStep(NamedTuple):
    """How long a usual UNet call takes at some size. pixels: of the image. seconds: for one latent."""

    pixels: int
    seconds: float

    def seconds_at(self, pixels: int) -> float:
        """Estimated seconds of such a call for one latent of an image of so many pixels; if that is far (is_far_from),
        those for the largest image that is not far, which are too few."""
        ratio = min(pixels / self.pixels, MOST_TIMES_THE_PIXELS)
        return self.seconds * ratio * max(1.0, ratio) ** GROWTH

    def is_far_from(self, pixels: int) -> bool:
        """Whether an image of so many pixels has more than MOST_TIMES_THE_PIXELS of this one."""
        return pixels > MOST_TIMES_THE_PIXELS * self.pixels

    def distance_to(self, pixels: int) -> float:
        """How far an image of so many pixels is from this one: 0 for the same number of pixels."""
        return abs(math.log(pixels / self.pixels))


class Estimate(NamedTuple):
    """How long pre-warming a size takes, in seconds. is_least: whether it takes longer than that, by an unknown time,
    because only much smaller sizes were timed."""

    seconds: float
    is_least: bool = False


class WorkTimes:
    """Estimates which share of a job each kind of work (a key of WEIGHTS) takes, from the work that this process has
    measured."""

    def __init__(self) -> None:
        # The kind of work: the seconds that it took for each pixel, at the last measurement.
        self._measured: dict[str, float] = {}

    def note(self, kind: str, pixels: int, seconds: float) -> None:
        """Note how many seconds some work took, in place of an earlier measurement of its kind. kind, pixels: as for
        estimate()."""
        self._measured[kind] = seconds / pixels

    def estimate(self, kind: str, pixels: int) -> float:
        """Seconds that some work will take, in proportion to its pixels. They are computed from the last measurement of
        this kind of work; if there is none, from those of other kinds and WEIGHTS. If nothing was measured, only the
        ratio of two estimates is right.

        kind: a key of WEIGHTS. pixels: of the image, times the number of latents.
        """
        known = self._measured.get(kind)
        if known is not None:
            return known * pixels
        units = [seconds / WEIGHTS[one] for one, seconds in self._measured.items()]
        return WEIGHTS[kind] * pixels * (sum(units) / len(units) if units else 1.0)


def check_tokens(tokens: int) -> None:
    """Raise ValueError, with a sentence for users, unless a context may have this many tokens: 77, 154 or 231."""
    if tokens < TOKENS or tokens % TOKENS or tokens > TOKEN_CHOICES[-1]:
        *choices, last = map(str, TOKEN_CHOICES)
        raise ValueError(
            f"tokens must be {', '.join(choices)} or {last} ({TOKENS} for every {TOKENS - 2} tokens of the "
            f"prompt, rounded up), not {tokens}; no size was queued."
        )


def rows_with_jobs(rows: Iterable[ResolutionRow], jobs: Iterable[SizeJob], model: str | None) -> list[ResolutionRow]:
    """The rows of `rows`, with what the jobs tell of them. If a pending job has a row's resolution, the row's state is
    "queued" or "warming 33 %"; if a job for the resolution has ended as DONE, the row has the last such job's times
    (see with_prewarm). Before these rows come new ones, for the resolutions of pending jobs that have no row yet.

    model: the name of the loaded model ("SD1"), which jobs make ready: rows of other models and of the VAE stay as they
    are. None: the loaded model is unknown, so jobs count for the rows of every model.
    """
    states: dict[str, str] = {}
    done: dict[str, SizeJob] = {}
    for job in jobs:
        if job.state == DONE:
            done[job.size.resolution] = job
        # Of several jobs at one resolution, the running one is shown.
        if job.pending and (job.state != QUEUED or job.size.resolution not in states):
            states[job.size.resolution] = QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"
    known = list(rows)
    present = {row.resolution for row in known if is_made_ready(row, model)}
    new = [
        ResolutionRow(resolution, model or "", state) for resolution, state in states.items()
        if resolution not in present
    ]
    for index, row in enumerate(known):
        if is_made_ready(row, model):
            state = states.get(row.resolution, row.state)
            known[index] = with_prewarm(replace(row, state=state), done.get(row.resolution))
    return new + known


def with_prewarm(row: ResolutionRow, job: SizeJob | None) -> ResolutionRow:
    """A copy of the row with the job's duration (prewarm_s), and with the seconds by which the job has shortened the
    first image (saved_s): the duration of the job's UNet calls, less that of as many usual steps of the row. saved_s is
    at least 0, and None if the row has no step time.

    job: the last job that is DONE at the row's resolution; None if there is none: then the row is returned as it is.
    """
    if job is None:
        return row
    steps = None if row.step_ms is None else job.made * row.step_ms / 1e3
    return replace(row, prewarm_s=job.seconds, saved_s=None if steps is None else max(0.0, job.of_calls - steps))


def timed_steps(rows: Iterable[ResolutionRow], model: str | None) -> list[TimedStep]:
    """The usual UNet calls of a model at each size, from its rows that have a step time. The row's calls are assumed to
    have two latents, for prompt and negative prompt.

    model: None if unknown: then the rows of every model count.
    """
    steps = []
    for row in rows:
        if is_made_ready(row, model) and row.step_ms is not None:
            try:
                size = parse_size(row.resolution)
            except ValueError:
                # Images may have sizes that cannot be pre-warmed, such as those of an upscaler.
                continue
            steps.append(TimedStep(size.width * size.height, row.step_ms / 1e3 / 2))
    return steps


def is_made_ready(row: ResolutionRow, model: str | None) -> bool:
    """Whether jobs can make this row ready: whether it is a row of the loaded model's UNet, not of a VAE. model: the
    name of the loaded model; None if unknown: then every row of a UNet counts."""
    return not row.is_decode and model in (None, row.model)


class WarmUp:
    """Adds jobs that pre-warm sizes to the list of jobs, and does their work (_run) in the list's worker thread. Safe
    to use from any thread."""

    def __init__(self, webui: Any, runtime: Runtime, jobs: JobQueue) -> None:
        """webui: the adapter of the WebUI (hosts.contract.WebUI), which makes the UNet calls and decodes. jobs: the
        list that the jobs are added to."""
        self._webui = webui
        self._runtime = runtime
        self._queue = jobs
        self._had_checkpoint = False
        self._times = WorkTimes()

    @property
    def model(self) -> str | None:
        """The name of the loaded model, for which sizes are made ready, as in ResolutionRow.model; None if none is
        loaded or OneDiff does not serve it."""
        return self._webui.model_name()

    def add(self, sizes: Iterable[Size], source: str, *, tokens: int = TOKENS, first: bool = False) -> list[SizeJob]:
        """Queue a job for each size, also for sizes that are ready, and return copies of the jobs. If a job of the same
        size and tokens is pending already, no other one is queued, and a copy of the pending job is returned. Returns
        at once; the work is done between images.

        source: where this was started, for users. tokens: the length of the context, 77 for each started 75 tokens of
        the prompt. first: whether these sizes come before all sizes that wait already. Raises ValueError, with a
        sentence for users, if a context cannot have this length (see check_tokens), and if OneDiff is switched off.
        """
        if not self._runtime.settings.enabled:
            raise ValueError(f"{OFF_IN_SETTINGS}, so nothing can be pre-warmed.")
        check_tokens(tokens)
        jobs = [self._job_of(size, source, tokens) for size in sizes]
        return self._queue.add(jobs, ahead_of=PREWARM if first else "")

    def _job_of(self, size: Size, source: str, tokens: int) -> SizeJob:
        """A new job for a size, not queued yet. source, tokens: as for add()."""
        shapes = self._webui.call_shapes(size.batch, tokens)
        title = str(size) if tokens == TOKENS else f"{size}, {tokens} tokens"
        job = SizeJob(
            PREWARM, title, source, unit="call", total=CALLS_PER_SHAPE * len(shapes), key=(PREWARM, size, shapes),
            size=size, tokens=tokens, shapes=shapes,
        )
        job.work = partial(self._run, job)
        return job

    def estimates(self, sizes: Iterable[Size]) -> dict[Size, Estimate]:
        """How long pre-warming each size for a context of TOKENS takes, estimated from WEIGHTS and the step time in the
        table whose size is nearest; {} if the table has none for the loaded model."""
        steps = timed_steps(self._runtime.rows(), self.model)
        if not steps:
            return {}
        of_a_shape = sum(WEIGHTS[kind] for kind in WORK_OF_A_SHAPE)
        found = {}
        for size in sizes:
            pixels = size.width * size.height
            nearest = min(steps, key=lambda step: step.distance_to(pixels))
            latents = sum(batch for batch, _ in self._webui.call_shapes(size.batch, TOKENS))
            calls = of_a_shape * latents + WEIGHTS[DECODING] * size.batch
            found[size] = Estimate(calls * nearest.seconds_at(pixels), nearest.is_far_from(pixels))
        return found

    def jobs(self) -> list[SizeJob]:
        """Copies of all jobs that pre-warm a size, finished ones too, in the order of JobQueue.jobs."""
        return [job for job in self._queue.jobs() if isinstance(job, SizeJob)]

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every pending pre-warm job, and return the number of these jobs. seconds: how long to wait at most
        until the call in progress has ended; 0: do not wait."""
        return self._queue.stop(PREWARM, seconds)

    # --- whether this process is ready ----------------------------------------------------------------------------

    def find_loaded_checkpoint(self) -> None:
        """Note whether a checkpoint is loaded at present, also one that OneDiff does not serve. Called when the script
        starts: after a reload of the scripts, the WebUI does not announce a checkpoint that it has loaded before, so
        checkpoint_loaded() is not called."""
        self._had_checkpoint = self._webui.model_name() is not None or self._webui.why_not_served() is not None

    def checkpoint_loaded(self) -> None:
        """Note that a checkpoint is loaded. Call it after the checkpoint's sizes were queued: otherwise why_not_ready()
        would find nothing queued for a moment, and report the process as ready."""
        self._had_checkpoint = True

    def why_not_ready(self) -> str:
        """Why images should go elsewhere for now, as a sentence for a load balancer; "" if this process is ready.

        There are three reasons: before the first checkpoint, LOADING if the WebUI loads one when it starts, whether or
        not any size is wanted, and else NO_CHECKPOINT if the settings want a size; at any time, the number of sizes
        that are queued or being made ready. A size that failed or was cancelled is no reason.
        """
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
        """Whether the settings may queue a size once the first checkpoint is loaded. "most used" counts if the history
        has any size; whether the checkpoint's model has one is not known before."""
        settings = self._runtime.settings
        history = self._runtime.history
        wanted = parse_prewarm(settings.prewarm)
        return settings.enabled and bool(wanted.sizes or wanted.most_used and history.rows(every_machine=True))

    # --- the work of a job ----------------------------------------------------------------------------------------

    def _share(self, job: SizeJob) -> float:
        """The share of a job's work that is done, from 0 to 1: the seconds that it took until now, divided by the sum
        of these seconds and the estimated seconds of the work that is left, decode included."""
        pixels = job.size.width * job.size.height
        left = 0.0
        for number in range(job.done, job.total):
            batch, _ = job.shapes[number // CALLS_PER_SHAPE]
            left += self._times.estimate(WORK_OF_A_SHAPE[number % CALLS_PER_SHAPE], batch * pixels)
        left += self._times.estimate(DECODING, job.size.batch * pixels)
        return job.seconds / (job.seconds + left)

    def _run(self, job: SizeJob) -> str:
        """Do a job's work: its UNet calls, each while the WebUI makes no image, and then a decode. Ends early if the
        job is cancelled. Returns why a shape got no graph, for users; "" if every shape got one, and for a backend
        without graphs. Raises Refusal if the host computes a call, and any exception of a call."""
        no_graph = ""
        while job.state == RUNNING and job.done < job.total:
            no_graph = self._in_turn(job, self._call) or no_graph
            time.sleep(SECONDS_LEFT_TO_IMAGES)
        self._in_turn(job, self._decode)
        return no_graph

    def _in_turn(self, job: SizeJob, work: Callable[[SizeJob], str]) -> str:
        """Wait until the WebUI makes no image, run work(job), and return its result; see JobQueue.in_turn."""
        return self._queue.in_turn(job, self._webui.exclusively, partial(work, job))

    def _decode(self, job: SizeJob) -> str:
        """Let the VAE decode at the job's size, so that OneDiff checks the decode before the first image. Does nothing
        if the job no longer runs, or if a decode of this size was checked before, even if that check failed. If the
        decode fails, that is only logged, because the first image tries again. The time of the decode, failed or not,
        is added to the job's seconds and to the measurements for estimates. Always returns "", because _in_turn wants a
        string: no decode gives the job a reason."""
        size = job.size
        known = any(
            (entry.key.resolution, entry.key.batch) == (size.resolution, size.batch) and entry.state is not State.COLD
            for entry in self._runtime.table.entries() if entry.key.is_decode
        )
        if known or job.state != RUNNING:
            return ""
        self._queue.say(job, DECODING)
        began = time.perf_counter()
        warmed = attempted(partial(self._warm_decode, size))
        if not warmed.is_ours:
            log.debug("no decode of %s was warmed up: %s", size, warmed.reason, exc_info=warmed.fault)
        took = time.perf_counter() - began
        job.seconds += took
        self._times.note(DECODING, size.batch * size.width * size.height, took)
        return ""

    def _warm_decode(self, size: Size) -> None:
        """Let the WebUI decode random latents of this size, and write the times of all shapes to the history. Raises
        any exception of the decode."""
        with self._runtime.warming_up():
            self._webui.warm_decode(size.width, size.height, size.batch)
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)

    def _call(self, job: SizeJob) -> str:
        """Make a job's next UNet call, and update the job's progress: if the call was replayed from a graph, the
        shape's remaining calls count as done. Does nothing if the job is cancelled.

        Returns "", except after the last call of a shape that has no graph although its backend makes graphs: then why
        it has none, which may be "". Raises Refusal if the host computed the call, and any exception of the call.
        """
        if job.state != RUNNING:
            return ""
        shape, number = divmod(job.done, CALLS_PER_SHAPE)
        devices = self._runtime.devices
        call_stats = self._runtime.call_stats
        standing = self._runtime.settings.backend
        captures = number == 1 and devices.has_graphs(call_stats.last_call.backend or standing)
        self._queue.say(job, MEASURING if number == 1 and not captures else WORK_OF_A_SHAPE[number])
        began = time.perf_counter()
        with self._runtime.warming_up():
            self._webui.warm(job.size.width, job.size.height, *job.shapes[shape])
        made = call_stats.last_call
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)
        if made.route not in (GRAPH, PLAIN):
            raise Refusal(made.reason or "the WebUI computes this size without OneDiff")
        took = time.perf_counter() - began
        is_ready = made.route == GRAPH
        left = CALLS_PER_SHAPE - number
        self._times.note(WORK_OF_A_SHAPE[number], job.shapes[shape][0] * job.size.width * job.size.height, took)
        self._queue.advance(
            job, done=job.done + (left if is_ready else 1), made=job.made + 1, seconds=job.seconds + took,
            of_calls=job.of_calls + took,
        )
        self._queue.advance(job, share=self._share(job))
        lacks_graph = left == 1 and not is_ready and devices.has_graphs(made.backend or standing)
        return made.reason if lacks_graph else ""
