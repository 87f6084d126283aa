"""The table together with the pre-warm queue: what is being made ready stands in the row of its resolution."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from .job import QUEUED, Job
from .rows import ResolutionRow

# For a resolution that nobody has used yet.
NOTHING_YET: dict[str, Any] = {
    "reason": "", "step_ms": None, "host_ms": None, "ratio": None, "bytes": 0, "uses": 0, "last_used": 0.0,
    "shapes": (), "pinned": False, "needs": 0, "ratio_range": None,
}


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
    new = [row_of_job(resolution, model, state) for resolution, state in states.items() if resolution not in present]
    return new + [
        replace(row, state=states[row.resolution]) if row.resolution in states and is_meant(row, model) else row
        for row in told
    ]


def job_state(job: Job) -> str:
    """A pending job as the state of its resolution."""
    return QUEUED if job.state == QUEUED else f"warming {100 * job.share:.0f} %"


def is_meant(row: ResolutionRow, model: str | None) -> bool:
    return not row.is_decode and model in (None, row.model)


def row_of_job(resolution: str, model: str | None, state: str) -> ResolutionRow:
    known = {"resolution": resolution, "model": model or "", "state": state, **NOTHING_YET}
    return ResolutionRow(**{field.name: known[field.name] for field in fields(ResolutionRow)})
