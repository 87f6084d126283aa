"""What the store keeps: history and findings, and what a purge takes of them."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field

# The kinds of findings. The name of a verdict begins with its resolution and its architecture: so a purge finds it.
VERDICTS = "verdict"
TUNED = "tuned"
# What users chose holds on every machine.
CHOSEN = "chosen"

ShapeName = tuple[str, str, str, int, int, str]


class Damaged(Exception):
    """The file is not a store, or no longer; the message says what it is, to follow 'the store was'."""


class NotKept(Exception):
    """What a user asked for is not on the disk; the message is a sentence for the user."""


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

    def after(self, earlier: HistoryRow | None) -> HistoryRow:
        """The sum of two rows of one shape, as schema.write sums them: all uses, and the latest of everything else."""
        if earlier is None:
            return self
        known = {
            name: getattr(earlier if getattr(self, name) is None else self, name)
            for name in ("step_ms", "host_ms", "relative_error")
        }
        return dataclasses.replace(self, uses=self.uses + earlier.uses, **known)


@dataclass(frozen=True)
class Finding:
    """What was found, or chosen, under a name. value: JSON."""

    kind: str
    name: str
    value: str


@dataclass(frozen=True)
class PurgeFilter:
    """What a purge takes: these resolutions (None: all) of this model (None: all), whose architectures are these.
    Without resolutions and model: everything but what users chose."""

    resolutions: Collection[str] | None = None
    model: str | None = None
    architectures: Collection[str] = ()

    @property
    def everything(self) -> bool:
        return self.resolutions is None and self.model is None

    def history(self, resolution: str, model: str) -> bool:
        """Whether a row of the history goes."""
        return self._resolution(resolution) and self.model in (None, model)

    def verdict(self, resolution: str, architecture: str) -> bool:
        """Whether a verdict of a shape goes."""
        return self._resolution(resolution) and (self.model is None or architecture in self.architectures)

    def finding(self, kind: str, name: str) -> bool:
        """Whether a finding goes."""
        resolution, architecture, *_ = (*name.split(" ", 2), "", "")
        return (self.everything and kind != CHOSEN) or (kind == VERDICTS and self.verdict(resolution, architecture))

    def _resolution(self, resolution: str) -> bool:
        return self.resolutions is None or resolution in self.resolutions
