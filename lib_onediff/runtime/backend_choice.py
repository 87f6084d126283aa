"""Which backends are tried for a call, and why not the others: by the settings, the machine and the model."""
from __future__ import annotations

import torch

from .. import engines as backends
from ..engines.graphs.cache import GraphCache
from ..engines.managed_unet import ManagedUNet
from ..engines.oneflow.route import OneFlowRoute
from ..engines.operator_sets import OperatorSets
from ..model.call import UNetCall
from ..ops.sage import why_no_sage
from ..options.settings import EXACT_ATTENTION, ONE_GPU, Settings
from ..shapes.key import EXACT, Lossy

NO_ROOM = "there is no GPU memory for the weights in eight bits, or to measure what they do"
SAGE = "SageAttention"


class BackendChoice:
    """Whoever calls holds the runtime's lock."""

    def __init__(self, graphs: GraphCache, operators: OperatorSets, oneflow: OneFlowRoute) -> None:
        self._graphs = graphs
        self._operators = operators
        self._oneflow = oneflow

    def begin(
        self, managed: ManagedUNet, settings: Settings, call: UNetCall, waits_for_compile: bool
    ) -> backends.Candidates:
        """The backends to try for a call, with the binding made true for it; none, and the reason, where the host must
        run it. waits_for_compile: see Services.

        Raises UnsupportedUNet. To be called in the host's modes: they decide what can be served.
        """
        candidates = self._candidates(settings, call, waits_for_compile)
        device, budget = call.latent.device, settings.memory_budget
        managed.bound.reader = self._operators.contents_reader(device)
        managed.bound.refresh(
            call, candidates.backends[0] == backends.NATIVE, lambda: self._graphs.room(budget, device)
        )
        misfit = managed.misfit(call)
        if misfit is not None:
            return backends.Candidates((), misfit)
        if managed.kinds:
            self._graphs.drop_low_bit(managed)
            candidates = without_engines(candidates, managed.kinds, device)
        elif settings.low_bit == "off":
            self._graphs.drop_low_bit(managed)
            managed.low_bit_choice = None
        else:
            candidates = self._with_low_bit(managed, settings, call, candidates)
        return candidates if settings.attention == EXACT_ATTENTION else with_sage(candidates, call)

    def _candidates(self, settings: Settings, call: UNetCall, waits_for_compile: bool) -> backends.Candidates:
        device, operators = call.latent.device, self._operators
        candidates = backends.candidates(settings.backend, device, operators.why_not_native)
        if settings.backend != backends.ONEFLOW:
            return candidates
        # They serve while OneFlow compiles. Our own kernels want their weights in another order.
        others = backends.candidates(backends.CUDAGRAPH, device, operators.why_not_native)
        return self._oneflow.candidates(settings, others, candidates, call, waits_for_compile)

    def _with_low_bit(
        self, managed: ManagedUNet, settings: Settings, call: UNetCall, found: backends.Candidates
    ) -> backends.Candidates:
        """The same, with products in eight bits to be tried first, or the reason why not."""
        if found.backends[0] != backends.NATIVE:
            other = found.reason or "another one was chosen"
            return found._replace(reason=f"Low-bit needs the native backend: {other}")
        beside, lacks = Lossy(settings.low_bit), dict[str, None]()
        wanted = [beside._replace(only=True), beside] if settings.low_bit_only else [beside]
        tried: list[Lossy] = []
        for lossy in wanted:
            lack = why_not_offloaded(managed, settings) if lossy.only else ""
            lack = lack or self._why_no_low_bit(managed, lossy, call) or ""
            if lack:
                lacks[lack] = None
            else:
                tried.append(lossy)
        return found._replace(reason="; ".join(lacks), lossy=tuple(tried))

    def _why_no_low_bit(self, managed: ManagedUNet, lossy: Lossy, call: UNetCall) -> str | None:
        if managed.no_room_for_low_bit:
            return NO_ROOM
        low_bit = self._operators.low_bit
        lack = low_bit.why_not(lossy.low_bit, call.latent.device, call.latent.dtype)
        return lack or low_bit.why_none_here(lossy, managed.bound.layout, call)


def with_sage(found: backends.Candidates, call: UNetCall) -> backends.Candidates:
    """The same, with self attention by SageAttention beside what is tried first, or the reason why not."""
    lack: str | None = f"{SAGE} needs the native backend"
    if found.backends[0] == backends.NATIVE:
        lack = why_no_sage(call.latent.device, call.latent.dtype)
    if lack is not None:
        return found._replace(reason="; ".join(filter(None, (found.reason, lack))))
    first, *_ = (*found.lossy, EXACT)
    return found._replace(lossy=(first._replace(attention=SAGE), *found.lossy))


def why_not_offloaded(managed: ManagedUNet, settings: Settings) -> str:
    """Why the GPU holds the weights in the model's type too, in one line; "" where nothing stands in the way."""
    if settings.second_gpu != ONE_GPU:
        return "Low-bit only is for one GPU"
    bound = managed.bound
    if not bound.offloaded and bound.offloaded.come_and_go:
        return "Low-bit only rests for half a minute: others use the weights in the model's type again and again"
    return managed.why_not_offloaded or bound.host_traits.keeps_weights(bound.module)


def without_engines(
    candidates: backends.Candidates, kinds: tuple[str, ...], device: torch.device
) -> backends.Candidates:
    """Those that compute with weights which a host casts or changes at each use."""
    left = tuple(backend for backend in candidates.backends if backend in backends.ON_THE_FLY)
    if left and left[0] == candidates.backends[0]:
        return candidates
    plain = backends.CUDAGRAPH if device.type == "cuda" else backends.EAGER
    reason = f"the backend {candidates.backends[0]} does not compute with {' and '.join(kinds)}"
    return backends.Candidates(left or (plain,), reason)
