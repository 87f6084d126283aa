"""One entry of the pre-warm queue, and the UNet calls that it stands for."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..core.sizes import TOKEN_CHOICES, TOKENS, Size
from ..runtime.rows import ResolutionRow

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
PENDING = (QUEUED, RUNNING)
# The first is checked against the host's own UNet, the second captures a graph, the third replays it.
CALLS_PER_SHAPE = 3


@dataclass
class Job:
    """One size in the queue. done and total count UNet calls, made those that were needed, seconds what they took.

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

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return self.done / self.total if self.total else 0.0


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
            states[job.size.resolution] = job_state(job)
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
    return replace(row, prewarm_s=job.seconds, saved_s=None if steps is None else max(0.0, job.seconds - steps))


def job_state(job: Job) -> str:
    """A pending job as the state of its resolution."""
    return QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    return not row.is_decode and model in (None, row.model)
