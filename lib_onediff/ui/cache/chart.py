"""A bar chart of milliseconds per step, the WebUI's own against ours, as markup. The numbers stand beside the bars."""
from __future__ import annotations

import html
from collections.abc import Iterable

from ...runtime.rows import ResolutionRow
from ..amounts import milliseconds, times

MOST_BARS = 8


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
        '<figure class="onediff-chart"><figcaption>Milliseconds per step, OneDiff against the WebUI\'s own'
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
