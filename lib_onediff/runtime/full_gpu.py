"""Decides what follows after a call of ours has run out of GPU memory: whether the host is asked to move weights, and
when such calls are tried again."""
from __future__ import annotations

import logging

from ..core.attempt import OUT_OF_MEMORY
from ..core.call import Call
from ..core.refusal import Refusal
from ..core.table import Entry
from ..weights.streaming import RING
from .card_route import ROOM_TO_SPARE
from .graphs.accounting import memory_of
from .network import Network
from .services import Services

log = logging.getLogger("onediff")
# Reasons, for users: of a call that ran out of memory when the host has then made room, and of a call that is not
# tried.
WEIGHTS_MOVED = (
    f"{OUT_OF_MEMORY}, and the WebUI has moved weights to main memory for it; OneDiff tries again at the next step"
)
NO_ROOM_YET = "the GPU memory was full at this size in this image: OneDiff tries again when more is free"


class FullGpu:
    """Frees our memory when a call of ours has run out of GPU memory, and refuses calls for which there is still no
    room. There is one FullGpu for all networks."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def refuse_call(self, network: Network, call: Call) -> None:
        """Raise Refusal if an earlier call of this signature has run out of GPU memory in this announced sampling, and
        not more memory can be allocated now. Frees nothing. Takes a tenth of a millisecond for such a signature, and
        nothing while none has run out of memory."""
        if not network.no_room:
            return
        full_with = network.no_room.get(call.signature)
        if full_with is None:
            return
        with self._services.lock:
            left = self._services.holdings.left(call.latent.device)
        if left <= full_with + ROOM_TO_SPARE:
            raise Refusal(NO_ROOM_YET)

    def note_served(self, network: Network, call: Call) -> None:
        """Note that OneDiff has served a call, so that calls of its signature are not refused."""
        if network.no_room:
            network.no_room.pop(call.signature, None)

    def relieve(self, network: Network, call: Call, tried: Entry | None) -> str:
        """Free all GPU memory of OneDiff after a call of ours has run out of it, and ask the host to move weights off
        the GPU if that alone cannot help. Returns the reason of this call for users.

        The next call of this signature is tried again if the host has moved weights. It is also tried again, once, if
        what was freed does not belong to such a call, such as graphs of other shapes. Otherwise, refuse_call() refuses
        such calls, so that they do not free everybody's graphs each time.

        tried: the entry that was tried last; None if the call failed before that, for example while weights were bound.
        Raises the host's exceptions while it moves weights.
        """
        services = self._services
        device = call.latent.device
        signature = call.signature
        with services.lock:
            # The buffers for streamed weights do not count as gained, because the next call allocates them again.
            had = services.holdings.left(device) + network.bound.bytes
            services.graphs.free()
            left = services.holdings.left(device)
            is_first = signature not in network.no_room
            has_freed = is_first and left > had + ROOM_TO_SPARE
            # Outside of samplings, nothing would end the refusals: each call is tried.
            if network.in_sampling:
                network.no_room[signature] = had if has_freed else left
            if has_freed:
                return OUT_OF_MEMORY
        # A warm-up belongs to no image. Inside of a replay, the graphs around this call read the weights.
        if services.is_warm_up or services.is_between_graphs:
            return OUT_OF_MEMORY
        asked = self._wanted(network, tried, left)
        if not network.make_room(asked):
            return OUT_OF_MEMORY
        log.info(
            "The GPU's memory is full: the WebUI moves %d MiB of weights to main memory for OneDiff. Images stay the "
            "same.", asked >> 20,
        )
        return WEIGHTS_MOVED

    def _wanted(self, network: Network, tried: Entry | None, left: int) -> int:
        """The bytes of weights that the host is asked to move. left: the bytes that can be allocated now.

        A streamed call needs the ring (RING), and the working memory of its forward. That is known if the shape was
        measured (Entry.needs). Before, only its first call can tell, which needs more than later ones, because it is
        compared with the host's forward. So the first amount is that of the ring, which is the most that a step of most
        networks takes as well, and each further one in the sampling is twice as large: 256, 512, 1024 MiB.
        """
        needs = 0 if tried is None else tried.needs
        lacking = RING + memory_of(needs) + ROOM_TO_SPARE - left
        return max(RING << network.asked_for_room, lacking)
