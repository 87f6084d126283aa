"""Purging: what the Cache page asks before it, what it does between two images, and what it says afterwards."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ..amounts import counted, memory
from .table import key_of, resolution_and_model


@dataclass(frozen=True)
class Purge:
    """question: what the user confirms. name: of the work, for people. work: does it, and returns what came of it."""

    question: str
    name: str
    work: Callable[[], str]


def purge_of_rows(runtime: Runtime, keys: Iterable[str]) -> Purge:
    """Of rows by key_of."""
    keys = set(keys)
    affected = [row for row in runtime.rows() if key_of(row) in keys]
    by_model: dict[str, set[str]] = {}
    for resolution, model in map(resolution_and_model, sorted(keys)):
        by_model.setdefault(model, set()).add(resolution)

    def free() -> int:
        freed = sum(runtime.purge(resolutions, model) for model, resolutions in by_model.items())
        return freed + purge_decodes(runtime, affected)

    return purge_of(runtime, counted(len(affected), "resolution"), affected, free)


def purge_of_all(runtime: Runtime) -> Purge:
    affected = runtime.rows()
    what = "the only resolution" if len(affected) == 1 else f"all {len(affected)} resolutions"
    return purge_of(runtime, what, affected, runtime.purge)


def purge_of(runtime: Runtime, what: str, affected: list[ResolutionRow], free: Callable[[], int]) -> Purge:
    """free: purges these rows and returns the bytes of GPU memory that were given back."""
    freed = would_free(runtime, affected)
    frees = f"This frees about {memory(freed)} of VRAM" if freed else "This frees no VRAM"
    question = f"Purge {what}? {frees}; the history on disk goes too."
    return Purge(question, "Purging", lambda: purged(affected, free()))


def purge_of_disk(runtime: Runtime) -> Purge:
    size = runtime.totals().disk
    frees = f"This frees about {memory(size)} of disk" if size else "The cache folder is empty"
    question = f"Delete everything in the cache folder? {frees}; what is ready stays ready until the WebUI ends."

    def delete() -> str:
        freed = runtime.purge_disk()
        return f"Freed {memory(freed)} of disk." if freed else "The cache folder is empty now."

    return Purge(question, "Deleting", delete)


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
        return "There was nothing to purge."
    what = f"{counted(len({key_of(row) for row in affected}), 'resolution')} purged"
    if freed:
        return f"{what}, {memory(freed)} freed."
    if any(row.needs for row in affected):
        return f"{what}; larger graphs share their memory, so nothing was freed."
    return f"{what}; they held no graph memory."
