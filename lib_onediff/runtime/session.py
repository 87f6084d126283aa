"""What earlier calls have found out, so that a call like one of them looks it up and replays."""
from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from ..core.call import Call
from ..core.policy import Served
from ..core.precision import autocast_dtype, flags_for, is_autocast_on
from ..core.settings import Settings
from ..core.table import Entry, State
from .call_stats import GRAPH
from .managed_unet import ManagedUNet
from .services import Services


class Session:
    """The calls of one UNet, by the same settings, in the same autocast mode, over the same weights in the same places.

    It ends with other settings, as those of a generation inside this one, with another autocast mode, with an announced
    sampling, and with any change that the UNet's look finds (BoundUNet.during). A call of another shape, with inputs of
    other types or other ControlNet residuals, or cut elsewhere, has another signature. A runner that was purged is not
    found. Calls whose runner a device keeps by itself, and calls while Low-bit is measured, are never noted.
    """

    def __init__(self, services: Services, managed: ManagedUNet, settings: Settings, device: torch.device) -> None:
        """device: where its calls are computed."""
        self._services, self._managed, self._settings, self._device = services, managed, settings, device
        self._turn = services.computing(device)
        self._where = managed.bound.looks, managed.bound.samplings, managed.bound.generation
        self._autocast = autocast_dtype(device.type)
        # Who serves a call, and why it does not go by a faster route. A runner is named by its key and not held here:
        # one that was dropped meanwhile is gone.
        self._known: dict[Hashable, tuple[Entry, str]] = {}

    def holds(self, settings: Settings, device: torch.device) -> bool:
        """Whether a call by these settings can belong to it."""
        return (
            settings is self._settings and device == self._device
            and self._where == (
                self._managed.bound.looks, self._managed.bound.samplings, self._managed.bound.generation
            )
            and is_autocast_on(device.type) is (self._autocast is not None)
            and (self._autocast is None or autocast_dtype(device.type) is self._autocast)
        )

    def note(self, call: Call, entry: Entry, reason: str) -> None:
        """Calls like this one are served by this entry's runner."""
        self._known[call.signature] = entry, reason

    def replay(self, call: Call, settings: Settings, device: torch.device) -> Served | None:
        """The answer to a call like an earlier one: look up, copy the inputs, replay, clone. device: where it is
        computed; inputs that are copied may come from elsewhere.

        Whether anything has changed is looked at while the GPU computes, but for what the graph would read from memory
        that is not there any more. None where something has to be found out first: what was computed goes, and the call
        is made as the first of its kind.
        """
        services, managed = self._services, self._managed
        if call.patches is not None or torch.is_grad_enabled() or not self.holds(settings, device):
            return None
        known = self._known.get(call.signature)
        if known is None:
            return None
        entry, reason = known
        key = entry.key
        if key.precision != flags_for(settings, key.dtype, device, key.upcast_attention):
            # torch's switches of precision were moved since: another graph computes with them.
            return None
        with self._turn:
            if services.is_between_graphs or services.is_warm_up or managed.session is not self:
                # Given back since, the last.
                return None
            runner = managed.runner(entry.key, call.cut)
            if runner is None or entry.verdict.state is not State.READY:
                return None
            bound, cut = managed.bound, call.cut
            output = bound.during(partial(entry.timed, self._device, partial(runner.run, call), GRAPH))
            stands = not entry.key.lossy.low_bit or managed.low_bit_stands()
            if output is None or not stands or (cut is not None and cut.reads and cut.edition != bound.edition):
                # A change that was found must be found out about: nothing is replayed before that.
                managed.session = None
                return None
            return Served(output, entry, bound.edition, GRAPH, reason, call)
