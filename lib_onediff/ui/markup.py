"""Markup that several pages show: a sentence, a bar, a value under its label, a table.

Texts are escaped here, except where a docstring says that an argument is markup or already escaped.
"""
from __future__ import annotations

import html
from collections.abc import Iterable, Mapping


def sentence(text: str, wrong: bool = False) -> str:
    """A paragraph with a message, which screen readers announce; "" for an empty text. wrong: whether it looks like an
    error."""
    kind = "onediff-wrong" if wrong else "onediff-right"
    return f'<p class="onediff-result {kind}" role="status">{html.escape(text)}</p>' if text else ""


def folded(summary: str, lines: Iterable[str]) -> str:
    """A list of lines that is folded below a summary. A single line is shown openly and without the summary; "" for no
    lines."""
    shown = list(lines)
    if len(shown) < 2:
        return "".join(f'<p class="onediff-reason">{html.escape(line)}</p>' for line in shown)
    items = "".join(f"<li>{html.escape(line)}</li>" for line in shown)
    return f'<details class="onediff-folded"><summary>{html.escape(summary)}</summary><ul>{items}</ul></details>'


def bar_html(percent: float, label: str, role: str = "progressbar") -> str:
    """A bar that is filled to a percentage, at most 100. label: escaped text for screen readers. role: its ARIA role,
    "progressbar" or "meter"."""
    percent = min(percent, 100)
    return (
        f'<div class="onediff-bar" role="{role}" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent:.0f}" '
        f'aria-label="{label}"><div style="width: {percent:.1f}%"></div></div>'
    )


def fact_html(label: str, value: str, below: str = "", meaning: str = "") -> str:
    """A value under its label. below: markup to show below the value. meaning: the tooltip."""
    title = f' title="{html.escape(meaning)}"' if meaning else ""
    name = label.lower().replace(" ", "-")
    return (
        f'<div class="onediff-fact onediff-{name}"{title}><span>{html.escape(label)}</span>'
        f"<b>{html.escape(value)}</b>{below}</div>"
    )


def head_html(columns: Iterable[str], meanings: Mapping[str, str]) -> str:
    """The heading cells of a table, without their row. meanings: tooltips by heading."""
    return "".join(
        f'<th scope="col" title="{html.escape(meanings.get(column, ""))}">{html.escape(column)}</th>'
        for column in columns
    )


def cells_html(cells: Iterable[str]) -> str:
    """The data cells of a table's row, without the row. cells: their content as markup."""
    return "".join(f"<td>{cell}</td>" for cell in cells)


def table_html(
    label: str, columns: Iterable[str], rows: Iterable[Iterable[str]], meanings: Mapping[str, str],
) -> str:
    """A table of texts in a box that scrolls. The first cell of a row is its heading. label: the table's name for
    screen readers. meanings: see head_html."""
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>{cells_html(map(html.escape, cells))}</tr>'
        for first, *cells in rows
    )
    return (
        f'<div class="onediff-table" tabindex="0" role="region" aria-label="{html.escape(label)}">'
        f"<table><thead><tr>{head_html(columns, meanings)}</tr></thead><tbody>{body}</tbody></table></div>"
    )
