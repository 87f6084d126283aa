"""The tables of what was measured on Forge Neo's backend."""
from __future__ import annotations

from collections.abc import Sequence

from ..measure import quotient
from ..report import markdown, number
from .measure import CHANGES, HOST, LORA, NEW_SIZE, START, Measured

HEADINGS = (
    "model", "variant", "first image s", "later s", "x host", "ms a step", "new size: first s", "later s", "x host",
    "LoRA: first s", "later s", "x host", "error x host", "peak MiB", "remarks",
)

# No error of half precision is as small.
HALF_PRECISION = 1e-5


def table(rows: Sequence[Measured]) -> str:
    """A Markdown table."""
    return markdown(HEADINGS, [cells(row, host_of(row, rows)) for row in rows])


def host_of(row: Measured, rows: Sequence[Measured]) -> Measured:
    return next(other for other in rows if (other.model, other.variant) == (row.model, HOST))


def cells(row: Measured, host: Measured) -> list[str]:
    taken: list[str] = []
    for change in CHANGES:
        after, theirs = row.after.get(change), host.after.get(change)
        if after is None:
            taken += [""] * (4 if change == START else 3)
            continue
        taken += [number(after.first_s, ".2f"), number(after.later_s, ".3f")]
        taken.append(number(quotient(theirs.later_s if theirs else None, after.later_s), ".2f"))
        if change == START:
            taken.append(number(after.step_ms, ".1f"))
    peaks = [after.peak_mib for after in row.after.values() if after.peak_mib is not None]
    return [
        row.model, row.variant, *taken, " / ".join(errors(row, host)), number(max(peaks, default=None), ".0f"),
        "; ".join(filter(None, (row.problem, row.note, routes(row)))),
    ]


def errors(row: Measured, host: Measured) -> list[str]:
    """After each change: how many times the host's own error against float32. The host's, and in float32, as it is."""
    found = []
    for change in (START, NEW_SIZE, LORA):
        after, theirs = row.after.get(change), host.after.get(change)
        if after is None or theirs is None or after.error is None:
            continue
        if row is host or not theirs.error or theirs.error < HALF_PRECISION:
            found.append(f"{after.error:.1e}")
        else:
            found.append(f"{after.error / theirs.error:.2f}")
    return found


def routes(row: Measured) -> str:
    """The routes that the calls of the first image after each change took, and how many images it took to be fast."""
    return ", ".join(
        f"{change} {'+'.join(f'{count} {route}' for route, count in after.first_routes.items())}"
        + (f" and {len(after.unsettled)} images more until ready" if after.unsettled else "")
        for change, after in row.after.items() if after.first_routes
    )
