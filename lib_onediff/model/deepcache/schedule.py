"""Which steps of a sampling compute the whole UNet."""
from __future__ import annotations

import math
from functools import lru_cache

from .options import UNEVEN, DeepCacheOptions
from .timeline import Step

# How the authors' search for a power that leaves as many different steps goes down.
POWER_STEP = 0.02
ROUNDING = 1e-6


def is_whole(choice: DeepCacheOptions, step: Step) -> bool:
    """Whether this step computes the whole UNet. The first and the last step always do."""
    if choice.interval <= 1 or step.index == 0 or step.is_last:
        return True
    if not choice.start - ROUNDING <= step.fraction < choice.end + (choice.end >= 1) - ROUNDING:
        return True
    if choice.schedule == UNEVEN and step.total is not None:
        return step.index in uneven(step.total, choice.interval, choice.center, choice.power)
    return step.index % choice.interval == 0


def last_whole(choice: DeepCacheOptions, step: Step) -> int:
    """The index of the last step, up to this one, that computes the whole UNet, as far as indices alone decide it:
    a deep feature that is older is too old for this step."""
    if is_whole(choice, step):
        return step.index
    if choice.schedule == UNEVEN and step.total is not None:
        whole = uneven(step.total, choice.interval, choice.center, choice.power)
        return max(index for index in whole if index <= step.index)
    return step.index - step.index % choice.interval


@lru_cache(maxsize=256)
def uneven(total: int, interval: int, center: float, power: float) -> frozenset[int]:
    """The whole steps of a sampling with total steps: as many as with this interval, close together around center (a
    fraction of the steps) and the rarer away from it the larger power is: the authors' non-uniform schedule.

    Where so large a power would put several of them on one step, a smaller one is taken.
    """
    count, middle = -(-total // interval), round(center * total)
    best = frozenset({0})
    while power > 1:
        chosen = power_steps(total, count, middle, power)
        if len(chosen) == count:
            return chosen
        best = max(best, chosen, key=len)
        power -= POWER_STEP
    # None was found: with so few steps, they are spread evenly.
    even = frozenset(range(0, total, interval))
    return even if len(even) >= len(best) else best


def power_steps(total: int, count: int, middle: int, power: float) -> frozenset[int]:
    """count steps or fewer: roots of the distances of both ends from middle, the way between them in even parts, each
    raised again. The root of what lies before middle is complex; of the powers, as in the authors' code, the real part
    counts."""
    low, high = complex(-middle) ** (1 / power), complex(total - middle) ** (1 / power)
    places = [(low + (high - low) * index / count) ** power for index in range(count + 1)]
    offsets = sorted({math.trunc(place.real) for place in places})
    return frozenset({0, *(offset + middle for offset in offsets[1:-1])})
