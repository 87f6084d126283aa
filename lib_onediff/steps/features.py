"""Where deep features are kept: at fixed addresses, so that captured graphs can write and read them.

A feature changes smoothly from step to step. Where a forecast is wanted, a line through the last two computed ones
gives the feature of a step between: Liu et al. 2025, "From Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923).
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.call import CutMemory

# How far a forecast goes along its line, of the whole way: the line misses more the farther it goes
# (.readme/deepcache.md).
DAMPING = 0.5
# The farthest that was measured, in distances between the two features: beyond, a forecast stays where it is then.
FARTHEST = 1.5


@dataclass
class Record:
    """The deep feature of one prompt at one shape. made_at: the step that made it, None before the first; edition:
    of the weights then. aside: its values while another prompt's lie at the shape's address.

    before, last: where forecasts are wanted, the last two computed features with their steps, by the same weights.
    """

    made_at: int | None = None
    edition: int | None = None
    aside: Tensor | None = None
    before: tuple[int, Tensor] | None = None
    last: tuple[int, Tensor] | None = None

    def note(self, step: int, edition: int, computed: Tensor | None) -> None:
        """A step has made the feature. computed: its values where forecasts are wanted."""
        if edition != self.edition:
            self.before = self.last = None
        self.made_at, self.edition = step, edition
        if computed is None:
            return
        spare = None
        # Of two features at one step the later counts.
        if self.last is not None and self.last[0] != step:
            spare, self.before = self.before, self.last
        memory = torch.empty_like(computed) if spare is None else spare[1]
        self.last = step, memory.copy_(computed)

    def forecast(self, step: int) -> Tensor | None:
        """The feature of a later step; None before two were computed."""
        if self.before is None or self.last is None:
            return None
        (step_before, feature_before), (step_last, feature_last) = self.before, self.last
        distance = min((step - step_last) / (step_last - step_before), FARTHEST)
        return torch.lerp(feature_before, feature_last, 1 + DAMPING * distance)

    def tensors(self) -> list[Tensor | None]:
        return [self.aside, *(kept[1] for kept in (self.before, self.last) if kept is not None)]


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
        if self.occupant is not record:
            self._put_aside()
        self.occupant, record.made_at, record.aside = record, None, None

    def bring_back(self, record: Record, step: int) -> None:
        """Let this record's feature be read, as it is at a step where that is forecast."""
        feature = record.forecast(step)
        if feature is not None:
            if self.occupant is not record:
                self._put_aside()
            self.memory.write(feature)
            self.occupant = record
            return
        if self.occupant is record:
            return
        self._put_aside()
        assert record.aside is not None, "whoever took the place has put it aside"
        self.memory.write(record.aside)
        self.occupant = record

    def drop_older(self, oldest: int) -> None:
        """Forget the features that were made before a step."""
        self.records = {
            prompt: record for prompt, record in self.records.items()
            if record.made_at is not None and record.made_at >= oldest
        }
        if not any(self.occupant is record for record in self.records.values()):
            self.occupant = None

    def _put_aside(self) -> None:
        other = self.occupant
        if other is not None and other.made_at is not None and other.aside is None:
            other.aside = self.memory.read().clone() if other.last is None else other.last[1]

    def bytes(self) -> int:
        kept = {id(tensor): tensor for record in list(self.records.values()) for tensor in record.tensors()}
        return sum(tensor.nbytes for tensor in (self.memory.tensor, *kept.values()) if tensor is not None)


class Features:
    """The places of one network, by shape and depth."""

    def __init__(self) -> None:
        self._places: dict[Hashable, Place] = {}

    def place(self, shape: Hashable, memory: Callable[[Hashable], CutMemory]) -> Place:
        """memory: see Moment.cut_memory. Captured graphs write and read the same."""
        if shape not in self._places:
            self._places[shape] = Place(memory(shape))
        return self._places[shape]

    def bytes(self) -> int:
        """GPU memory of all features in use, those that graphs write and read included."""
        return sum(place.bytes() for place in list(self._places.values()))
