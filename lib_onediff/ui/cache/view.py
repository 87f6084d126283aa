"""Which rows of the per-resolution cache the OneDiff tab shows, and in what order."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...runtime.rows import ResolutionRow

ALL_MODELS = "All models"


def by_last_use(row: ResolutionRow) -> Any:
    # What is in the queue for the first time has not been used, and is what the user looks for.
    return -row.last_used if row.last_used else -math.inf


def by_resolution(row: ResolutionRow) -> Any:
    width, _, height = row.resolution.partition("x")
    return int(width) * int(height), int(width), row.model


def by_step(row: ResolutionRow) -> Any:
    return math.inf if row.step_ms is None else row.step_ms


def by_memory(row: ResolutionRow) -> Any:
    return -row.needs


def by_uses(row: ResolutionRow) -> Any:
    return -row.uses


# The label of the list to choose from -> what to sort by.
ORDERS: dict[str, Callable[[ResolutionRow], Any]] = {
    "Last used": by_last_use, "Resolution": by_resolution, "Step time": by_step, "Memory": by_memory, "Uses": by_uses,
}
USUAL_ORDER = next(iter(ORDERS))


def models_of(rows: Iterable[ResolutionRow]) -> list[str]:
    """What the filter offers. A decode of the VAE is no model's, and a row of the queue has no shapes yet."""
    return [ALL_MODELS, *sorted({row.model for row in rows if row.model and not (row.shapes and row.is_decode)})]


def selected(rows: Iterable[ResolutionRow], model: str | None, order: str | None) -> list[ResolutionRow]:
    """The rows of a model, or of all, in one of ORDERS; any other order that a page asks for is the usual one."""
    shown = [row for row in rows if model in (None, "", ALL_MODELS, row.model)]
    return sorted(shown, key=ORDERS.get(order or "", by_last_use))
