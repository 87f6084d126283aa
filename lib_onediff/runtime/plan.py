"""How later calls of one signature are computed: found out once, looked up at each of them."""
from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.call import Call
from ..core.device import Runner
from ..core.epoch import Epoch
from ..core.fields import signature_function
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


def replayed(services: Services, network: Network, call: Call, settings: Settings) -> Served | None:
    """A call computed by its plan: copy the inputs, replay, clone.

    Whether anything has changed is looked at while the GPU computes, except for what the graph would read from memory
    that is gone. None where there is no plan, or something has changed: what was computed is dropped, and the call is
    made as the first of its kind.
    """
    if call.patches is not None or torch.is_grad_enabled() or not network.plans:
        return None
    kind: Any = type(call)
    # As Call.signature has it, without a frame.
    signature = signature_function(kind)(call)
    known = network.plans.get(signature)
    if known is None:
        return None
    plan: Plan = known
    device = call.latent.device
    if settings is not plan.settings or device != plan.device:
        return None
    is_autocast = is_autocast_on(device.type)
    if is_autocast is (plan.autocast is None) or (is_autocast and autocast_dtype(device.type) is not plan.autocast):
        return None
    entry, runner = plan.entry, plan.runner
    key = entry.key
    # torch's switches of precision may have been moved since: another graph computes with them. Which switches matter
    # follows from the key and from the build of torch, so where none did, none does.
    if key.precision and key.precision != flags_for(settings, key.dtype, device, key.upcast_attention):
        return None
    bound, cut, own = network.bound, call.cut, runner.inputs.cut
    if cut is not None and (own is None or own.memory is not cut.memory):
        return None
    with plan.turn:
        if services.is_between_graphs or services.generations.this_thread.is_warm_up:
            return None
        if network.plans.get(signature) is not plan or entry.verdict.state is not State.READY:
            # Another thread has dropped it, or what was proved, meanwhile.
            return None
        output, made_at, now = None, plan.epoch, bound.epoch
        if made_at.structure == now.structure and made_at.addresses == now.addresses:
            output = bound.during(partial(entry.own.time, device, partial(runner.run, call), GRAPH))
        low_bit_stands = not key.lossy.low_bit or network.low_bit_stands()
        cut_stands = cut is None or not cut.reads or cut.values == bound.epoch.values
        if output is None or not low_bit_stands or not cut_stands:
            # Nothing is replayed before the change is known.
            network.plans.clear()
            return None
        # As Entry.note_use, without a frame.
        entry.uses += 1
        entry.last_used = time.time()
        return Served(output, entry, bound.epoch, GRAPH, plan.reason, call)
