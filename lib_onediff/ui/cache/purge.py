"""What the OneDiff tab asks before it throws something away, and says afterwards."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ..amounts import counted, memory
from .table import key_of, resolution_and_model


@dataclass(frozen=True)
class Purge:
    """question: what the user confirms. doing: for people, while it is not over. work: does it, returns what to tell.
    """

    question: str
    doing: str
    work: Callable[[], str]


def purge_of_rows(runtime: Runtime, keys: Iterable[str]) -> Purge:
    """Of rows by key_of."""
    keys = set(keys)
    rows = runtime.rows()
    doomed = [row for row in rows if key_of(row) in keys]
    by_model: dict[str, set[str]] = {}
    for resolution, model in map(resolution_and_model, sorted(keys)):
        by_model.setdefault(model, set()).add(resolution)

    def work() -> str:
        freed = sum(runtime.purge(resolutions, model) for model, resolutions in by_model.items())
        return purged(doomed, freed + purge_decodes(runtime, doomed))

    return Purge(question(counted(len(doomed), "resolution"), would_free(runtime, doomed)), "Purging", work)


def purge_of_model(runtime: Runtime, model: str) -> Purge:
    doomed = [row for row in runtime.rows() if row.model == model]
    what = f"{counted(len(doomed), 'resolution')} of {model}"
    return Purge(
        question(what, would_free(runtime, doomed)), "Purging",
        lambda: purged(doomed, runtime.purge(None, model) + purge_decodes(runtime, doomed)),
    )


def purge_of_all(runtime: Runtime) -> Purge:
    doomed = runtime.rows()
    what = "the only resolution" if len(doomed) == 1 else f"all {len(doomed)} resolutions"
    return Purge(
        question(what, would_free(runtime, doomed)), "Purging", lambda: purged(doomed, runtime.purge()),
    )


def purge_of_disk(runtime: Runtime) -> Purge:
    held = runtime.totals().disk
    return Purge(
        f"Delete history, verdicts, measured choices and compiled kernels? This frees about {memory(held)} of disk; "
        "what is ready stays ready until the WebUI ends.",
        "Deleting", lambda: f"Freed {memory(runtime.purge_disk())} of disk.",
    )


def purge_decodes(runtime: Runtime, gone: list[ResolutionRow]) -> int:
    """The VAE's shapes stood in the rows that are gone: they go too, unless another model's row has them. Returns the
    bytes of GPU memory that were given back."""
    resolutions = {row.resolution for row in gone}
    left = [row for row in runtime.rows() if row.is_decode and row.resolution in resolutions]
    return sum(runtime.purge({row.resolution}, row.model) for row in left)


def would_free(runtime: Runtime, doomed: list[ResolutionRow]) -> int:
    """About how many bytes of GPU memory come back with these rows: all graphs lie over each other in one memory, which
    is as large as the largest of them."""
    keys = {key_of(row) for row in doomed}
    largest_that_stays = max((row.needs for row in runtime.rows() if key_of(row) not in keys), default=0)
    least = max((row.bytes for row in doomed), default=0)
    return least if len(doomed) == 1 else max(least, runtime.totals().vram - largest_that_stays)


def question(what: str, freed: int) -> str:
    frees = f"This frees about {memory(freed)} of VRAM" if freed else "No VRAM comes back by that"
    return f"Purge {what}? {frees}; the history on disk goes too."


def purged(doomed: list[ResolutionRow], freed: int) -> str:
    """What a purge has done."""
    if not doomed:
        return "There was nothing to purge."
    forgotten = f"{counted(len({key_of(row) for row in doomed}), 'resolution')} forgotten"
    if freed:
        return f"{forgotten}, freed {memory(freed)}."
    if any(row.needs for row in doomed):
        return f"{forgotten}; larger graphs share their memory, so none came back."
    return f"{forgotten}; no graph memory was held."
