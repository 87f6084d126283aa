"""What the store keeps: history, choices and verdicts, and what a purge takes of them."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field

# Verdicts are choices under a name of their own in place of an architecture, and each has a name that begins with its
# resolution and its architecture: so the tables are those of before, and a purge finds them.
VERDICTS = "verdicts"

ShapeName = tuple[str, str, str, int, int, str]
ChoiceName = tuple[str, str]


class Damaged(Exception):
    """The file is not a store, or no longer; the message says what it is, to follow 'the store was'."""


@dataclass(frozen=True)
class HistoryRow:
    """One use of a shape, or many of them summed. Times are medians in milliseconds; None is not known yet.

    resolution: pixels, "width x height" as "512x768". batch: the UNet's. last_used: time.time().
    relative_error: how far our output was from the host's at the first use (the verdict).
    """

    architecture: str
    model: str
    resolution: str
    batch: int
    tokens: int
    dtype: str
    uses: int = 1
    last_used: float = field(default_factory=time.time)
    step_ms: float | None = None
    host_ms: float | None = None
    relative_error: float | None = None

    @property
    def shape(self) -> ShapeName:
        """What makes two rows the same shape."""
        return self.architecture, self.model, self.resolution, self.batch, self.tokens, self.dtype

    @property
    def ratio(self) -> float | None:
        """How many times faster than the host's own forward, or None while one of the two is unknown."""
        return self.host_ms / self.step_ms if self.host_ms and self.step_ms else None

    def with_other(self, other: HistoryRow | None) -> HistoryRow:
        """The sum of two rows of one shape: all uses, and of everything else what the later one knows."""
        if other is None:
            return self
        now = time.time()
        # What is of the future was used before somebody set the clock back.
        earlier, later = sorted((other, self), key=lambda row: (row.last_used <= now, row.last_used))
        known = {
            name: getattr(earlier if getattr(later, name) is None else later, name)
            for name in ("step_ms", "host_ms", "relative_error")
        }
        return dataclasses.replace(later, uses=self.uses + other.uses, **known)


@dataclass(frozen=True)
class Choice:
    """What was found to be best for an architecture on this machine: JSON text, and the time.time() of the finding."""

    value: str
    changed: float


@dataclass(frozen=True)
class PurgeFilter:
    """What a purge takes: these resolutions (None: all) of this model (None: all), whose architectures are these."""

    resolutions: frozenset[str] | None
    model: str | None
    architectures: frozenset[str]

    @classmethod
    def of(cls, resolutions: Collection[str] | None, model: str | None, architectures: Collection[str]) -> PurgeFilter:
        return cls(None if resolutions is None else frozenset(resolutions), model, frozenset(architectures))

    @property
    def everything(self) -> bool:
        return self.resolutions is None and self.model is None

    def row(self, row: HistoryRow) -> bool:
        """Whether a row of the history goes."""
        return self._resolution(row.resolution) and self.model in (None, row.model)

    def verdict(self, resolution: str, architecture: str) -> bool:
        """Whether a verdict of a shape goes."""
        return self._resolution(resolution) and (self.model is None or architecture in self.architectures)

    def verdict_named(self, name: str) -> bool:
        """The same, by the name of the verdict."""
        resolution, architecture, *_ = (*name.split(" ", 2), "", "")
        return self.verdict(resolution, architecture)

    def _resolution(self, resolution: str) -> bool:
        return self.resolutions is None or resolution in self.resolutions
