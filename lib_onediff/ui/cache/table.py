"""The Cache page as markup: the totals, the pre-warm queue, the table of resolutions."""
from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...core.jobs import Job
from ...core.table import ENOUGH
from ...runtime.rows import LowBitErrors, ResolutionRow, ShapeRow, Totals
from ..amounts import NOTHING, ago, counted, memory, milliseconds, seconds, times
from ..markup import bar_html, cells_html, fact_html, head_html
from ..status import ROUTES

MOST_ROWS = 200
ALL_MODELS = "All models"
COLUMNS = ("Resolution", "State", "Model", "Step", "WebUI", "Speed", "VRAM", "Pre-warming", "Images", "Last used")
SHAPE_COLUMNS = (
    "Batch", "Tokens", "Type", "Computed by", "State", "Step", "WebUI", "Speed", "VRAM", "Calls", "Error",
)
# By what a shape's state is called in the API: what users read, where it is another word, and what it means.
STATE_NAMES = {"cold": "not checked yet", "proved": "checked"}
STATES = {
    "cold": "seen, but not compared with the WebUI's output yet",
    "proved": "agrees with the WebUI's output; runs without CUDA graphs",
    "ready": "the next call replays a graph",
    "failed": "the WebUI alone computes it",
    "on disk": "used on this machine before the WebUI was started",
    "queued": "waits in the pre-warm queue",
    "warming": "is being pre-warmed now",
}
MEANINGS = {
    "Computed by": "the backend and, where steps are cached, the kind of step: full or cached",
    "pinned": "its graph stays when another model needs memory",
    "Step": "mean over all steps of the last image that OneDiff has made at this size; of a shape, its own calls",
    "WebUI": "the same by the WebUI alone, timed when the size is first used",
    "Speed": f"compared with the WebUI, after {ENOUGH} calls of each",
    "VRAM": "what its graphs need; all graphs share one pool: below, what purging this row frees",
    "Pre-warming": "how long it took; below, how much longer the first image would have taken without it",
    "Images": "made at this size since the WebUI was started, without interrupted ones",
    "Error": "relative difference from the WebUI's output when it was checked",
}
TOTALS = {
    "Graph memory": "GPU memory of all graphs, and its limit",
    "Low-bit weights": "GPU memory of the 8-bit weights",
    "Disk": "what is remembered and tuned, in the cache folder",
    "Served by a graph": "share of the network's calls since the start that replayed a graph",
    "Queue": "sizes that are being pre-warmed, or wait for it; see Jobs",
    "Calls": "calls of the network since the start",
}


def models_of(rows: Iterable[ResolutionRow]) -> list[str]:
    """What the filter offers. A decode of the VAE is no model's, and a row of the queue has no shapes yet."""
    return [ALL_MODELS, *sorted({row.model for row in rows if row.model and not (row.shapes and row.is_decode)})]


def selected(rows: Iterable[ResolutionRow], model: str | None) -> list[ResolutionRow]:
    """The rows of a model, or of all, the last used first. What is in the queue for the first time has not been used,
    and is what the user looks for."""
    shown = [row for row in rows if model in (None, "", ALL_MODELS, row.model)]
    return sorted(shown, key=lambda row: -row.last_used or -math.inf)


def key_of(row: ResolutionRow) -> str:
    """The key of a row in the page; a resolution has no space."""
    return f"{row.resolution} {row.model}"


def resolutions_html(rows: list[ResolutionRow]) -> str:
    """The first of the rows, each with its shapes below it in an element that opens."""
    if not rows:
        return '<p class="onediff-reason">Nothing yet. Generate an image, or pre-warm a size: click one above.</p>'
    hidden = len(rows) - MOST_ROWS
    more = f'<p class="onediff-reason">{hidden} more: choose a model above to see fewer.</p>' if hidden > 0 else ""
    every = choice_html('data-onediff-every aria-label="Select all rows that are shown"')
    return (
        '<p class="onediff-reason onediff-scrolls">The table scrolls sideways.</p>'
        '<div class="onediff-table" tabindex="0" role="region" aria-label="Resolutions">'
        f"<table><thead><tr><td>{every}</td>{head_html(COLUMNS, MEANINGS)}</tr></thead>"
        f'{"".join(map(resolution_html, rows[:MOST_ROWS]))}</table></div>{more}'
    )


def legend_html() -> str:
    """The meanings of the table's words."""
    meanings = {STATE_NAMES.get(state, state): meaning for state, meaning in STATES.items()} | MEANINGS
    words = "".join(f"<dt>{word}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in meanings.items())
    return f'<details class="onediff-legend"><summary>Legend</summary><dl>{words}</dl></details>'


def resolution_html(row: ResolutionRow) -> str:
    cells = (
        state_html(row.state), html.escape(row.model or NOTHING), *times_html(row), prewarm_html(row),
        str(row.images or NOTHING), ago(row.last_used) if row.last_used else NOTHING,
    )
    key = html.escape(key_of(row))
    name = html.escape(f"{row.resolution} of {row.model}")
    # Why the row is not better, and its shapes.
    below = f'<p class="onediff-reason">{html.escape(row.reason)}</p>' if row.reason else ""
    if row.shapes:
        below += (
            f'<details data-onediff-key="{key}"><summary>{counted(len(row.shapes), "shape")}</summary>'
            f"<table><thead><tr>{head_html(SHAPE_COLUMNS, MEANINGS)}</tr></thead>"
            f'<tbody>{"".join(map(shape_html, row.shapes))}</tbody></table></details>'
        )
    if below:
        below = f'<tr class="onediff-shapes"><td></td><td colspan="{len(COLUMNS)}">{below}</td></tr>'
    choose = choice_html(f'value="{key}" aria-label="Select {name}"')
    pinned = f' <span class="onediff-pin" title="{MEANINGS["pinned"]}">pinned</span>' if row.pinned else ""
    return (
        f'<tbody><tr><td>{choose}</td><th scope="row">{html.escape(row.resolution)}{pinned}</th>{cells_html(cells)}'
        f"</tr>{below}</tbody>"
    )


def choice_html(attributes: str) -> str:
    """A checkbox in a label around it, which is large enough to hit."""
    return f'<label class="onediff-choice"><input type="checkbox" {attributes}></label>'


def prewarm_html(row: ResolutionRow) -> str:
    """The time of the last pre-warming, and the time that it saved."""
    if row.prewarm_s is None:
        return NOTHING
    saved = "" if row.saved_s is None else f"<small>saved {seconds(row.saved_s)}</small>"
    return f"{seconds(row.prewarm_s)}{saved}"


def shape_html(shape: ShapeRow) -> str:
    cells = (
        f"{shape.batch}{shape.label and ' ' + shape.label}", str(shape.tokens) if shape.tokens else "VAE",
        html.escape(shape.dtype),
        html.escape(", ".join(filter(None, (shape.backend, shape.lossy, shape.part)))) or NOTHING,
        state_html(shape.state), *times_html(shape), str(shape.uses),
        NOTHING if shape.relative_error is None else f"{shape.relative_error:.1e}",
    )
    reason = (
        f'<tr><td class="onediff-reason" colspan="{len(SHAPE_COLUMNS)}">{html.escape(shape.reason)}</td></tr>'
        if shape.reason else ""
    )
    return f"<tr>{cells_html(cells)}</tr>{reason}"


def state_html(state: str) -> str:
    """state: one of STATES, or "warming 33 %"."""
    kind = state if state in STATES else state.split(" ")[0]
    meaning = html.escape(STATES.get(kind, ""))
    name = html.escape(kind.replace(" ", "-"))
    words = html.escape(STATE_NAMES.get(state, state))
    return f'<span class="onediff-state onediff-state-{name}" title="{meaning}">{words}</span>'


def times_html(row: Any) -> tuple[str, str, str, str]:
    """The cells from Step to VRAM, of a resolution or a shape. There is no speed before both sides were timed often
    enough."""
    frees = f"<small>frees {memory(row.bytes)}</small>" if row.bytes else ""
    needs = f"{memory(row.needs)}{frees}" if row.needs or row.bytes else NOTHING
    return milliseconds(row.step_ms), milliseconds(row.host_ms), times(row.ratio), needs


def totals_html(totals: Totals, rows: list[ResolutionRow], jobs: Iterable[Job], folder: Path | None) -> str:
    """The memory and disk space in use, and the pre-warm queue. folder: the cache folder."""
    states = Counter(row.state for row in rows)
    kinds = ", ".join(
        f"{states[state]} {STATE_NAMES.get(state, state)}"
        for state in ("ready", "proved", "failed", "on disk") if states[state]
    )
    pending = sum(job.pending for job in jobs)
    calls = ", ".join(f"{count} {ROUTES.get(route, route)}" for route, count in totals.calls.items() if count)
    budget = totals.budget
    held = memory(totals.vram)
    low_bit = ""
    if budget or not totals.vram:
        held = f"{held} of {memory(budget)}" if budget else "none (no GPU)"
    if totals.low_bit:
        low_bit = f"{memory(totals.low_bit)}, {counted(totals.low_bit_layers, 'layer')}"
    facts = {
        "Graph memory": held, "Disk": memory(totals.disk),
        "Served by a graph": NOTHING if totals.hit_rate is None else f"{100 * totals.hit_rate:.0f} %",
        "Queue": counted(pending, "size") if pending else "empty", "Low-bit weights": low_bit,
        "Weights in main memory": memory(totals.offloaded) if totals.offloaded else "",
        "Resolutions": f"{len(rows)}{f' ({kinds})' if kinds else ''}", "Calls": calls or "none yet",
    }
    meter = bar_html(100 * totals.vram / budget, "Graph memory against its budget", "meter") if budget else ""
    below = {"Graph memory": meter, "Disk": f"<small>{html.escape(str(folder))}</small>" if folder else ""}
    cells = "".join(
        fact_html(label, value, below.get(label, ""), TOTALS.get(label, "")) for label, value in facts.items() if value
    )
    errors = "".join(map(error_html, totals.low_bit_errors))
    return f'<div class="onediff-status onediff-totals"><div class="onediff-facts">{cells}</div>{errors}</div>'


def error_html(measured: LowBitErrors) -> str:
    """What Low-bit does to a whole step of a checkpoint; GET status has its classes of layers."""
    budget = f"{measured.budget:.1e}"
    error = f"no layer within {budget}" if measured.error is None else f"error {measured.error:.1e} of {budget}"
    return f'<p class="onediff-reason">Low-bit on this {html.escape(measured.model)} checkpoint: {error}</p>'
