"""What the OneDiff tab shows of the per-resolution cache, as markup."""
from __future__ import annotations

import html
from collections import Counter
from typing import Any

from ..shapes.rows import ResolutionRow, ShapeRow
from .amounts import NOTHING, ago, counted, memory, milliseconds
from .status import ROUTES, facts_html

COLUMNS = ("Resolution", "Model", "State", "Step", "WebUI's own", "Ratio", "Memory", "Uses", "Last used")
SHAPE_COLUMNS = ("Batch", "Tokens", "Type", "State", "Step", "WebUI's own", "Ratio", "Memory", "Uses", "Error")
STATES = {
    "cold": "seen, not checked yet",
    "proved": "agrees with the WebUI's own; runs with plain launches",
    "ready": "the next call replays a graph",
    "failed": "the WebUI's own serves it",
    "on disk": "used by an earlier process on this machine",
}


def totals_html(rows: list[ResolutionRow], calls: dict[str, int], budget: int) -> str:
    """The line above the table. calls: UNet calls by route; budget: what graphs may hold, in bytes, 0 if not set."""
    states = Counter(row.state for row in rows)
    held = memory(sum(row.bytes for row in rows))
    by_route = ", ".join(f"{count} {ROUTES.get(route, route)}" for route, count in calls.items() if count)
    facts = [
        ("Resolutions", str(len(rows))),
        ("Ready", str(states["ready"])),
        *((state.capitalize(), str(states[state])) for state in ("proved", "cold", "failed") if states[state]),
        ("Graph memory", f"{held} of {memory(budget)}" if budget else held),
        ("Calls", by_route or "none yet"),
    ]
    return f'<div class="onediff-status">{facts_html(facts)}</div>'


def table_html(rows: list[ResolutionRow]) -> str:
    """One row per model and resolution, its shapes below it in an element that opens."""
    if not rows:
        return '<p class="onediff-reason">Nothing yet: make a picture, or pre-warm a size.</p>'
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    body = "".join(map(resolution_html, rows))
    states = "".join(f"<dt>{state}</dt><dd>{html.escape(meaning)}</dd>" for state, meaning in STATES.items())
    return (
        '<div class="onediff-table" tabindex="0" role="region" aria-label="Resolutions">'
        f"<table><thead><tr>{head}</tr></thead>{body}</table></div>"
        f'<details class="onediff-legend"><summary>What the states mean</summary><dl>{states}</dl></details>'
    )


def resolution_html(row: ResolutionRow) -> str:
    cells = (
        html.escape(row.model or NOTHING), state_html(row.state), milliseconds(row.step_ms), milliseconds(row.host_ms),
        ratio(row), memory(row.bytes) if row.bytes else NOTHING, str(row.uses), ago(row.last_used),
    )
    reason = f'<p class="onediff-reason">{html.escape(row.reason)}</p>' if row.reason else ""
    return (
        f'<tbody><tr><th scope="row">{html.escape(row.resolution)}</th>{table_cells(cells)}</tr>'
        f'<tr class="onediff-shapes"><td colspan="{len(COLUMNS)}">{reason}'
        f"<details><summary>{counted(len(row.shapes), 'shape')}</summary>{shapes_html(row.shapes)}</details>"
        "</td></tr></tbody>"
    )


def shapes_html(shapes: tuple[ShapeRow, ...]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in SHAPE_COLUMNS)
    body = "".join(map(shape_html, shapes))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shape_html(shape: ShapeRow) -> str:
    error = NOTHING if shape.relative_error is None else f"{shape.relative_error:.1e}"
    tokens = str(shape.tokens) if shape.tokens else "VAE"
    cells = (
        f"{shape.batch}{' with control' if shape.control else ''}", tokens, html.escape(shape.dtype),
        state_html(shape.state), milliseconds(shape.step_ms), milliseconds(shape.host_ms), ratio(shape),
        memory(shape.bytes) if shape.bytes else NOTHING, str(shape.uses), error,
    )
    reason = (
        f'<tr><td class="onediff-reason" colspan="{len(SHAPE_COLUMNS)}">{html.escape(shape.reason)}</td></tr>'
        if shape.reason else ""
    )
    return f"<tr>{table_cells(cells)}</tr>{reason}"


def table_cells(cells: tuple[str, ...]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def state_html(state: str) -> str:
    name, meaning = html.escape(state), html.escape(STATES.get(state, ""))
    return f'<span class="onediff-state onediff-state-{name}" title="{meaning}">{name}</span>'


def ratio(row: Any) -> str:
    return NOTHING if row.ratio is None else f"{row.ratio:.2f} x"
