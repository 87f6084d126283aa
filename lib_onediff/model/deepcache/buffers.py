"""Where deep features are kept: at fixed addresses, so that captured graphs can write and read them."""
from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..call import DeepFeature


@dataclass
class Record:
    """The deep feature of one prompt at one shape. made_at: the step that made it, None before the first; weights:
    what they were then. aside: its values while another prompt's lie at the shape's address."""

    made_at: int | None = None
    weights: Any = None
    aside: Tensor | None = None


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

    def bring_back(self, record: Record) -> None:
        """Let this record's feature be read."""
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
            other.aside = self.feature.read().clone()

    def bytes(self) -> int:
        asides = [record.aside for record in list(self.records.values())]
        return sum(tensor.nbytes for tensor in (self.feature.tensor, *asides) if tensor is not None)


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
