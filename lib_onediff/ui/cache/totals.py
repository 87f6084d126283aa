"""The line on top of the OneDiff tab, and the chart of milliseconds per step, as markup."""
from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable

from ...prewarm.job import Job
from ...runtime.rows import LowBitErrors, ResolutionRow, Totals
from .. import texts
from ..amounts import NOTHING, counted, memory, milliseconds, seconds, times
from ..status import ROUTES, fact_html
from ..texts import TOTALS
from .table import heading, table_cells

MOST_BARS = 8
ERROR_COLUMNS = ("Layers", "Kind", "Error alone", "Computed in")


def totals_html(totals: Totals, rows: list[ResolutionRow], jobs: Iterable[Job]) -> str:
    """What is held, how much of it is used, and what is to come."""
    states = Counter(row.state for row in rows)
    kinds = ", ".join(
        f"{states[state]} {texts.STATE_NAMES.get(state, state)}"
        for state in ("ready", "proved", "failed", "on disk") if states[state]
    )
    calls = ", ".join(f"{count} {ROUTES.get(route, route)}" for route, count in totals.calls.items() if count)
    hits = NOTHING if totals.hit_rate is None else f"{100 * totals.hit_rate:.0f} %"
    facts = {
        "Graph memory": memory_held(totals), "Disk": memory(totals.disk), "Served by a graph": hits,
        "Queue": queue_sentence(jobs), "Low-bit weights": low_bit_held(totals),
        **{
            f"Graphs of {name}": f"{count['graphs']} of {count['most']}"
            for name, count in totals.compiled.items() if count["graphs"]
        },
        "Resolutions": f"{len(rows)}{f' ({kinds})' if kinds else ''}", "Calls": calls or "none yet",
    }
    cells = "".join(
        fact_html(label, value, meter_html(totals) if label == "Graph memory" else "", TOTALS.get(label, ""))
        for label, value in facts.items() if value
    )
    errors = "".join(map(errors_html, totals.low_bit_errors))
    return f'<div class="onediff-status onediff-totals"><div class="onediff-facts">{cells}</div>{errors}</div>'


def errors_html(errors: LowBitErrors) -> str:
    """What Low-bit does to a checkpoint: each class of layers alone, and the whole step."""
    name = html.escape(f"Low-bit on this {errors.model} checkpoint")
    head = "".join(map(heading, ERROR_COLUMNS))
    body = "".join(
        f'<tr><th scope="row">{html.escape(one.name)}</th>'
        f"{table_cells((html.escape(one.kinds) or NOTHING, small(one.error), texts.COMPUTED_IN[one.is_used]))}</tr>"
        for one in errors.classes
    )
    whole = texts.whole_step("" if errors.error is None else small(errors.error), f"{errors.budget:g}")
    return (
        f'<div class="onediff-table" tabindex="0" role="region" aria-label="{name}">'
        f"<table><caption>{name}. {html.escape(whole)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def small(value: float | None) -> str:
    """A relative error for people."""
    return NOTHING if value is None else f"{value:.4f}"


def memory_held(totals: Totals) -> str:
    if not totals.budget and not totals.vram:
        return "none (no GPU)"
    return f"{memory(totals.vram)} of {memory(totals.budget)}" if totals.budget else memory(totals.vram)


def low_bit_held(totals: Totals) -> str:
    if not (totals.low_bit or totals.offloaded):
        return ""
    originals = f"; {memory(totals.offloaded)} of originals in the computer's memory" if totals.offloaded else ""
    return f"{memory(totals.low_bit)}, {counted(totals.low_bit_layers, 'layer')}{originals}"


def meter_html(totals: Totals) -> str:
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


def chart_html(rows: Iterable[ResolutionRow]) -> str:
    """The resolutions that are used the most, of those where both were timed often enough; nothing where there is
    none."""
    timed = [row for row in rows if row.step_ms and row.host_ms and row.ratio and not row.is_decode]
    shown = sorted(timed, key=lambda row: (-row.uses, -row.last_used))[:MOST_BARS]
    if not shown:
        return ""
    longest = max(max(row.step_ms or 0.0, row.host_ms or 0.0) for row in shown)
    pairs = "".join(pair_html(row, longest) for row in shown)
    return (
        '<figure class="onediff-chart"><figcaption>Milliseconds per step, OneDiff and the WebUI'
        f"</figcaption><dl>{pairs}</dl></figure>"
    )


def pair_html(row: ResolutionRow, longest: float) -> str:
    faster = f", {times(row.ratio, row.ratio_range)}"
    return (
        f"<dt>{html.escape(row.resolution)} <small>{html.escape(row.model)}</small></dt>"
        f"{bar_html('ours', 'OneDiff', row.step_ms or 0.0, longest, faster)}"
        f"{bar_html('host', 'WebUI', row.host_ms or 0.0, longest)}"
    )


def bar_html(kind: str, name: str, value: float, longest: float, more: str = "") -> str:
    """more: what to say after the number."""
    return (
        f'<dd class="onediff-{kind}" style="--onediff-share: {value / longest:.3f}"><span>{name}</span>'
        f'<div aria-hidden="true"></div><b>{milliseconds(value)}{more}</b></dd>'
    )
