"""A UNet's copy on a second card, and why there is none at times."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.call import UNetCall
from ..core.rows import take_rows
from ..core.table import Entry
from ..devices.cuda.graphs.inputs import mapped
from ..options.settings import Settings
from ..weights.bound import BoundUNet
from ..weights.mirror import MirrorUNet
from .cards import second_share
from .managed_unet import ManagedUNet

Known = tuple[ManagedUNet, Settings]


@dataclass
class Pair:
    """A UNet's copy on the second card.

    unet: the copies' module.
    made_for: the option and the first card.
    bytes: of the copied weights.
    equal: whether both cards are of one kind.
    shares: by the latent's shape, in which of BoundUNet.samplings how many rows were chosen for the second card.
    entries: what both cards used last at a shape; their times choose the next share.
    """

    unet: nn.Module
    managed: ManagedUNet
    mirror: MirrorUNet
    device: torch.device
    made_for: tuple[str, torch.device]
    bytes: int
    equal: bool
    shares: dict[Any, tuple[int, int]] = field(default_factory=dict)
    entries: dict[Any, tuple[Entry, Entry]] = field(default_factory=dict)

    def rows(self, call: UNetCall, rows: slice) -> UNetCall:
        """The call of these rows, on the second card: copies follow what the first one is doing."""
        return mapped(take_rows(call, rows), lambda tensor: tensor.to(self.device, non_blocking=True))

    def share(self, call: UNetCall, sampling: int) -> int:
        """How many rows of a call the second card computes. It changes between samplings alone."""
        batch = call.latent.shape[0]
        if self.equal:
            return second_share(batch)
        known = self.shares.get(call.latent.shape)
        if known is None or known[0] != sampling:
            entries = self.entries.get(call.latent.shape)
            times = () if entries is None else tuple(
                entry.own.timing.median / entry.key.batch for entry in entries if entry.own.timing is not None
            )
            known = sampling, second_share(batch, *times) if len(times) == 2 else second_share(batch)
            self.shares[call.latent.shape] = known
        return known[1]

    def follow(self, first: ManagedUNet) -> None:
        """What is known of the first card's UNet holds for this one."""
        self.managed.settings = first.settings
        self.mirror.samplings, self.mirror.in_sampling = first.bound.samplings, first.bound.in_sampling
        self.managed.sampling, self.managed.no_room_for_low_bit = first.sampling, first.no_room_for_low_bit


@dataclass(frozen=True)
class Rest:
    """Why one card computes, and for how long: with this option, until the next sampling and until something changes
    (where), or, if it lasts, until the weights change."""

    reason: str
    option: tuple[str, int]
    where: tuple[int, ...]

    @classmethod
    def now(cls, reason: str, known: Known, lasts: bool) -> Rest:
        managed, settings = known
        return cls(reason, option_of(settings), where_is(managed.bound, lasts))

    def holds(self, settings: Settings, bound: BoundUNet) -> bool:
        return self.option == option_of(settings) and self.where in (where_is(bound, True), where_is(bound, False))


def where_is(bound: BoundUNet, lasts: bool) -> tuple[int, ...]:
    weights = bound.looks, bound.edition
    return weights if lasts else (*weights, bound.samplings)


def option_of(settings: Settings) -> tuple[str, int]:
    return settings.second_gpu, settings.memory_budget
