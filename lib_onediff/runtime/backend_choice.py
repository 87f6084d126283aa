"""Which devices are tried for a call, and why not the others: by the settings, the machine and the model."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.call import Call
from ..core.device import Candidates
from ..core.key import EXACT, Lossy
from ..core.settings import SAGE, Settings
from ..devices.registry import AUTO
from .managed_unet import ManagedUNet
from .services import Services

NO_ROOM = "there is no GPU memory for the weights in eight bits, or to measure what they do"
NONE_IN_MAIN_MEMORY = "Low-bit only is for weights that wait in main memory, and all of these are on the GPU"
CHANGES_AT_EACH_CALL = "Low-bit rests: the WebUI applies something to the weights that may change at each call"
SAGE_ATTENTION = "SageAttention"


class BackendChoice:
    """Whoever calls holds the runtime's lock."""

    def __init__(self, services: Services) -> None:
        self._services, self._graphs, self._devices = services, services.graphs, services.devices

    def begin(self, managed: ManagedUNet, settings: Settings, call: Call) -> Candidates:
        """The devices to try for a call, with the binding made true for it.

        Raises Refusal where the host must run it. To be called in the host's modes: they decide what can be served.
        """
        device, budget = call.latent.device, settings.memory_budget
        candidates = self._devices.candidates(settings, device, call.latent.dtype, self._services.waits_for_compile)
        managed.bound.reader = self._devices.contents_reader(device)
        managed.bound.refresh(
            call, candidates.devices[0].traits.channels_last, lambda: self._services.holdings.room(budget, device)
        )
        managed.refuse_call(call)
        applied = managed.bound.on_the_fly.applied
        if managed.kinds:
            candidates = self._that_cast(candidates, managed.kinds, settings, call)
        if settings.low_bit in ("off", SAGE):
            self._graphs.drop_low_bit(managed)
            managed.low_bit_choice = None
        elif applied is not None and not applied.lasting:
            self._graphs.drop_low_bit(managed)
            candidates = candidates._replace(reason=CHANGES_AT_EACH_CALL)
        else:
            candidates = self._with_low_bit(managed, settings, call, candidates)
        return with_sage(candidates, call) if settings.low_bit == SAGE else candidates

    def _that_cast(self, found: Candidates, kinds: tuple[str, ...], settings: Settings, call: Call) -> Candidates:
        """Those that compute with weights which a host casts or changes at each use."""
        first = found.devices[0]
        if first.traits.casts_weights:
            return found._replace(devices=tuple(one for one in found.devices if one.traits.casts_weights))
        others = self._devices.candidates(
            replace(settings, backend=AUTO), call.latent.device, call.latent.dtype, self._services.waits_for_compile
        ).devices
        left = tuple(one for one in others if one.traits.casts_weights and not one.traits.channels_last)
        return Candidates(left, f"the backend {first.name} does not compute with {' and '.join(kinds)}")

    def _with_low_bit(
        self, managed: ManagedUNet, settings: Settings, call: Call, found: Candidates
    ) -> Candidates:
        """The same, with products in eight bits to be tried first, or the reason why not."""
        if not found.devices[0].traits.takes_lossy:
            other = found.reason or "another one was chosen"
            return found._replace(reason=f"Low-bit needs the native backend: {other}")
        beside, lacks = Lossy(settings.low_bit), dict[str, None]()
        wanted = [beside._replace(only=True), beside] if settings.low_bit_only else [beside]
        tried: list[Lossy] = []
        for lossy in wanted:
            lack = NONE_IN_MAIN_MEMORY if lossy.only and not managed.bound.binding.away else ""
            lack = lack or self._why_no_low_bit(managed, lossy, call) or ""
            if lack:
                lacks[lack] = None
            else:
                tried.append(lossy)
        return found._replace(reason="; ".join(lacks), lossy=tuple(tried))

    def _why_no_low_bit(self, managed: ManagedUNet, lossy: Lossy, call: Call) -> str | None:
        if managed.no_room_for_low_bit:
            return NO_ROOM
        low_bit = self._devices.lossy.low_bit
        lack = low_bit.why_not(lossy.low_bit, call.latent.device, call.latent.dtype)
        return lack or low_bit.why_none_here(lossy, managed.bound.layout, call)


def with_sage(found: Candidates, call: Call) -> Candidates:
    """The same, with self attention by SageAttention beside what is tried first, or the reason why not."""
    first_device: Any = found.devices[0]
    lack: str | None = f"{SAGE_ATTENTION} needs the native backend"
    if first_device.traits.takes_lossy:
        lack = first_device.why_not_lossy(SAGE, call.latent.device, call.latent.dtype)
    if lack is not None:
        return found._replace(reason="; ".join(filter(None, (found.reason, lack))))
    first, *_ = (*found.lossy, EXACT)
    return found._replace(lossy=(first._replace(attention=SAGE_ATTENTION), *found.lossy))
