"""Where deep features are kept: at fixed addresses, so that captured graphs can write and read them.

A feature changes smoothly from step to step. Where a forecast is wanted, a line through the last two computed ones
gives the feature of a step between: Liu et al. 2025, "From Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923).
"""
from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..call import DeepFeature

# How far a forecast goes along its line, of the whole way: the line misses more the farther it goes
# (.readme/deepcache.md).
DAMPING = 0.5
# The farthest that was measured, in distances between the two features: beyond, a forecast stays where it is then.
FARTHEST = 1.5


@dataclass
class Record:
    """The deep feature of one prompt at one shape. made_at: the step that made it, None before the first; weights:
    what they were then. aside: its values while another prompt's lie at the shape's address.

    before, last: where forecasts are wanted, the last two computed features with their steps, by the same weights.
    """

    made_at: int | None = None
    weights: Any = None
    aside: Tensor | None = None
    before: tuple[int, Tensor] | None = None
    last: tuple[int, Tensor] | None = None

    def note(self, step: int, weights: Any, computed: Tensor | None) -> None:
        """A step has made the feature. computed: its values where forecasts are wanted."""
        if weights != self.weights:
            self.before = self.last = None
        self.made_at, self.weights = step, weights
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

    feature: DeepFeature = field(default_factory=DeepFeature)
    occupant: Record | None = None
    records: dict[int, Record] = field(default_factory=dict)

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
            self.feature.write(feature)
            self.occupant = record
            return
        if self.occupant is record:
            return
        self._put_aside()
        assert record.aside is not None, "whoever took the place has put it aside"
        self.feature.write(record.aside)
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
            other.aside = self.feature.read().clone() if other.last is None else other.last[1]

    def bytes(self) -> int:
        kept = {id(tensor): tensor for record in list(self.records.values()) for tensor in record.tensors()}
        return sum(tensor.nbytes for tensor in (self.feature.tensor, *kept.values()) if tensor is not None)


class Features:
    """The places of one UNet, by shape and depth."""

    def __init__(self) -> None:
        self._places: dict[Hashable, Place] = {}

    def place(self, shape: Hashable) -> Place:
        return self._places.setdefault(shape, Place())

    def bytes(self) -> int:
        """GPU memory of all features, those that graphs write and read included."""
        return sum(place.bytes() for place in list(self._places.values()))

    def forget(self, held: Collection[DeepFeature]) -> None:
        """Trust no feature any more. Addresses stay where they are held, by graphs; the others' memory goes."""
        addresses = set(map(id, held))
        self._places = {
            shape: Place(place.feature) for shape, place in self._places.items() if id(place.feature) in addresses
        }
