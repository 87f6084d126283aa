"""One entry of the pre-warm queue, the UNet calls that it stands for, and the sizes that users of a model ask for."""
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
    """One size in the queue. done and total count UNet calls, seconds what they took.

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
    """The rows, with the state "queued" or "warming 33 %" where a pending job has that resolution.

    model: of the loaded checkpoint ("SD1"), for which the queue works; its row is marked, or made where there is none,
    and then stands first. None: not known, so that every row of that resolution is marked.
    """
    states: dict[str, str] = {}
    for job in jobs:
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
        replace(row, state=states[row.resolution]) if row.resolution in states and is_meant(row, model) else row
        for row in told
    ]


def job_state(job: Job) -> str:
    """A pending job as the state of its resolution."""
    return QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    return not row.is_decode and model in (None, row.model)


@dataclass(frozen=True)
class Family:
    """One kind of model. model: the first word of its layout's model_name. sizes: what it was trained at, then what
    hires fix makes of that."""

    name: str
    model: str
    sizes: tuple[str, ...]


FAMILIES = (
    Family("SD 1.5", "SD1", ("512x512", "512x768", "768x512", "768x768", "1024x1024", "1024x1536", "1536x1024")),
    Family("SD 2", "SD2", ("768x768", "1536x1536")),
    Family("SDXL", "SDXL", (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x640", "640x1536",
        "1536x1536", "1248x1824", "1824x1248",
    )),
    Family("Anima", "Anima", (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x1536",
    )),
)


def families_for(model: str | None) -> tuple[Family, ...]:
    """The families that fit a model's name, such as "SDXL refiner"; all where none does or none is loaded."""
    # As small and unusual ones are called.
    first_word = (model or "").replace("SD 1.x", "SD1").split(" ")[0]
    return tuple(known for known in FAMILIES if known.model == first_word) or FAMILIES
