"""Where deep features are kept: at fixed addresses, so that captured graphs can write and read them."""
from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core.call import CutMemory
from .line import Line

# How far a forecast goes along its line, of the whole way: the line misses more the farther it goes
# (.readme/speed-and-quality.md).
DAMPING = 0.5
# The farthest that was measured, in distances between the two features.
FARTHEST = 1.5


@dataclass
class Record:
    """The deep feature of one prompt at one shape. made_at: the step that made it, None before the first; edition:
    of the weights then. aside: its values while another prompt's lie at the shape's address. line: through the last two
    computed ones, where forecasts are wanted."""

    made_at: int | None = None
    edition: int = -1
    aside: Tensor | None = None
    line: Line = field(default_factory=Line)

    def note(self, step: int, edition: int, computed: Tensor | None) -> None:
        """A step has made the feature. computed: its values where forecasts are wanted."""
        self.made_at, self.edition = step, edition
        if computed is None:
            self.line = Line()
        else:
            self.line.note(step, computed, edition)

    def forecast(self, step: int) -> Tensor | None:
        """The feature of a later step; None where there is no line."""
        return self.line.at(step, DAMPING, FARTHEST) if self.line.edition == self.edition else None


@dataclass
class Place:
    """The address of a shape's deep feature, whose feature lies there now, and everybody's records."""

    memory: CutMemory
    occupant: Record | None = None
    records: dict[int, Record] = field(default_factory=dict)

    def record(self, prompt: int) -> Record:
        return self.records.setdefault(prompt, Record())

    def make_room(self, record: Record) -> None:
        """Let this record's feature be written: what lies there of another prompt is put aside."""
        self._take(record)
        record.made_at = record.aside = None

    def bring_back(self, record: Record, step: int) -> None:
        """Let this record's feature be read, as it is at a step where that is forecast."""
        feature = record.forecast(step)
        if feature is None and self.occupant is not record:
            feature = record.aside
            assert feature is not None, "whoever took the place has put it aside"
        self._take(record)
        if feature is not None:
            self.memory.write(feature)

    def drop_older(self, oldest: int) -> None:
        """Forget the features that were made before a step."""
        self.records = {
            prompt: record for prompt, record in self.records.items()
            if record.made_at is not None and record.made_at >= oldest
        }
        if not any(self.occupant is record for record in self.records.values()):
            self.occupant = None

    def _take(self, record: Record) -> None:
        other, self.occupant = self.occupant, record
        if other is not None and other is not record and other.made_at is not None and other.aside is None:
            kept = other.line.tensors
            # What lies there may be a forecast.
            other.aside = kept[-1] if kept else self.memory.read().clone()

    def bytes(self) -> int:
        records = list(self.records.values())
        kept = {id(one): one for record in records for one in (*record.line.tensors, record.aside) if one is not None}
        return self.memory.bytes + sum(tensor.nbytes for tensor in kept.values())
