"""What one browser page shows of the OneDiff tab, so that only what has changed is sent to it."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...prewarm.job import Job
from ..events import UNCHANGED
from .purge import Chore, Purge
from .table import ALL_MODELS, ROWS_AT_FIRST, USUAL_ORDER


@dataclass
class Page:
    """All that the server keeps of a page.

    shown: a digest of each part as it was sent last.
    limit: how many rows the table has.
    model, order: what the lists above the table show.
    purge: what waits for the user's confirmation.
    chore: what is being done for the page.
    followed: the ids of the jobs that it shows.
    busy: whether it has to be told what came of them.
    answered: the number of the last message. turn: the number of the last answer.
    all_families: whether it shows other models' usual sizes too.
    """

    shown: dict[str, int] = field(default_factory=dict)
    limit: int = ROWS_AT_FIRST
    model: str = ALL_MODELS
    order: str = USUAL_ORDER
    purge: Purge | None = None
    chore: Chore | None = None
    followed: set[int] = field(default_factory=set)
    busy: bool = False
    answered: int = 0
    turn: int = 0
    all_families: bool = False

    def changes(self, parts: dict[str, Any]) -> list[Any]:
        """The values of the parts that the page does not show yet; UNCHANGED for the others."""
        changes = []
        for name, value in parts.items():
            digest = hash(repr(value))
            changes.append(UNCHANGED if self.shown.get(name) == digest else value)
            self.shown[name] = digest
        return changes

    def follow(self, jobs: list[Job]) -> None:
        """Show these until others are asked for after all of them were over."""
        if jobs and not self.busy:
            self.followed, self.busy = set(), True
        self.followed.update(job.id for job in jobs)

    def jobs(self, jobs: list[Job]) -> list[Job]:
        """Those of the jobs to show: what is pending, and what came of it since the queue was last empty."""
        self.follow([job for job in jobs if job.pending])
        return [job for job in jobs if job.id in self.followed]


@dataclass(frozen=True)
class Message:
    """What javascript/onediff.js asks. number: counts up from 1 on a page, and stays the same when it asks again
    because no answer came. turn: that of the answer that the page has shown last, 0 before the first. actions: such as
    ("cancel", 5), of a job.
    """

    number: int = 0
    turn: int = 0
    actions: tuple[tuple[str, int], ...] = ()


def read_message(text: Any) -> Message:
    """A page's message; an empty one for what is none."""
    try:
        values = json.loads(text)
        actions = tuple((str(action), int(number)) for action, number in values.get("actions", ()))
        return Message(int(values["number"]), int(values.get("turn", 0)), actions)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return Message()


def read_keys(text: Any) -> list[str]:
    """The rows that a page has selected, as it names them; none for what is no list of names."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return []
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
