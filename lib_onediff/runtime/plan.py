"""Plans: the fast path for calls of a signature that was served before. The plan is looked up, checked and replayed."""
from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import Call
from ..core.device import Runner
from ..core.epoch import Epoch
from ..core.fields import signature_function
from ..core.image import GRAPH
from ..core.policy import Served
from ..core.precision import autocast_dtype, flags_for, is_autocast_on
from ..core.settings import Settings
from ..core.table import Entry, State
from ..weights.baseline import Part
from .network import Network
from .services import Services


class Plan(NamedTuple):
    """How a network's calls of one signature (Call.signature) are computed.

    entry: the entry of the calls' shape; its key has the backend and torch's switches for precision.
    runner: replays the graph.
    reason: why the calls are not faster still, for users, such as streamed weights; "" if there is no reason.
    settings, autocast, device: the conditions under which the plan was made, which a call must meet. autocast: the
        dtype of torch.autocast; None if autocast was off.
    epoch: the network's epoch when the plan was made.
    computing: the context in which this thread alone launches work on the device; see Services.computing.
    part: for a cached pass, the part of the network that the pass reads: only this part is compared with the baseline
        at a replay. None: the whole network is compared.
    """

    entry: Entry
    runner: Runner
    reason: str
    settings: Settings
    autocast: torch.dtype | None
    device: torch.device
    epoch: Epoch
    computing: AbstractContextManager[object]
    part: Part | None = None

    def replay(self, call: Call) -> Tensor:
        """The output of a call, by the runner, without any check. Adds the replay's time to the shape's stopwatch. Call
        it inside of `computing`."""
        stopwatch = self.entry.own
        if stopwatch.route != GRAPH:
            stopwatch.begin_route(GRAPH)
        if self.device.type != "cuda":
            began = time.perf_counter()
            output = self.runner.run(call)
            stopwatch.add(time.perf_counter() - began)
            return output
        # Events go to torch's current GPU, which `computing` has set.
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        output = self.runner.run(call)
        end.record()
        stopwatch.add((begin, end))
        return output


def replayed(services: Services, network: Network, call: Call, settings: Settings) -> Served | None:
    """Serve a call by its plan: copy the inputs, replay the graph, clone the output. Returns None if no plan is valid
    for this call, so that the caller must serve it without one: among others for patched calls, with gradients on, in a
    warm-up, and under other settings or another autocast than the plan's. If the network has changed since the plan was
    made, returns None too, and all plans of the network are dropped.

    The addresses of the weights are compared with the baseline before the replay, because a graph over freed memory
    must not run. Everything else is compared while the GPU computes, before the output is returned.
    """
    if call.patches is not None or torch.is_grad_enabled() or not network.plans:
        return None
    kind: Any = type(call)
    # Call.signature, inlined to save a Python call.
    signature = signature_function(kind)(call)
    known = network.plans.get(signature)
    if known is None:
        return None
    plan: Plan = known
    device = call.latent.device
    if settings is not plan.settings or device != plan.device:
        return None
    autocast = autocast_dtype(device.type) if is_autocast_on(device.type) else None
    if autocast is not plan.autocast:
        return None
    entry = plan.entry
    key = entry.key
    # torch's switches for precision may have been changed. If the key has none, none matter now either: the key and
    # torch determine which of them matter.
    if key.precision and key.precision != flags_for(settings, key.dtype, device, key.upcast_attention):
        return None
    cut = call.cut
    if cut is not None:
        own = plan.runner.inputs.cut
        if own is None or own.memory is not cut.memory:
            return None
    with plan.computing:
        if services.is_between_graphs or services.generations.this_thread.is_warm_up:
            return None
        if network.plans.get(signature) is not plan or entry.verdict.state is not State.READY:
            # Another thread has dropped the plan, or its proof, meanwhile.
            return None
        baseline = network.bound.baseline
        made_at = plan.epoch
        now = baseline.epoch
        is_same = None
        if made_at.structure == now.structure and made_at.addresses == now.addresses:
            is_same = baseline.begin() if plan.part is None else baseline.begin_part(plan.part)
        output = None
        if is_same is not None:
            launched = plan.replay(call)
            if is_same():
                output = launched
        epoch = baseline.epoch
        if epoch.values != made_at.values and (network.bound.on_the_fly.copies or not network.in_sampling):
            # Copies of the weights have the old values; outside of a sampling, the proof is for the old values too.
            output = None
        if key.lossy.low_bit and not network.low_bit_is_unchanged():
            output = None
        if cut is not None and cut.reads and cut.values != epoch.values:
            output = None
        if output is None:
            # The slow path finds out what has changed, and makes new plans.
            network.plans.clear()
            return None
        # Entry.note_use, inlined to save a Python call.
        entry.uses += 1
        entry.last_used = time.time()
        return Served(output, entry, epoch, GRAPH, plan.reason, call)
