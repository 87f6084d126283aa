"""The pre-warm queue: makes sizes ready before an image needs them, between images and never during one."""
from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from ..core.guard import first_line, outcome_of
from ..core.refusal import Refusal
from ..core.table import ShapeTable, State
from ..devices.registry import Devices
from ..options.settings import OFF_IN_SETTINGS, Settings
from ..options.sizes import Size
from ..runtime.rows import ResolutionRow
from ..store.history import History
from .job import CALLS_PER_SHAPE, DONE, FAILED, TOKENS, Call, CannotWarm, Job, Shape, check_tokens
from .queue import JobQueue, known_times

log = logging.getLogger("onediff")
Result = TypeVar("Result")

# Python aborts when it ends below a thread that computes.
SECONDS_AT_EXIT = 20.0
# The hosts' queue lock goes to whoever is there first when it is released, and a thread that has just waited is not.
SECONDS_LEFT_TO_IMAGES = 0.02
SECONDS_BETWEEN_LOOKS = 0.2
WAITING = "waiting for the image that is being made"
COMPILING = "compiling"
DECODING = "checking the VAE's decode"
CHECKING, CAPTURING, MEASURING = "checking against the WebUI's own", "capturing a graph", "measuring"


class Warms(Protocol):
    """What the queue asks of a WebUI."""

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the WebUI would, at a size in pixels; batch counts latents. Raises CannotWarm
        and Refusal."""

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode random latents of so many images of a size in pixels, as the WebUI would."""

    def call_shapes(self, images: int, tokens: int) -> Iterable[tuple[int, int]]:
        """(latents, tokens) of the UNet calls of so many images at once, the usual one first."""

    def model_name(self) -> str | None:
        """What the rows of the loaded checkpoint call its network ("SD1"); None where none is loaded."""

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while no image is being made, and return what it returns."""


class Reports(Protocol):
    """What the queue asks of the runtime."""

    history: History
    settings: Settings
    table: ShapeTable
    devices: Devices

    def status(self) -> dict[str, Any]:
        """What the last UNet call was; "route", "reason" and "backend" among it."""

    def rows(self) -> list[ResolutionRow]:
        """What is known about every resolution."""

    def compiling(self) -> Iterable[Future[Any]]:
        """Begin what the model still lacks; one after the other what has to end until nothing is lacking."""

    def wait_for_compile(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a UNet call waits for what is being compiled."""


class WarmUp:
    """The queue and its one worker thread, which lives while there is work. Safe to use from any thread."""

    def __init__(self, webui: Warms, runtime: Reports, *, unbatched: bool = True) -> None:
        """unbatched: besides the two halves of the guidance in one call, make the other calls ready that the WebUI may
        make at a size: without guidance, for prompts of different lengths."""
        self._webui = webui
        self._runtime = runtime
        self._unbatched = unbatched
        self._queue = JobQueue()
        self._worker: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def model(self) -> str | None:
        """The loaded model as the rows call it, which is what the queue makes ready."""
        return self._webui.model_name()

    def add(
        self, sizes: Iterable[Size], source: str, *, tokens: int = TOKENS, unbatched: bool | None = None
    ) -> list[Job]:
        """Queue sizes; one that waits already keeps its place. Returns the job of every size.

        tokens: the length of the context, 77 for each started 75 tokens of the prompt. unbatched: as the queue's own
        by default. Raises ValueError with a sentence for a length that cannot be, and where OneDiff is switched off.
        """
        if not self._runtime.settings.enabled:
            raise ValueError(f"{OFF_IN_SETTINGS}, so nothing can be made ready.")
        check_tokens(tokens)
        wanted = [(size, tokens, self._shapes(size, tokens, unbatched)) for size in sizes]
        if not wanted:
            return []
        known = known_times(self._runtime.rows(), self.model)
        with self._starting:
            jobs = self._queue.add(wanted, source, known)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="onediff-warm-up", daemon=True)
                self._worker.start()
                atexit.register(self.stop, SECONDS_AT_EXIT)
        return jobs

    def jobs(self) -> list[Job]:
        """The last jobs that are over and the one that runs, in the order of asking, then the queue in its own."""
        return self._queue.jobs()

    def busy(self) -> bool:
        """Whether any job is pending."""
        return any(job.pending for job in self.jobs())

    def cancel(self, job_id: int) -> bool:
        """Take a job out of the queue, or end it after the UNet call in progress; False when it is over or unknown."""
        return self._queue.cancel(job_id)

    def move(self, job_id: int, to: int) -> bool:
        """Give a queued job another place in the queue: 0 is the next one. False when it is not queued (any more)."""
        return self._queue.move(job_id, to)

    def stop(self, seconds: float = 0.0) -> int:
        """Cancel every pending job and return how many; waits at most so long for the UNet call in progress."""
        cancelled = sum(self.cancel(job.id) for job in self.jobs())
        worker = self._worker
        if worker is not None and seconds:
            worker.join(seconds)
        return cancelled

    def wait_for_change(self, version: int, seconds: float) -> int:
        """Wait until anything differs from what version stood for, at most so long, and return the version now."""
        return self._queue.wait_for_change(version, seconds)

    # --- the worker -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                self._run(job)
            except (CannotWarm, Refusal) as refusal:
                self._queue.end(job, FAILED, str(refusal))
            except Exception as error:
                log.exception("warming up %s failed", job.size)
                self._queue.end(job, FAILED, first_line(error))

    def _take(self) -> Job | None:
        with self._starting:
            job = self._queue.take()
            if job is None:
                self._worker = None
                atexit.unregister(self.stop)
            return job

    def _run(self, job: Job) -> None:
        self._compile(job)
        no_graph = ""
        while self._queue.is_running(job) and (calls := self._queue.get(job).calls_left()):
            call = calls[0]
            self._queue.say(job, WAITING)
            # A host may run this in a thread that prints tracebacks, and a refusal is none.
            outcome = self._webui.exclusively(partial(outcome_of, partial(self._call, job, call))).result()
            if outcome is not None:
                is_ready = outcome.route == "graph"
                no_graph = no_graph or outcome.why_no_graph(call)
                self._queue.advance(job, call, outcome.seconds, CALLS_PER_SHAPE - call.number if is_ready else 1)
            time.sleep(SECONDS_LEFT_TO_IMAGES)
        self._webui.exclusively(lambda: self._decode(job))
        self._queue.end(job, DONE, no_graph)

    def _compile(self, job: Job) -> None:
        """Meanwhile images can be made, by the host's own UNet."""
        self._queue.say(job, COMPILING)
        for compiling in self._runtime.compiling():
            while self._queue.is_running(job) and not compiling.done():
                wait([compiling], SECONDS_BETWEEN_LOOKS)

    def _decode(self, job: Job) -> None:
        """Let the first decode at a size be checked now. Nothing depends on it: the first image would do it too."""
        size = job.size
        known = any(
            (entry.key.resolution, entry.key.batch) == (size.resolution, size.batch) and entry.state is not State.COLD
            for entry in self._runtime.table.entries() if entry.key.is_decode
        )
        if known or not self._queue.is_running(job):
            return
        self._queue.say(job, DECODING)
        try:
            with self._runtime.wait_for_compile():
                self._webui.warm_decode(size.width, size.height, size.batch)
            self._runtime.history.keep(self._runtime.table.entries(), in_images=False)
        except Exception as error:
            log.debug("no decode of %s was warmed up: %s", size, first_line(error), exc_info=True)

    def _call(self, job: Job, call: Call) -> Made | None:
        """One UNet call: what came of it, or None for a cancelled job. Raises CannotWarm, and what the call raises."""
        if not self._queue.is_running(job):
            return None
        self._queue.say(job, self._what(call))
        began = time.perf_counter()
        try:
            with self._runtime.wait_for_compile():
                self._webui.warm(call.size.width, call.size.height, *call.shape)
            status = self._runtime.status()
            self._runtime.history.keep(self._runtime.table.entries(), in_images=False)
        except torch.cuda.OutOfMemoryError:
            raise CannotWarm(f"there is not enough GPU memory for {call.size}") from None
        if status["route"] not in ("graph", "plain"):
            raise CannotWarm(status["reason"] or "the WebUI's own UNet serves it")
        has_graphs = self._runtime.devices.has_graphs(status["backend"])
        return Made(time.perf_counter() - began, status["route"], has_graphs, status["reason"])

    def _what(self, call: Call) -> str:
        if call.number == 0:
            return CHECKING
        captures = call.number == 1 and self._runtime.devices.has_graphs(self._runtime.status()["backend"])
        return CAPTURING if captures else MEASURING

    def _shapes(self, size: Size, tokens: int, unbatched: bool | None) -> tuple[Shape, ...]:
        shapes = tuple(Shape(*shape) for shape in self._webui.call_shapes(size.batch, tokens))
        return shapes if (self._unbatched if unbatched is None else unbatched) else shapes[:1]


class Made(NamedTuple):
    """What came of a UNet call, and how long it took."""

    seconds: float
    route: str
    has_graphs: bool
    reason: str

    def why_no_graph(self, call: Call) -> str:
        """Why the last call of a shape was not replayed, where graphs are what makes it fast."""
        is_last = call.number == CALLS_PER_SHAPE - 1
        return self.reason if is_last and self.route != "graph" and self.has_graphs else ""
