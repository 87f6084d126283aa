"""Pre-warming: makes sizes ready before an image needs them, between images and never during one. It also answers a
load balancer's question whether this process is ready for images."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
# The first is checked against the host's own UNet, the second captures a graph, the third replays it.
CALLS_PER_SHAPE = 3
# Between two calls, so that an image that waits for the WebUI's queue lock gets it: the lock is not fair.
SECONDS_LEFT_TO_IMAGES = 0.02
DECODING = "checking the VAE's decode"
CHECKING = "checking against the WebUI's own"
CAPTURING = "capturing a graph"
MEASURING = "measuring"
# The duration of each piece of work, in plain calls: used until this process has measured it.
WEIGHTS = {CHECKING: 6.0, CAPTURING: 3.0, MEASURING: 1.0, DECODING: 6.0}
# A call of twice the pixels takes 2 ** (1 + GROWTH) times as long, because of attention. Of emoji-sd on a CPU, 768x768
# took 21 times as long as 256x256.
GROWTH = 0.35
# The work of the calls of a shape, in their order.
WORK_OF_A_SHAPE = (CHECKING, CAPTURING, MEASURING)
LOADING = "The WebUI is loading its checkpoint."
NO_CHECKPOINT = "Sizes wait to be pre-warmed, but no checkpoint is loaded yet: ask for one size by POST prewarm."


@dataclass(eq=False)
class SizeJob(Job):
    """The job of pre-warming one size.

    done, total: numbers of UNet calls. Where a call finds its shape ready, the calls that this saves count as done.
    tokens: the length of the context.
    shapes: (rows of the call, tokens) of each UNet call that the WebUI makes for an image of this size.
    made: the number of calls that were made.
    of_calls: the seconds of the UNet calls alone.
    """

    size: Size = Size(512, 512)
    tokens: int = TOKENS
    shapes: tuple[tuple[int, int], ...] = ()
    made: int = 0
    of_calls: float = 0.0


class WorkTimes:
    """Estimates the duration of each piece of a job's work from what this process has measured."""

    def __init__(self) -> None:
        # Seconds of one pixel.
        self._measured: dict[str, float] = {}

    def note(self, what: str, pixels: int, seconds: float) -> None:
        """Note the duration of a piece of work for so many pixels."""
        self._measured[what] = seconds / pixels

    def estimate(self, what: str, pixels: int, plain: float = 1.0) -> float:
        """Seconds that a piece of work will take: from earlier work of its kind; else from work of other kinds, by
        WEIGHTS; else from plain. what: a key of WEIGHTS. pixels: the image's, times the number of latents. plain:
        seconds of a call without a graph for one pixel."""
        known = self._measured.get(what)
        if known is not None:
            return known * pixels
        units = [seconds / WEIGHTS[one] for one, seconds in self._measured.items()]
        return WEIGHTS[what] * pixels * (sum(units) / len(units) if units else plain)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)


def check_tokens(tokens: int) -> None:
    """Raise ValueError with a sentence for a context of a length that no host makes."""
    if tokens < TOKENS or tokens % TOKENS or tokens > TOKEN_CHOICES[-1]:
        *choices, last = map(str, TOKEN_CHOICES)
        raise ValueError(f"A prompt takes {', '.join(choices)} or {last} tokens, not {tokens}.")


def rows_with_jobs(rows: Iterable[ResolutionRow], jobs: Iterable[SizeJob], model: str | None) -> list[ResolutionRow]:
    """The rows, with the state "queued" or "warming 33 %" where a pending job has their resolution, and with the times
    of the last job that is done.

    model: of the loaded checkpoint ("SD1"), for which the queue works: its row gets the state, or a new row at the
    beginning if there is none. None: unknown, so every row of the resolution gets it.
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


def with_prewarm(row: ResolutionRow, job: SizeJob | None) -> ResolutionRow:
    """A row with the seconds of its pre-warming, and with saved_s, how much longer the first image would take without
    it. job: the last one done at the row's resolution; None: the row as it is."""
    if job is None:
        return row
    steps = None if row.step_ms is None else job.made * row.step_ms / 1e3
    return replace(row, prewarm_s=job.seconds, saved_s=None if steps is None else max(0.0, job.of_calls - steps))


def plain_seconds(rows: Iterable[ResolutionRow], model: str | None) -> tuple[float, int] | None:
    """Seconds of a model's UNet call for one pixel of one latent, and the number of pixels of the image that they were
    measured with: the row used last, which is taken to have two latents a call (prompt and negative prompt). None if
    no row has a time."""
    timed = [row for row in rows if is_meant(row, model) and row.step_ms is not None]
    if not timed:
        return None
    last = max(timed, key=lambda row: row.last_used)
    size = parse_size(last.resolution)
    pixels = size.width * size.height
    return (last.step_ms or 0.0) / 1e3 / (2 * pixels), pixels


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    """Whether jobs for this model (None: unknown) make this row ready. The VAE's own rows are never meant."""
    return not row.is_decode and model in (None, row.model)


class WarmUp:
    """Adds sizes to the list of jobs, and does their work. Safe to use from any thread."""

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
        """The name of the loaded model, for which sizes are made ready, as in ResolutionRow.model."""
        return self._webui.model_name()

    def add(self, sizes: Iterable[Size], source: str, *, tokens: int = TOKENS, first: bool = False) -> list[SizeJob]:
        """Queue sizes, and return the job of each; a size that runs or waits already keeps its job.

        tokens: the length of the context, 77 for each started 75 tokens of the prompt. first: ahead of the other sizes.
        Raises ValueError with a sentence for a length that no context has, and where OneDiff is switched off.
        """
        if not self._runtime.settings.enabled:
            raise ValueError(f"{OFF_IN_SETTINGS}, so nothing can be pre-warmed.")
        check_tokens(tokens)
        jobs = [self._job_of(size, source, tokens) for size in sizes]
        return self._queue.add(jobs, ahead_of=PREWARM if first else "")

    def _job_of(self, size: Size, source: str, tokens: int) -> SizeJob:
        """A new job for a size, not queued yet. source: where it was started, for users."""
        shapes = self._webui.call_shapes(size.batch, tokens)
        title = str(size) if tokens == TOKENS else f"{size}, {tokens} tokens"
        job = SizeJob(
            PREWARM, title, source, unit="call", total=CALLS_PER_SHAPE * len(shapes), key=(PREWARM, size, shapes),
            size=size, tokens=tokens, shapes=shapes,
        )
        job.work = partial(self._run, job)
        return job

    def seconds_for(self, sizes: Iterable[Size]) -> dict[Size, float]:
        """Estimated seconds of pre-warming each size, from measurements of other sizes; {} if there are none yet. The
        estimate may be low for a larger size, whose attention takes longer than in proportion."""
        known = plain_seconds(self._runtime.rows(), self.model)
        if known is None and not self._times.is_known:
            return {}
        found = {}
        for size in sizes:
            pixels = size.width * size.height
            plain = None
            if known is not None:
                seconds_of_a_pixel, of_pixels = known
                plain = seconds_of_a_pixel * max(1.0, pixels / of_pixels) ** GROWTH
            seconds = self._times.estimate(DECODING, size.batch * pixels, plain or 1.0)
            for batch, _ in self._webui.call_shapes(size.batch, TOKENS):
                for work in WORK_OF_A_SHAPE:
                    seconds += self._times.estimate(work, batch * pixels, plain or 1.0)
            found[size] = seconds
        return found

    def jobs(self) -> list[SizeJob]:
        """Copies of the jobs of sizes, in the order of the list."""
        return [job for job in self._queue.jobs() if isinstance(job, SizeJob)]

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every size that runs or waits; see JobQueue.stop."""
        return self._queue.stop(PREWARM, seconds)

    # --- whether this process is ready ----------------------------------------------------------------------------

    def look_around(self) -> None:
        """Note whether a checkpoint is loaded already, when the script starts: after a reload of the scripts, the WebUI
        does not announce it again."""
        self._had_checkpoint = self._webui.model_name() is not None or self._webui.why_not_served() is not None

    def checkpoint_loaded(self) -> None:
        """Note that a checkpoint is loaded. Call it after its sizes were queued: otherwise why_not_ready would find
        nothing queued for a moment, and call the process ready."""
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

    # --- the work of a job ----------------------------------------------------------------------------------------

    def _share(self, job: SizeJob) -> float:
        """The share of a job's work that is done, by time: the seconds until now, divided by these plus the estimated
        ones of the rest."""
        pixels = job.size.width * job.size.height
        left = 0.0
        for number in range(job.done, job.total):
            batch, _ = job.shapes[number // CALLS_PER_SHAPE]
            left += self._times.estimate(WORK_OF_A_SHAPE[number % CALLS_PER_SHAPE], batch * pixels)
        left += self._times.estimate(DECODING, job.size.batch * pixels)
        return job.seconds / (job.seconds + left)

    def _run(self, job: SizeJob) -> str:
        """Make a job's calls. Returns why it has no graph; "" if it has one. Raises Refusal, and what a call raises."""
        no_graph = ""
        while job.state == RUNNING and job.done < job.total:
            no_graph = self._in_turn(job, self._call) or no_graph
            time.sleep(SECONDS_LEFT_TO_IMAGES)
        self._in_turn(job, self._decode)
        return no_graph

    def _in_turn(self, job: SizeJob, work: Callable[[SizeJob], str]) -> str:
        """The result of work(job), run while the WebUI makes no image; see JobQueue.in_turn."""
        return self._queue.in_turn(job, self._webui.exclusively, partial(work, job))

    def _decode(self, job: SizeJob) -> str:
        """Make the first decode at a size, which is checked, unless there was one. A failure is only logged, because
        the first image does the check too. Returns "", the reason of a job without a remark."""
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
        """Let the WebUI decode random latents of this size, and write the times to the history."""
        with self._runtime.warming_up():
            self._webui.warm_decode(size.width, size.height, size.batch)
        self._runtime.history.keep(self._runtime.table.entries(), in_images=False)

    def _call(self, job: SizeJob) -> str:
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
        self._queue.say(job, MEASURING if number == 1 and not captures else WORK_OF_A_SHAPE[number])
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
        self._queue.advance(
            job, done=job.done + (left if is_ready else 1), made=job.made + 1, seconds=job.seconds + took,
            of_calls=job.of_calls + took,
        )
        self._queue.advance(job, share=self._share(job))
        lacks_graph = left == 1 and not is_ready and devices.has_graphs(made.backend or standing)
        return made.reason if lacks_graph else ""
