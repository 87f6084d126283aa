"""What stands on top of the Cache page, as markup: what is held, how much of it is used, and what is to come."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...prewarm.job import Job
from ...runtime.rows import LowBitErrors, ResolutionRow, Totals
from ..amounts import NOTHING, counted, memory, seconds
from ..markup import bar_html, fact_html, table_html
from ..status import ROUTES
from .table import MEANINGS, STATE_NAMES

ERROR_COLUMNS = ("Layers", "Kind", "Error alone", "Computed in")
TOTALS = {
    "Graph memory": "GPU memory of all graphs, and its limit",
    "Low-bit weights": "GPU memory of the 8-bit weights",
    "Disk": "what is remembered and tuned, in the cache folder",
    "Served by a graph": "share of the UNet calls since the start that replayed a graph",
    "Queue": "sizes that are being pre-warmed, or wait for it",
    "Calls": "UNet calls since the start",
}


def totals_html(totals: Totals, rows: list[ResolutionRow], jobs: Iterable[Job]) -> str:
    states = Counter(row.state for row in rows)
    kinds = ", ".join(
        f"{states[state]} {STATE_NAMES.get(state, state)}"
        for state in ("ready", "proved", "failed", "on disk") if states[state]
    )
    calls = ", ".join(f"{count} {ROUTES.get(route, route)}" for route, count in totals.calls.items() if count)
    facts = {
        "Graph memory": memory_held(totals), "Disk": memory(totals.disk),
        "Served by a graph": NOTHING if totals.hit_rate is None else f"{100 * totals.hit_rate:.0f} %",
        "Queue": queue_sentence(jobs), "Low-bit weights": low_bit_held(totals),
        **{
            f"Graphs of {name}": f"{count['graphs']} of {count['most']}"
            for name, count in totals.compiled.items() if count["graphs"]
        },
        "Resolutions": f"{len(rows)}{f' ({kinds})' if kinds else ''}", "Calls": calls or "none yet",
    }
    budget = totals.budget
    meter = bar_html(100 * totals.vram / budget, "Graph memory against its budget", "meter") if budget else ""
    cells = "".join(
        fact_html(label, value, meter if label == "Graph memory" else "", TOTALS.get(label, ""))
        for label, value in facts.items() if value
    )
    errors = "".join(map(errors_html, totals.low_bit_errors))
    return f'<div class="onediff-status onediff-totals"><div class="onediff-facts">{cells}</div>{errors}</div>'


def errors_html(errors: LowBitErrors) -> str:
    """What Low-bit does to a checkpoint: each class of layers alone, and the whole step."""
    name, budget = f"Low-bit on this {errors.model} checkpoint", f"{errors.budget:g}"
    whole = (
        f"No layer is in 8 bits within {budget}." if errors.error is None
        else f"Whole step: {errors.error:.4f} of at most {budget}."
    )
    return table_html(name, ERROR_COLUMNS, (
        (
            one.name, one.kinds or NOTHING, NOTHING if one.error is None else f"{one.error:.4f}",
            "8 bits" if one.is_used else "16 bits",
        ) for one in errors.classes
    ), MEANINGS, f"{name}. {whole}")


def memory_held(totals: Totals) -> str:
    if not totals.budget and not totals.vram:
        return "none (no GPU)"
    return f"{memory(totals.vram)} of {memory(totals.budget)}" if totals.budget else memory(totals.vram)


def low_bit_held(totals: Totals) -> str:
    if not (totals.low_bit or totals.offloaded):
        return ""
    originals = f"; {memory(totals.offloaded)} of originals in the computer's memory" if totals.offloaded else ""
    return f"{memory(totals.low_bit)}, {counted(totals.low_bit_layers, 'layer')}{originals}"


def queue_sentence(jobs: Iterable[Job]) -> str:
    """How many jobs are to come, and for how long."""
    pending = [job for job in jobs if job.pending]
    if not pending:
        return "empty"
    known = [job.estimated_seconds for job in pending if job.estimated_seconds is not None]
    about = f", about {seconds(sum(known))}" if len(known) == len(pending) else ""
    return f"{counted(len(pending), 'size')}{about}"
