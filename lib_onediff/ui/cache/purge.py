"""Purging: what the Cache page asks before it, does between two images, and says afterwards."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...core.guard import first_line, outcome_of
from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ...store.store import NotKept
from .. import texts
from ..amounts import counted
from .table import key_of, resolution_and_model

log = logging.getLogger("onediff")
Exclusively = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Purge:
    """question: what the user confirms. doing: for people. work: does it, and returns what came of it."""

    question: str
    doing: str
    work: Callable[[], str]


class Chore:
    """Work in a thread of its own until no image is being made: no request of the page waits for it."""

    def __init__(self, name: str, exclusively: Exclusively, work: Callable[[], str]) -> None:
        """name: for people. exclusively: runs work while the WebUI makes no image. work: returns what came of it."""
        self.name = name
        self.failed = False
        self._outcome = ""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(exclusively, work), name=f"onediff-{name.split(' ')[0].lower()}", daemon=True
        )
        self._thread.start()

    def outcome(self, seconds: float = 0.0) -> str | None:
        """What came of it; None while it is not over. Waits for it at most so long."""
        return self._outcome if self._over.wait(seconds) else None

    def _run(self, exclusively: Exclusively, work: Callable[[], str]) -> None:
        try:
            # Forge prints a traceback for what is raised in its main thread.
            self._outcome = exclusively(lambda: outcome_of(work)).result()
        except NotKept as problem:
            self.failed, self._outcome = True, str(problem)
        except Exception as error:
            log.exception("%s failed", self.name)
            self.failed = True
            self._outcome = texts.failed(self.name, first_line(error))
        finally:
            self._over.set()


def purge_of_rows(runtime: Runtime, keys: Iterable[str], more: str = "") -> Purge:
    """Of rows by key_of. more: what stands behind their number in the question."""
    keys = set(keys)
    affected = [row for row in runtime.rows() if key_of(row) in keys]
    by_model: dict[str, set[str]] = {}
    for resolution, model in map(resolution_and_model, sorted(keys)):
        by_model.setdefault(model, set()).add(resolution)

    def free() -> int:
        freed = sum(runtime.purge(resolutions, model) for model, resolutions in by_model.items())
        return freed + purge_decodes(runtime, affected)

    return purge_of(runtime, counted(len(affected), "resolution") + more, affected, free)


def purge_of_model(runtime: Runtime, model: str) -> Purge:
    return purge_of_rows(runtime, [key_of(row) for row in runtime.rows() if row.model == model], f" of {model}")


def purge_of_all(runtime: Runtime) -> Purge:
    affected = runtime.rows()
    what = "the only resolution" if len(affected) == 1 else f"all {len(affected)} resolutions"
    return purge_of(runtime, what, affected, runtime.purge)


def purge_of(runtime: Runtime, what: str, affected: list[ResolutionRow], free: Callable[[], int]) -> Purge:
    """free: purges these rows and returns the bytes of GPU memory that were given back."""
    question = texts.purge_question(what, would_free(runtime, affected))
    return Purge(question, "Purging", lambda: purged(affected, free()))


def purge_of_disk(runtime: Runtime) -> Purge:
    question = texts.disk_question(runtime.totals().disk)
    return Purge(question, "Deleting", lambda: texts.deleted(runtime.purge_disk()))


def purge_decodes(runtime: Runtime, gone: list[ResolutionRow]) -> int:
    """The VAE's shapes stood in the rows that are gone: they go too, unless another model's row has them. Returns the
    bytes of GPU memory that were given back."""
    resolutions = {row.resolution for row in gone}
    left = [row for row in runtime.rows() if row.is_decode and row.resolution in resolutions]
    return sum(runtime.purge({row.resolution}, row.model) for row in left)


def would_free(runtime: Runtime, affected: list[ResolutionRow]) -> int:
    """About how many bytes of GPU memory come back with these rows: all graphs lie over each other in one memory, which
    is as large as the largest of them."""
    keys = {key_of(row) for row in affected}
    largest_that_stays = max((row.needs for row in runtime.rows() if key_of(row) not in keys), default=0)
    least = max((row.bytes for row in affected), default=0)
    return least if len(affected) == 1 else max(least, runtime.totals().vram - largest_that_stays)


def purged(affected: list[ResolutionRow], freed: int) -> str:
    """What a purge has done."""
    if not affected:
        return texts.PURGED_NOTHING
    return texts.purged(len({key_of(row) for row in affected}), freed, any(row.needs for row in affected))
