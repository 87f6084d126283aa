"""Which steps of a sampling compute the whole network."""
from __future__ import annotations

import math
from functools import lru_cache

from ..core.timeline import Step

# The authors' exponent, and how their search for one that leaves as many different steps goes down.
POWER, POWER_STEP = 1.4, 0.02
ROUNDING = 1e-6


def is_whole(interval: int, step: Step) -> bool:
    """Whether this step computes the whole network: about one in interval. The first and the last step always do."""
    return last_whole(interval, step) == step.index


def last_whole(interval: int, step: Step) -> int:
    """The index of the last step, up to this one, that computes the whole network: what was kept before is too old for
    this step."""
    if interval <= 1 or step.is_last:
        return step.index
    return max(index for index in early(step.total, interval) if index <= step.index)


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
