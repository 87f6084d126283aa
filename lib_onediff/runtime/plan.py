"""How later calls of one signature are computed: found out once, looked up at each of them."""
from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch

from ..core.call import Call
from ..core.device import Runner
from ..core.epoch import Epoch
from ..core.policy import Served
from ..core.precision import autocast_dtype, flags_for, is_autocast_on
from ..core.settings import Settings
from ..core.table import Entry, State
from .call_stats import GRAPH
from .network import Network
from .services import Services


class Plan(NamedTuple):
    """How a network's calls of one signature are computed.

    entry: of their shape: its backend, torch's switches of precision, and what was proved. runner: replays them.
    reason: why they go by no faster route. settings, autocast, device: under which the plan was made; autocast is the
    type that torch casts to, None where it is off. epoch: of the network when it was made. turn: see
    Services.computing.
    """

    entry: Entry
    runner: Runner
    reason: str
    settings: Settings
    autocast: torch.dtype | None
    device: torch.device
    epoch: Epoch
    turn: AbstractContextManager[object]

    def is_for(self, settings: Settings, device: torch.device) -> bool:
        """Whether it serves calls by these settings in torch's modes as they are now."""
        if settings is not self.settings or device != self.device:
            return False
        is_on = is_autocast_on(device.type)
        if is_on is (self.autocast is None) or (is_on and autocast_dtype(device.type) is not self.autocast):
            return False
        key = self.entry.key
        # torch's switches of precision may have been moved since: another graph computes with them.
        return key.precision == flags_for(settings, key.dtype, device, key.upcast_attention)


def replayed(
    services: Services, network: Network, call: Call, settings: Settings, device: torch.device
) -> Served | None:
    """A call computed by its plan: copy the inputs, replay, clone. device: that computes; inputs may come from
    elsewhere.

    Whether anything has changed is looked at while the GPU computes, except for what the graph would read from memory
    that is gone. None where there is no plan, or something has changed: what was computed is dropped, and the call is
    made as the first of its kind.
    """
    if call.patches is not None or torch.is_grad_enabled() or not network.plans:
        return None
    signature = call.signature
    known = network.plans.get(signature)
    if known is None or not known.is_for(settings, device):
        return None
    plan: Plan = known
    bound, cut, runner, entry = network.bound, call.cut, plan.runner, plan.entry
    own = runner.inputs.cut
    if cut is not None and (own is None or own.memory is not cut.memory):
        return None
    with plan.turn:
        if services.is_between_graphs or services.generations.is_warm_up:
            return None
        if network.plans.get(signature) is not plan or entry.verdict.state is not State.READY:
            # Another thread has dropped it, or what was proved, meanwhile.
            return None
        output, made_at, now = None, plan.epoch, bound.epoch
        if made_at.structure == now.structure and made_at.addresses == now.addresses:
            output = bound.during(partial(entry.timed, device, partial(runner.run, call), GRAPH))
        low_bit_stands = not entry.key.lossy.low_bit or network.low_bit_stands()
        cut_stands = cut is None or not cut.reads or cut.values == bound.epoch.values
        if output is None or not low_bit_stands or not cut_stands:
            # Nothing is replayed before the change is known.
            network.plans.clear()
            return None
        return Served(output, entry, bound.epoch, GRAPH, plan.reason, call)
