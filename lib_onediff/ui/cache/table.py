"""The Cache page as markup: the totals, the sizes to pre-warm, the table of resolutions."""
from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...core.family import UsualSizes
from ...core.jobs import Job
from ...core.sizes import Size
from ...core.table import ENOUGH
from ...prewarm.worker import Estimate
from ...runtime.rows import LowBitErrors, ResolutionRow, ShapeRow, Totals
from ..amounts import NOTHING, ago, counted, memory, milliseconds, minutes_or_hours, seconds, speedup
from ..jobs import small_button
from ..markup import bar_html, fact_html

# The most rows that the page shows.
MOST_ROWS = 200
ALL_MODELS = "All models"
WEBUI_STEP = "WebUI step"
VRAM = "VRAM"
# The columns of the table, in the order in which a phone shows them, and those of the table of a row's shapes.
COLUMNS = ("Resolution", "State", "Step", WEBUI_STEP, "Speed", VRAM, "Model", "Pre-warming", "Images", "Last used")
SHAPE_COLUMNS = (
    "Batch", "Tokens", "Type", "Computed by", "State", "Step", WEBUI_STEP, "Speed", VRAM, "Calls", "Error",
)
# The columns that are aligned to the right.
NUMBERS = {"Batch", "Tokens", "Step", WEBUI_STEP, "Speed", VRAM, "Pre-warming", "Images", "Calls", "Error"}
# The value by which each column sorts. Rows for which it is None come last in both directions.
SORTED_BY: Mapping[str, Callable[[ResolutionRow], Any]] = {
    "Resolution": lambda row: [int(side) for side in row.resolution.split("x") if side.isdigit()],
    "State": lambda row: row.state, "Step": lambda row: row.step_ms, WEBUI_STEP: lambda row: row.host_ms,
    "Speed": lambda row: row.ratio, VRAM: lambda row: row.needs or None, "Model": lambda row: row.model,
    "Pre-warming": lambda row: row.prewarm_s, "Images": lambda row: row.images or None,
    "Last used": lambda row: row.last_used or None,
}
# How a counted number of calls was computed, by the API's names of routes.
CALLS = {"graph": "by a CUDA graph", "plain": "without CUDA graphs", "host": "by the WebUI alone"}
# Why a size is among "Yours", for its tooltip.
IN_TXT2IMG = "as in the txt2img tab"
MOST_USED = "used with this model"
# The page warns of pre-warming that takes this long or longer.
MUCH_SECONDS = 60.0
# The page's names of states that the API calls otherwise, by the API's name.
STATE_NAMES = {"cold": "not checked yet", "proved": "checked"}
# The meaning of each state, for tooltips and the legend, by the API's name.
STATES = {
    "cold": "seen, but not yet compared with the WebUI's output",
    "proved": "agrees with the WebUI's output; runs without CUDA graphs",
    "ready": "checked, and the next step replays a CUDA graph, which is the fastest way",
    "failed": (
        "OneDiff's output did not agree, or could not be computed: OneDiff tries a slower backend; if none is left, "
        "the WebUI alone computes this size"
    ),
    "on disk": "used on this machine before the WebUI was started",
    "queued": "waits in the pre-warm queue",
    "warming": "is being pre-warmed now",
}
# The meanings of the table's other words, for tooltips and the legend.
MEANINGS = {
    "Computed by": "the backend and, where steps are cached, the kind of step: full or cached",
    "pinned": "its graphs stay when another model needs memory",
    "Step": "mean over all steps of the last image that OneDiff made at this size; for a shape, over its own calls",
    WEBUI_STEP: "the same for the WebUI alone, timed when the size is first used",
    "Speed": f"compared with the WebUI, after {ENOUGH} calls of each",
    VRAM: "memory that its graphs need. All graphs share one pool, so purging the row may free less: see below it",
    "Pre-warming": "how long it took; below, how much longer the first image would have taken without it",
    "Images": "made at this size since the WebUI was started, not counting interrupted ones",
    "Error": "relative difference from the WebUI's output when it was checked",
}
# The states and columns that no row has on a machine without a GPU.
OF_GPU = {"ready", VRAM}
# The meanings of the totals above the table, for their tooltips.
TOTALS = {
    "Graph memory": "GPU memory of all graphs, and its limit",
    "Low-bit weights": "GPU memory of the 8-bit weights",
    "Disk": "size of the cache folder: sizes used, and choices tuned for this machine",
    "Served by a graph": "share of the calls of the UNet or transformer that replayed a CUDA graph, the fastest way",
    "Queue": "sizes that are being pre-warmed, or wait for it; see Jobs",
    "Calls": "calls of the UNet or transformer since the WebUI was started, by how they were computed",
}


def models_of(rows: Iterable[ResolutionRow]) -> list[str]:
    """The choices of the list that filters the table by model: ALL_MODELS, then each model's name, sorted. Rows that
    only have shapes of a VAE add no model."""
    return [ALL_MODELS, *sorted({row.model for row in rows if row.model and not (row.shapes and row.is_decode)})]


def selected(
    rows: Iterable[ResolutionRow], model: str | None, sort: tuple[str, bool] = ("", False),
) -> list[ResolutionRow]:
    """The rows of a model, or of all models (None, "" or ALL_MODELS), as a new sorted list.

    sort: a column, and whether the largest value comes first. With "" or an unknown column, sizes that were never used
        come first (they are in the pre-warm queue), then the others, the most recently used first.
    """
    shown = [row for row in rows if model in (None, "", ALL_MODELS, row.model)]
    column, descending = sort
    value = SORTED_BY.get(column)
    if value is None:
        return sorted(shown, key=lambda row: -row.last_used or -math.inf)
    known = [row for row in shown if value(row) is not None]
    return sorted(known, key=value, reverse=descending) + [row for row in shown if value(row) is None]


def has_gpu(totals: Totals) -> bool:
    """Whether CUDA graphs have GPU memory on this machine, or a limit for it; False without a GPU."""
    return bool(totals.budget or totals.vram)


def key_of(row: ResolutionRow) -> str:
    """The key of a row in the page: its resolution, which has no space, and its model."""
    return f"{row.resolution} {row.model}"


def resolutions_html(
    rows: list[ResolutionRow], has_gpu: bool = True, sort: tuple[str, bool] = ("", False),
    jobs: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """The table with at most MOST_ROWS rows, each with its shapes folded below it; a hint for users if there is no row.

    rows: in the order of the table. sort: how the rows are sorted (see selected), which the heading shows. jobs: ids of
    pending jobs by the keys of their rows, for a Cancel button in the row; a row without a job has none. has_gpu: if
    False, the column VRAM is left out.
    """
    if not rows:
        return '<p class="onediff-reason">Nothing yet. Generate an image, or pre-warm a size: click one above.</p>'
    hidden = len(rows) - MOST_ROWS
    more = f'<p class="onediff-reason">{hidden} more: choose a model above to see fewer.</p>' if hidden > 0 else ""
    every = choice_html('data-onediff-every aria-label="Select all rows that are shown"')
    columns = columns_shown(COLUMNS, has_gpu)
    shown = "".join(resolution_html(row, columns, jobs.get(key_of(row), 0)) for row in rows[:MOST_ROWS])
    return (
        '<p class="onediff-reason onediff-scrolls">The table scrolls sideways.</p>'
        '<div class="onediff-table" tabindex="0" role="region" aria-label="Resolutions">'
        f"<table><thead><tr><td>{every}</td>{''.join(sorting_head(column, sort) for column in columns)}</tr></thead>"
        f"{shown}</table></div>{more}"
    )


def columns_shown(columns: Sequence[str], has_gpu: bool) -> list[str]:
    """The columns, without VRAM on a machine without a GPU."""
    return [column for column in columns if has_gpu or column != VRAM]


def sorting_head(column: str, sort: tuple[str, bool]) -> str:
    """The heading of a column: a button by which users sort the table (javascript/onediff.js does that). If `sort`
    names this column, the heading shows its direction. sort: see selected."""
    is_sorted = sort[0] == column
    order = ("descending" if sort[1] else "ascending") if is_sorted else "none"
    mark = {"descending": " ▼", "ascending": " ▲"}.get(order, "")
    return (
        f'<th scope="col" aria-sort="{order}"{number_class(column)} title="{html.escape(MEANINGS.get(column, ""))}">'
        f'<button type="button" data-onediff-sort="{column}">{column}{mark}</button></th>'
    )


def number_class(column: str) -> str:
    """The HTML attribute that aligns a column of numbers to the right; "" for other columns."""
    return ' class="onediff-number"' if column in NUMBERS else ""


def row_html(cells: Mapping[str, str], columns: Iterable[str]) -> str:
    """The cells of a row in the order of the columns; columns without a cell are skipped. cells: markup by column."""
    return "".join(f"<td{number_class(column)}>{cells[column]}</td>" for column in columns if column in cells)


def sizes_html(yours: Mapping[str, str], usual: Iterable[UsualSizes], estimates: Mapping[Size, Estimate]) -> str:
    """Rows of buttons: the user's own sizes, then the usual sizes of each kind of model, without the user's own. A row
    without sizes is left out.

    yours: why each of the user's sizes is offered, by size ("512x512"). usual: the sizes of each kind of model.
    estimates: how long pre-warming takes, for sizes where that is known.
    """
    much = {str(size): estimate for size, estimate in estimates.items() if estimate.seconds >= MUCH_SECONDS}
    rows = [("yours", "Yours", yours)]
    for name, (model, *_), sizes in usual:
        rows.append((model, name, {size: "" for size in sizes if size not in yours}))
    return "".join(
        f'<div class="onediff-presets" id="onediff_presets_{kind}"><b>{name}</b>'
        f'{"".join(size_html(kind, size, why, much.get(size)) for size, why in sizes.items())}</div>'
        for kind, name, sizes in rows if sizes
    )


def size_html(kind: str, size: str, why: str, much: Estimate | None) -> str:
    """A button that pre-warms a size (javascript/onediff.js). kind: the row of buttons, for the button's id. why: why
    the size is offered, for its tooltip; "" for none. much: how long pre-warming takes, shown as a warning; None for no
    warning."""
    slow = ""
    mark = ""
    if much:
        slow = f"{estimate_words(much)} on this machine"
        mark = f" <small>{'&gt; ' if much.is_least else ''}{minutes_or_hours(much.seconds)}</small>"
    title = ", ".join(filter(None, (why, slow)))
    return (
        f'<button type="button" class="onediff-small onediff-size" id="onediff_preset_{kind}_{size}" '
        f'data-onediff-size="{size}" title="{title}">{size}{mark}</button>'
    )


def estimate_words(estimate: Estimate) -> str:
    """How long pre-warming takes, in words: "about 4 min", or "more than 4 min"."""
    return f"{'more than' if estimate.is_least else 'about'} {minutes_or_hours(estimate.seconds)}"


def legend_html() -> str:
    """The legend below the table, folded: the meanings of its states and columns. style.css hides those that only a
    machine with a GPU has."""
    words = ""
    for name, meaning in (STATES | MEANINGS).items():
        kind = " data-onediff-of-gpu" if name in OF_GPU else ""
        words += f"<dt{kind}>{STATE_NAMES.get(name, name)}</dt><dd{kind}>{html.escape(meaning)}</dd>"
    return f'<details class="onediff-legend"><summary>Legend</summary><dl>{words}</dl></details>'


def resolution_html(row: ResolutionRow, columns: Sequence[str], job: int = 0) -> str:
    """A row, and below it the reason why it is not faster, if any, and its shapes, folded. job: the id of the job that
    pre-warms the row's size, for a Cancel button; 0 for none."""
    name = html.escape(f"{row.resolution} of {row.model}")
    cancel = f" {small_button('job', job, 'Cancel', f'Cancel: {name}')}" if job else ""
    cells = {
        "State": state_html(row.state) + cancel, "Model": html.escape(row.model or NOTHING), **times_html(row),
        "Pre-warming": prewarm_html(row), "Images": str(row.images or NOTHING),
        "Last used": ago(row.last_used) if row.last_used else NOTHING,
    }
    key = html.escape(key_of(row))
    # Below the row: why it is not faster, and its shapes.
    below = f'<p class="onediff-reason">{html.escape(row.reason)}</p>' if row.reason else ""
    if row.shapes:
        of_shapes = columns_shown(SHAPE_COLUMNS, VRAM in columns)
        head = "".join(
            f'<th scope="col"{number_class(column)} title="{html.escape(MEANINGS.get(column, ""))}">{column}</th>'
            for column in of_shapes
        )
        below += (
            f'<details data-onediff-key="{key}"><summary>{counted(len(row.shapes), "shape")}</summary>'
            f"<table><thead><tr>{head}</tr></thead>"
            f'<tbody>{"".join(shape_html(shape, of_shapes) for shape in row.shapes)}</tbody></table></details>'
        )
    if below:
        below = f'<tr class="onediff-shapes"><td></td><td colspan="{len(columns)}">{below}</td></tr>'
    choose = choice_html(f'value="{key}" aria-label="Select {name}"')
    pinned = f' <span class="onediff-pin" title="{MEANINGS["pinned"]}">pinned</span>' if row.pinned else ""
    return (
        f'<tbody><tr><td>{choose}</td><th scope="row">{html.escape(row.resolution)}{pinned}</th>'
        f"{row_html(cells, columns)}</tr>{below}</tbody>"
    )


def choice_html(attributes: str) -> str:
    """A checkbox inside a label, which makes the clickable area larger. attributes: markup for the input element."""
    return f'<label class="onediff-choice"><input type="checkbox" {attributes}></label>'


def prewarm_html(row: ResolutionRow) -> str:
    """Markup with the duration of the last pre-warming, and below it (if known) how much longer the first image would
    have taken without it; NOTHING if the row was never pre-warmed."""
    if row.prewarm_s is None:
        return NOTHING
    saved = "" if row.saved_s is None else f"<small>saved {seconds(row.saved_s)}</small>"
    return f"{seconds(row.prewarm_s)}{saved}"


def shape_html(shape: ShapeRow, columns: Sequence[str]) -> str:
    """A shape's row of the table below a resolution, as markup, and below it the reason for its state, if any."""
    error = NOTHING if shape.relative_error is None else f"{shape.relative_error:.1e}"
    cells = {
        "Batch": f"{shape.batch}{shape.label and ' ' + shape.label}", "Tokens": str(shape.tokens or "VAE"),
        "Type": html.escape(shape.dtype),
        "Computed by": html.escape(", ".join(filter(None, (shape.backend, shape.lossy, shape.part)))) or NOTHING,
        "State": state_html(shape.state), **times_html(shape), "Calls": str(shape.uses), "Error": error,
    }
    reason = (
        f'<tr><td class="onediff-reason" colspan="{len(columns)}">{html.escape(shape.reason)}</td></tr>'
        if shape.reason else ""
    )
    return f"<tr>{row_html(cells, columns)}</tr>{reason}"


def state_html(state: str) -> str:
    """A state in its colour, with its meaning as a tooltip. state: one of STATES, or "warming" with the share that is
    done: "warming 33 %"."""
    kind = state if state in STATES else state.split(" ")[0]
    meaning = html.escape(STATES.get(kind, ""))
    name = html.escape(kind.replace(" ", "-"))
    words = html.escape(STATE_NAMES.get(state, state))
    return f'<span class="onediff-state onediff-state-{name}" title="{meaning}">{words}</span>'


def times_html(row: Any) -> dict[str, str]:
    """The cells from Step to VRAM of a ResolutionRow or ShapeRow, as markup by column; NOTHING for a value that is not
    known. The speed is not known until OneDiff and the WebUI have been timed often enough. Below the memory that graphs
    need is what a purge would free, if anything."""
    frees = f"<small>frees {memory(row.bytes)}</small>" if row.bytes else ""
    return {
        "Step": milliseconds(row.step_ms), WEBUI_STEP: milliseconds(row.host_ms), "Speed": speedup(row.ratio),
        VRAM: f"{memory(row.needs)}{frees}" if row.needs or row.bytes else NOTHING,
    }


def totals_html(totals: Totals, rows: list[ResolutionRow], jobs: Iterable[Job], folder: Path | None) -> str:
    """The totals at the head of the page, as markup: memory and disk space in use, the number of queued sizes, counts
    of resolutions and calls, the share of calls by graphs, and the size and errors of 8-bit weights.

    rows: of all models. jobs: those that pre-warm. folder: the cache folder; None if it is not opened.
    """
    states = Counter(row.state for row in rows)
    kinds = ", ".join(
        f"{states[state]} {STATE_NAMES.get(state, state)}"
        for state in ("ready", "proved", "failed", "on disk") if states[state]
    )
    pending = sum(job.pending for job in jobs)
    calls = ", ".join(f"{count} {CALLS.get(route, route)}" for route, count in totals.calls.items() if count)
    budget = totals.budget
    held = f"{memory(totals.vram)} of {memory(budget)}" if budget else memory(totals.vram)
    hit_rate = NOTHING if totals.hit_rate is None else f"{100 * totals.hit_rate:.0f} %"
    low_bit = ""
    if totals.low_bit:
        low_bit = f"{memory(totals.low_bit)}, {counted(totals.low_bit_layers, 'layer')}"
    facts = {
        "Graph memory": held if has_gpu(totals) else "", "Disk": memory(totals.disk),
        "Served by a graph": hit_rate if has_gpu(totals) else "",
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
    kind = "" if has_gpu(totals) else " onediff-no-gpu"
    return f'<div class="onediff-status onediff-totals{kind}"><div class="onediff-facts">{cells}</div>{errors}</div>'


def error_html(measured: LowBitErrors) -> str:
    """A sentence with the error of Low-bit over a whole step, as measured with a checkpoint, and its limit; or, without
    an error, that no layer keeps within the limit. The API's status has the errors of each class of layers."""
    budget = f"{measured.budget:.1e}"
    if measured.error is None:
        error = f"no layer uses 8 bits, because none keeps the error within {budget}"
    else:
        error = f"error {measured.error:.1e}, limit {budget}"
    return f'<p class="onediff-reason">Low-bit on this {html.escape(measured.model)} checkpoint: {error}</p>'
