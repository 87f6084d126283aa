"""What the store has in memory until it is written."""
from __future__ import annotations

from .rows import VERDICTS, Choice, ChoiceName, HistoryRow, PurgeFilter, ShapeName

# How many shapes, and how many choices, are kept while they cannot be written.
BUFFERED_ROWS = 4096


class Buffer:
    """What is not on the disk yet."""

    def __init__(self) -> None:
        self.rows: dict[ShapeName, HistoryRow] = {}
        self.choices: dict[ChoiceName, Choice] = {}

    def __bool__(self) -> bool:
        return bool(self.rows or self.choices)

    def add(self, row: HistoryRow) -> None:
        self.rows[row.shape] = row.with_other(self.rows.get(row.shape))
        if len(self.rows) > BUFFERED_ROWS:
            by_age = sorted(self.rows.values(), key=lambda kept: kept.last_used)
            self.rows = {kept.shape: kept for kept in by_age[BUFFERED_ROWS // 8:]}

    def choose(self, name: ChoiceName, choice: Choice) -> None:
        # Choices come in the order in which they are made, whatever the clock says.
        self.choices.pop(name, None)
        self.choices[name] = choice
        if len(self.choices) > BUFFERED_ROWS:
            self.choices = dict(list(self.choices.items())[BUFFERED_ROWS // 8:])

    def forget(self, doomed: PurgeFilter) -> None:
        """Forget history and verdicts, or all that there is."""
        self.rows = {name: row for name, row in self.rows.items() if not doomed.row(row)}
        self.choices = {
            name: choice for name, choice in self.choices.items()
            if not doomed.everything and (name[0] != VERDICTS or not doomed.verdict_named(name[1]))
        }

    def put_back(self, older: Buffer) -> None:
        """Take what another buffer could not write."""
        newer_choices, self.choices = self.choices, dict(older.choices)
        for name, choice in newer_choices.items():
            self.choose(name, choice)
        for row in older.rows.values():
            self.add(row)
