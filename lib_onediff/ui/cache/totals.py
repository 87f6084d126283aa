"""The line on top of the OneDiff tab, as markup."""
from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable

from ...prewarm.job import Job
from ...runtime.rows import ResolutionRow, Totals
from ..amounts import NOTHING, counted, memory, seconds
from ..status import ROUTES

MEANINGS = {
    "Graph memory": "GPU memory that the graphs of all resolutions and their prompts hold, of what they may hold",
    "FP8 weights": "GPU memory of the weights in FP8, which lie beside the WebUI's own while FP8 is on",
    "Inductor": "graphs that PyTorch's compiler has made, each for all sizes; a shape that they do not fit says why",
    "OneFlow": "graphs that OneFlow has compiled in this process, one for every size, of those that it may",
    "Disk": "history, verdicts, measured choices and compiled kernels in the cache folder",
    "Served by a graph": "share of the UNet calls of this process that replayed a graph",
    "Queue": "sizes that are being pre-warmed, or wait for it",
    "Calls": "UNet calls of this process by route",
}


def totals_html(totals: Totals, rows: list[ResolutionRow], jobs: Iterable[Job]) -> str:
    """What is held, how much of it is used, and what is to come."""
    states = Counter(row.state for row in rows)
    kinds = ", ".join(f"{states[state]} {state}" for state in ("ready", "proved", "failed", "on disk") if states[state])
    calls = ", ".join(f"{count} {ROUTES.get(route, route)}" for route, count in totals.calls.items() if count)
    hits = NOTHING if totals.hit_rate is None else f"{100 * totals.hit_rate:.0f} %"
    facts = (
        fact("Graph memory", memory_held(totals), bar(totals)), fact("Disk", memory(totals.disk)),
        fact("Served by a graph", hits), fact("Queue", queue_sentence(jobs)),
        *([fact("FP8 weights", memory(totals.float8))] if totals.float8 else []),
        *([fact("Inductor", compiled_sentence(**totals.inductor))] if totals.inductor.get("graphs") else []),
        *([fact("OneFlow", "{graphs} of {most}".format(**totals.oneflow))] if totals.oneflow.get("graphs") else []),
        fact("Resolutions", f"{len(rows)}{f' ({kinds})' if kinds else ''}"), fact("Calls", calls or "none yet"),
    )
    return f'<div class="onediff-status onediff-totals"><div class="onediff-facts">{"".join(facts)}</div></div>'


def fact(label: str, value: str, below: str = "") -> str:
    """A value under its label. below: markup."""
    meaning = f' title="{html.escape(MEANINGS[label])}"' if label in MEANINGS else ""
    name = label.lower().replace(" ", "-")
    return (
        f'<div class="onediff-fact onediff-{name}"{meaning}><span>{html.escape(label)}</span>'
        f"<b>{html.escape(value)}</b>{below}</div>"
    )


def memory_held(totals: Totals) -> str:
    if not totals.budget and not totals.vram:
        return "none (no GPU)"
    return f"{memory(totals.vram)} of {memory(totals.budget)}" if totals.budget else memory(totals.vram)


def compiled_sentence(graphs: int, refused: int) -> str:
    fits = f"{counted(refused, 'call')} did not fit" if refused else "fit for every call"
    return f"{counted(graphs, 'graph')}, {fits}"


def bar(totals: Totals) -> str:
    """How full the budget is."""
    if not totals.budget:
        return ""
    share = 100 * totals.vram / totals.budget
    full = " onediff-full" if share > 100 else ""
    return (
        f'<div class="onediff-bar{full}" role="meter" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{min(share, 100):.0f}" aria-label="Graph memory against its budget">'
        f'<div style="width: {min(share, 100):.1f}%"></div></div>'
    )


def queue_sentence(jobs: Iterable[Job]) -> str:
    """How many jobs are to come, and for how long."""
    pending = [job for job in jobs if job.pending]
    if not pending:
        return "empty"
    left = [job.estimated_seconds for job in pending]
    known = [time for time in left if time is not None]
    about = f", about {seconds(sum(known))}" if known and len(known) == len(left) else ""
    return f"{counted(len(pending), 'size')}{about}"
