"""A UNet's copy on a second card, and why there is none at times."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..engines.graphs.inputs import mapped
from ..engines.managed_unet import ManagedUNet
from ..model.bound import BoundUNet
from ..model.call import UNetCall
from ..model.identity import Sighting
from ..model.mirror import MirrorUNet
from ..model.rows import take_rows
from ..options.settings import Settings
from ..shapes.table import Entry
from .cards import second_share
from .guidance import SameRows

Known = tuple[ManagedUNet, Settings]


@dataclass
class Pair:
    """A UNet's copy on the second card.

    unet: the copies' module.
    made_for: the option and the first card.
    bytes: of the copied weights.
    equal: whether both cards are of one kind.
    same: gives the second card the same prompt for the same one.
    shares: by the latent's shape, in which sampling (BoundUNet.looks) how many rows were chosen for the second card.
    entries: what both cards used last at a shape; their times choose the next share.
    """

    unet: nn.Module
    managed: ManagedUNet
    mirror: MirrorUNet
    device: torch.device
    made_for: tuple[str, torch.device]
    bytes: int
    equal: bool
    same: SameRows
    shares: dict[Any, tuple[int, int]] = field(default_factory=dict)
    entries: dict[Any, tuple[Entry, Entry]] = field(default_factory=dict)

    def rows(self, call: UNetCall, rows: slice) -> UNetCall:
        """The call of these rows, on the second card: copies follow what the first one is doing. Of the same prompt,
        the same tensors."""
        taken = take_rows(call, rows, self.same)
        moved = mapped(taken, lambda tensor: tensor.to(self.device, non_blocking=True))
        return replace(moved, context=taken.context, y=taken.y)

    def share(self, call: UNetCall, looks: int) -> int:
        """How many rows of a call the second card computes. It changes between samplings alone."""
        batch = call.latent.shape[0]
        if self.equal:
            return second_share(batch)
        known = self.shares.get(call.latent.shape)
        if known is None or known[0] != looks:
            entries = self.entries.get(call.latent.shape)
            times = () if entries is None else tuple(
                entry.own.timing.median / entry.key.batch for entry in entries if entry.own.timing is not None
            )
            known = looks, second_share(batch, *times) if len(times) == 2 else second_share(batch)
            self.shares[call.latent.shape] = known
        return known[1]

    def follow(self, first: ManagedUNet) -> None:
        """What is known of the first card's UNet holds for this one."""
        self.managed.settings, self.managed.by_content = first.settings, first.by_content
        self.managed.sampling, self.managed.no_room_for_low_bit = first.sampling, first.no_room_for_low_bit


@dataclass
class Rest:
    """Why one card computes, and for how long: with this option, until the next sampling, or until the weights change
    where they are given."""

    reason: str
    option: tuple[str, int]
    sampling: Sighting | int
    weights: Any = None

    @classmethod
    def now(cls, reason: str, known: Known, call: UNetCall, lasts: bool) -> Rest:
        managed, settings = known
        sampling: Sighting | int = managed.bound.samplings
        if not managed.by_content:
            # This host hands the same prompt over in all of a sampling.
            sampling = Sighting((call.context, call.y))
        weights = managed.bound.weights_now() if lasts and managed.bound.has_binding else None
        return cls(reason, option_of(settings), sampling, weights)

    def holds(self, settings: Settings, bound: BoundUNet, call: UNetCall) -> bool:
        if self.option != option_of(settings):
            return False
        if self.weights is not None and bound.has_binding and self.weights == bound.weights_now():
            return True
        if isinstance(self.sampling, int):
            return self.sampling == bound.samplings
        return self.sampling.recognises((call.context, call.y))


def option_of(settings: Settings) -> tuple[str, int]:
    return settings.second_gpu, settings.memory_budget
