"""What the first calls of a sampling have found out, so that later ones look it up and replay."""
from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from ..model.call import UNetCall
from ..ops.precision import autocast_dtype
from ..options.settings import Settings
from ..shapes.key import ShapeKey, control_shapes
from ..shapes.table import Entry


class KnownCall(NamedTuple):
    """Who serves a call. reason: why it does not go by a faster route. It names the runner by its key and does not hold
    it: one that was dropped meanwhile is gone."""

    key: ShapeKey
    entry: Entry
    reason: str


class Session:
    """One sampling of one UNet, by the same settings, in the same autocast mode.

    It ends with other settings, as those of a generation inside this one, with another autocast mode (holds), and with
    another sampling, prompt or LoRA, or weights that have moved (BoundUNet.goes_on). A call of another shape, or with
    other ControlNet residuals, has another signature. A runner that was purged is not found. Calls that decide anew at
    each step (DeepCache, FP8, OneFlow) are never noted.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._autocast = autocast_dtype(device.type)
        self._known: dict[Hashable, KnownCall] = {}

    def holds(self, settings: Settings, device: torch.device) -> bool:
        """Whether a call by these settings can belong to it."""
        return settings is self._settings and device == self._device and (
            autocast_dtype(device.type) is self._autocast
        )

    def find(self, call: UNetCall) -> KnownCall | None:
        return self._known.get(signature(call))

    def note(self, call: UNetCall, entry: Entry, reason: str) -> None:
        """Calls like this one are served by this entry's runner."""
        self._known[signature(call)] = KnownCall(entry.key, entry, reason)


def signature(call: UNetCall) -> Hashable:
    """What tells calls of one sampling apart; microseconds."""
    latent, y, condition = call.latent, call.y, call.timestep_condition
    return (
        latent.shape, latent.dtype, call.timestep.shape, call.context.shape, y is None or y.shape,
        condition is None or condition.shape, control_shapes(call.control) if call.control else (),
        call.upcast_attention, call.additions,
    )
