"""The WebUI's own list of images, in progress and waiting, as jobs. OneDiff shows them, and does not make them."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ..core.jobs import IMAGE, MOST_OF_A_JOB, QUEUED, RUNNING, Job
from ..runtime.generations import Generation, Generations

# The source of these jobs, for users.
SOURCE = "WebUI"
# The most waiting images that are listed.
MOST_WAITING = 50


class HostImages:
    """Reads the WebUI's state, and lists the images that it makes now or later as jobs. An image has one Job object
    while it waits, and another one from its beginning until it is done.

    generations: OneDiff's own list of generations that are being made.
    """

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._running: WeakKeyDictionary[Generation, Job] = WeakKeyDictionary()
        # By the WebUI's name of the task.
        self._waiting: dict[str, Job] = {}

    def jobs(self) -> list[Job]:
        """The image in progress, with its progress up to now, then at most MOST_WAITING waiting images in the WebUI's
        order; [] if the WebUI makes no image and none waits."""
        return [*self._in_progress(), *self._not_begun()]

    def _in_progress(self) -> Iterable[Job]:
        """Yields the Job of the image that the WebUI makes now, with its title, steps, seconds and progress updated;
        yields nothing if the WebUI makes none."""
        made = self._generations.alive()
        state = getattr(module_of_host("shared"), "state", None)
        # The first generation is the WebUI's; others are parts of it, which an extension makes. A generation that has
        # failed may still be alive, so the state tells whether one is running.
        if not made or state is None or getattr(state, "job", None) == "":
            return
        generation = made[0]
        job = self._running.get(generation)
        if job is None:
            job = Job(IMAGE, "", SOURCE, state=RUNNING, cancel=state.interrupt)
            self._running[generation] = job
        step, steps = step_of_host()
        batches = max(1, number_of(state, "job_count"))
        job.title = ", ".join(filter(None, (generation.resolution, f"{steps} steps" if steps else "")))
        job.total = steps * batches
        job.done = min(job.total, steps * number_of(state, "job_no") + step)
        job.share = min(MOST_OF_A_JOB, job.done / max(1, job.total))
        job.seconds = time.perf_counter() - generation.log.began
        job.what = "" if job.done else "begins"
        yield job

    def _not_begun(self) -> Iterable[Job]:
        """The Jobs of the images that wait, in the WebUI's order, at most MOST_WAITING of them."""
        # list() copies it, because other threads of the WebUI change it.
        tasks = list(getattr(module_of_host("progress"), "pending_tasks", ()))[:MOST_WAITING]
        self._waiting = {task: self._waiting.get(task) or Job(IMAGE, "", SOURCE, state=QUEUED) for task in tasks}
        return self._waiting.values()


def step_of_host() -> tuple[int, int]:
    """(steps done, all steps) of the batch that the WebUI makes now, from the WebUI's own state; (0, 0) if unknown."""
    state = getattr(module_of_host("shared"), "state", None)
    steps = number_of(state, "sampling_steps")
    return min(steps, number_of(state, "sampling_step")), steps


def number_of(state: Any, name: str) -> int:
    """The integer attribute of this name in the WebUI's state; 0 if the state lacks the attribute, if it is not an
    integer, or if there is no state (None)."""
    value = getattr(state, name, 0)
    return value if isinstance(value, int) else 0


def module_of_host(name: str) -> Any:
    """The WebUI's Python module modules.<name>; None if it is not loaded. Does not import it."""
    return sys.modules.get(f"modules.{name}")
