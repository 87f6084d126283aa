"""The GPUs of this machine: which of them computes a part of every call, and how many rows each one takes."""
from __future__ import annotations

import torch

from ..core.refusal import Refusal
from ..devices.cuda.graphs.device_memory import Card

AUTO = "auto"
NO_SECOND = "PyTorch sees one GPU alone"
GIBIBYTE = 2**30
# A share that is better by less is measured noise.
WORTH_MOVING = 0.97


def second_card(option: str, first: torch.device, needs: int, cards: Card) -> torch.device:
    """The GPU that option (settings.Settings.second_gpu) names beside the first, with room for needs bytes. Raises
    Refusal where there is none."""
    all_cards = cards.all()
    if first not in all_cards:
        raise Refusal(f"this UNet is on the {first.type.upper()}")
    others = [card for card in all_cards if card != first]
    if not others:
        raise Refusal(NO_SECOND)
    if option != AUTO:
        index = int(option)
        if index >= len(all_cards):
            raise Refusal(f"there is no GPU {index}: PyTorch sees {len(all_cards)}, 0 to {len(all_cards) - 1}")
        if all_cards[index] == first:
            raise Refusal(f"GPU {index} is the one that computes already")
        others = [all_cards[index]]
    rooms = [(card, cards.room(card)) for card in others]
    for card, room in rooms:
        if room >= needs:
            return card
    said = ", ".join(f"{card} has room for {max(0, room) / GIBIBYTE:.1f} GiB" for card, room in rooms)
    raise Refusal(f"the weights take {needs / GIBIBYTE:.1f} GiB, {said}")


def second_share(batch: int, first_ms: float | None = None, second_ms: float | None = None) -> int:
    """How many rows of a batch the second card computes, so that both are done soonest; 0 where the first is done
    sooner alone. Milliseconds are for one row; None: both are equally fast."""
    half = batch // 2
    if first_ms is None or second_ms is None:
        return half

    def takes(share: int) -> float:
        return max((batch - share) * first_ms, share * second_ms)

    best = min(range(batch), key=takes)
    return best if takes(best) < WORTH_MOVING * takes(half) else half
