"""The table of resolutions in the OneDiff tab: which rows it shows, in what order, and as markup."""
from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from typing import Any

from ...runtime.rows import ResolutionRow, ShapeRow
from ..amounts import NOTHING, ago, counted, memory, milliseconds
from ..texts import NO_ROWS, STATE_NAMES, STATES, WORDS, more_rows

MOST_ROWS = 200
COLUMNS = ("Resolution", "State", "Model", "Step", "WebUI", "Ratio", "Memory", "Uses", "Last used")
SHAPE_COLUMNS = (
    "Batch", "Tokens", "Type", "Computed by", "State", "Step", "WebUI", "Ratio", "Memory", "Uses", "Error",
)

# The label of the list to choose from -> what to sort by. What is in the queue for the first time has not been used,
# and is what the user looks for.
ORDERS: dict[str, Callable[[ResolutionRow], Any]] = {
    "Last used": lambda row: -row.last_used or -math.inf,
    "Resolution": lambda row: (math.prod(sides(row)), sides(row), row.model),
    "Step time": lambda row: math.inf if row.step_ms is None else row.step_ms,
    "Memory": lambda row: -row.needs,
    "Uses": lambda row: -row.uses,
}
USUAL_ORDER = next(iter(ORDERS))
ALL_MODELS = "All models"


def sides(row: ResolutionRow) -> list[int]:
    return [int(side) for side in row.resolution.split("x")]


def models_of(rows: Iterable[ResolutionRow]) -> list[str]:
    """What the filter offers. A decode of the VAE is no model's, and a row of the queue has no shapes yet."""
    return [ALL_MODELS, *sorted({row.model for row in rows if row.model and not (row.shapes and row.is_decode)})]


def selected(rows: Iterable[ResolutionRow], model: str | None, order: str | None) -> list[ResolutionRow]:
    """The rows of a model, or of all, in one of ORDERS; any other order that a page asks for is the usual one."""
    shown = [row for row in rows if model in (None, "", ALL_MODELS, row.model)]
    return sorted(shown, key=ORDERS.get(order or "", ORDERS[USUAL_ORDER]))


def key_of(row: ResolutionRow) -> str:
    """What a page calls a row."""
    return f"{row.resolution} {row.model}"


def resolution_and_model(key: str) -> tuple[str, str]:
    """What key_of was made of."""
    resolution, _, model = key.partition(" ")
    return resolution, model


def table_html(rows: list[ResolutionRow]) -> str:
    """The first of the rows, each with its shapes below it in an element that opens."""
    if not rows:
        return f'<p class="onediff-reason">{NO_ROWS}</p>'
    head = "".join(heading(column) for column in COLUMNS)
    body = "".join(map(resolution_html, rows[:MOST_ROWS]))
    hidden = len(rows) - MOST_ROWS
    more = f'<p class="onediff-reason">{more_rows(hidden)}</p>' if hidden > 0 else ""
    every = '<input type="checkbox" data-onediff-every aria-label="Select all rows that are shown">'
    return (
        '<div class="onediff-table" tabindex="0" role="region" aria-label="Resolutions">'
        f'<table><thead><tr><td>{every}</td>{head}</tr></thead>{body}</table></div>{more}'
    )


def legend_html() -> str:
    """What the words in the table mean."""
    meanings = {STATE_NAMES.get(state, state): meaning for state, meaning in STATES.items()} | WORDS
    words = "".join(f"<dt>{word}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in meanings.items())
    return f'<details class="onediff-legend"><summary>Legend</summary><dl>{words}</dl></details>'


def heading(column: str) -> str:
    title = f' title="{html.escape(WORDS[column])}"' if column in WORDS else ""
    return f'<th scope="col"{title}>{column}</th>'


def resolution_html(row: ResolutionRow) -> str:
    cells = (
        state_html(row.state), html.escape(row.model or NOTHING), milliseconds(row.step_ms), milliseconds(row.host_ms),
        ratio(row), memory_html(row), str(row.uses), ago(row.last_used) if row.last_used else NOTHING,
    )
    key, name = html.escape(key_of(row)), html.escape(f"{row.resolution} of {row.model}")
    choose = f'<input type="checkbox" value="{key}" aria-label="Select {name}">'
    pinned = f' <span class="onediff-pin" title="{html.escape(WORDS["pinned"])}">pinned</span>' if row.pinned else ""
    return (
        f'<tbody><tr><td>{choose}</td><th scope="row">{html.escape(row.resolution)}{pinned}</th>{table_cells(cells)}'
        f'</tr>{below_html(row, key)}</tbody>'
    )


def below_html(row: ResolutionRow, key: str) -> str:
    """Why the row is not better, and its shapes."""
    reason = f'<p class="onediff-reason">{html.escape(row.reason)}</p>' if row.reason else ""
    shapes = (
        f'<details data-onediff-key="{key}"><summary>{counted(len(row.shapes), "shape")}</summary>'
        f"{shapes_html(row.shapes)}</details>" if row.shapes else ""
    )
    if not reason and not shapes:
        return ""
    return f'<tr class="onediff-shapes"><td></td><td colspan="{len(COLUMNS)}">{reason}{shapes}</td></tr>'


def shapes_html(shapes: tuple[ShapeRow, ...]) -> str:
    head = "".join(map(heading, SHAPE_COLUMNS))
    body = "".join(map(shape_html, shapes))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shape_html(shape: ShapeRow) -> str:
    error = NOTHING if shape.relative_error is None else f"{shape.relative_error:.1e}"
    tokens = str(shape.tokens) if shape.tokens else "VAE"
    cells = (
        f"{shape.batch}{' with control' if shape.control else ''}", tokens, html.escape(shape.dtype),
        html.escape(", ".join(filter(None, (shape.backend, shape.lossy, shape.part)))) or NOTHING,
        state_html(shape.state), milliseconds(shape.step_ms), milliseconds(shape.host_ms), ratio(shape),
        memory_html(shape), str(shape.uses), error,
    )
    reason = (
        f'<tr><td class="onediff-reason" colspan="{len(SHAPE_COLUMNS)}">{html.escape(shape.reason)}</td></tr>'
        if shape.reason else ""
    )
    return f"<tr>{table_cells(cells)}</tr>{reason}"


def table_cells(cells: tuple[str, ...]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def state_html(state: str) -> str:
    """state: one of STATES, or "warming 33 %"."""
    kind = state if state in STATES else state.split(" ")[0]
    meaning, name = html.escape(STATES.get(kind, "")), html.escape(kind.replace(" ", "-"))
    words = html.escape(STATE_NAMES.get(state, state))
    return f'<span class="onediff-state onediff-state-{name}" title="{meaning}">{words}</span>'


def memory_html(row: Any) -> str:
    """What graphs need, and what would come back."""
    if not row.needs and not row.bytes:
        return NOTHING
    frees = f"<small>frees {memory(row.bytes)}</small>" if row.bytes else ""
    return f"{memory(row.needs)}{frees}"


def ratio(row: Any) -> str:
    """Nothing before both sides were timed often enough."""
    spread = "<small>{:.2f} to {:.2f}</small>".format(*row.ratio_range) if row.ratio_range else ""
    return NOTHING if row.ratio is None else f"{row.ratio:.2f}x{spread}"
