"""The images that a WebUI makes and those that wait there, as jobs. Nothing of ours makes them."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ..core.jobs import IMAGE, MOST_OF_A_JOB, QUEUED, RUNNING, Job
from ..runtime.call_stats import Generation, Generations

SOURCE = "WebUI"
# Of more tasks that wait, none is listed.
MOST_WAITING = 50


class HostImages:
    """Reads the WebUI's own state; its jobs are the same objects as long as their images are made or wait."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._running: WeakKeyDictionary[Generation, Job] = WeakKeyDictionary()
        # By the WebUI's names of its tasks.
        self._waiting: dict[str, Job] = {}

    def jobs(self) -> list[Job]:
        """The image in progress, and those that wait, the first first."""
        return [*self._in_progress(), *self._that_wait()]

    def _in_progress(self) -> Iterable[Job]:
        made = self._generations.alive()
        state = getattr(module_of_host("shared"), "state", None)
        # Images that another extension has made for one are a part of it. A failed one may still be held somewhere.
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

    def _that_wait(self) -> Iterable[Job]:
        # Threads of the WebUI change it.
        tasks = list(getattr(module_of_host("progress"), "pending_tasks", ()))[:MOST_WAITING]
        self._waiting = {task: self._waiting.get(task) or Job(IMAGE, "", SOURCE, state=QUEUED) for task in tasks}
        return self._waiting.values()


def step_of_host() -> tuple[int, int]:
    """The step of the batch that the WebUI makes now, and how many it has; (0, 0) where the WebUI does not say."""
    state = getattr(module_of_host("shared"), "state", None)
    steps = number_of(state, "sampling_steps")
    return min(steps, number_of(state, "sampling_step")), steps


def number_of(state: Any, name: str) -> int:
    """A number of the WebUI's state; 0 where it has none of that name."""
    value = getattr(state, name, 0)
    return value if isinstance(value, int) else 0


def module_of_host(name: str) -> Any:
    """A module of the WebUI that it has loaded; None where there is none."""
    return sys.modules.get(f"modules.{name}")
