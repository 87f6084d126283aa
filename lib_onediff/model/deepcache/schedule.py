"""Which steps of a sampling compute the whole UNet: many at the beginning, where an image takes shape, ever fewer
later; at equal distances where the number of steps is not known (measured in .readme/deepcache.md)."""
from __future__ import annotations

import math
from functools import lru_cache

from .options import DeepCacheOptions
from .timeline import Step

# The authors' exponent, and how their search for one that leaves as many different steps goes down.
POWER, POWER_STEP = 1.4, 0.02
ROUNDING = 1e-6


def is_whole(choice: DeepCacheOptions, step: Step) -> bool:
    """Whether this step computes the whole UNet. The first and the last step always do."""
    if choice.interval <= 1 or step.index == 0 or step.is_last:
        return True
    if step.total is not None:
        return step.index in early(step.total, choice.interval)
    return step.index % choice.interval == 0


def last_whole(choice: DeepCacheOptions, step: Step) -> int:
    """The index of the last step, up to this one, that computes the whole UNet, as far as indices alone decide it:
    a deep feature that is older is too old for this step."""
    if is_whole(choice, step):
        return step.index
    if step.total is not None:
        whole = early(step.total, choice.interval)
        return max(index for index in whole if index <= step.index)
    return step.index - step.index % choice.interval


@lru_cache(maxsize=256)
def early(total: int, interval: int) -> frozenset[int]:
    """The whole steps of a sampling with total steps: as many as at equal distances, close together at the beginning
    and ever rarer. It is the DeepCache authors' non-uniform schedule with its center at the first step.

    Where the power would put two of them on one step, a smaller one is taken.
    """
    count, power = -(-total // interval), POWER
    while True:
        chosen = frozenset(math.trunc(total * (index / count) ** power + ROUNDING) for index in range(count))
        if len(chosen) == count:
            return chosen
        power = max(1.0, power - POWER_STEP)
