"""Which steps of a sampling are whole: tables that were searched on trained weights (schedules.json), and a rule for
networks without one.

`python -m lib_onediff.bench schedules` makes the tables. A sampling with another number of steps than theirs gets the
nearest one's schedule by position: where in the sampling the whole steps are close together, they are close together.
"""
from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

# See core.family.Family.schedule.
TRANSFORMER = "transformer"
SLOPE = 0.5
TABLES = Path(__file__).with_name("schedules.json")
# The DeepCache authors' exponent, and how their search for one that leaves as many different steps goes down.
POWER = 1.4
POWER_STEP = 0.02
ROUNDING = 1e-6


class Table(NamedTuple):
    """Of one kind of network. slope: how far the inner part's result is continued along the line through its last two,
    of the whole way: the line misses more the farther it goes. whole: the whole steps, by the number of all steps and
    of whole ones."""

    slope: float
    whole: dict[int, dict[int, tuple[int, ...]]]


@cache
def tables() -> dict[str, Table]:
    """By the kind of network; see core.family.Family.schedule."""
    found: dict[str, Table] = {}
    for kind, read in json.loads(TABLES.read_text(encoding="utf-8")).items():
        whole = {
            int(total): {len(indices): tuple(indices) for indices in schedules}
            for total, schedules in read["whole"].items()
        }
        found[kind] = Table(read["slope"], whole)
    return found


def slope_of(kind: str) -> float:
    """See Table.slope. Half of the way for networks without a table."""
    table = tables().get(kind)
    return SLOPE if table is None else table.slope


@lru_cache(maxsize=256)
def whole_steps(kind: str, total: int, interval: int) -> frozenset[int]:
    """The indices of the steps that compute the whole network, of so many: about one in interval, and one more. kind:
    of the network; one without a table has the rule of early, and the last step."""
    if interval <= 1:
        return frozenset(range(total))
    table = tables().get(kind)
    count = math.ceil(total / interval) + 1
    if table is None or not table.whole or count >= total:
        return early(total, interval) | {total - 1}
    nearest = min(table.whole, key=lambda steps: abs(math.log(steps / total)))
    schedules = table.whole[nearest]
    found = schedules[min(schedules, key=lambda known: abs(known / nearest - count / total))]
    return stretched(found, nearest, total, count)


def stretched(whole: tuple[int, ...], steps: int, total: int, count: int) -> frozenset[int]:
    """A schedule of so many steps for another number of them, total, and of whole ones, count: each whole step is as
    far into the sampling as between its neighbours in the schedule."""
    found: list[int] = []
    for number in range(count):
        position = number * (len(whole) - 1) / (count - 1)
        before = min(int(position), len(whole) - 2)
        index = whole[before] + (position - before) * (whole[before + 1] - whole[before])
        earliest = found[-1] + 1 if found else 0
        latest = total - count + number
        found.append(min(latest, max(earliest, round(index * (total - 1) / (steps - 1)))))
    return frozenset(found)


@lru_cache(maxsize=256)
def early(total: int, interval: int) -> frozenset[int]:
    """The whole steps of a sampling with total steps: as many as at equal distances, close together at the beginning
    and ever rarer. It is the DeepCache authors' non-uniform schedule with its center at the first step.

    Where the power would put two of them on one step, a smaller one is taken.
    """
    count = -(-total // interval)
    power = POWER
    while True:
        chosen = frozenset(math.trunc(total * (index / count) ** power + ROUNDING) for index in range(count))
        if len(chosen) == count:
            return chosen
        power = max(1.0, power - POWER_STEP)


def last_whole(whole: frozenset[int], index: int, before: bool = False) -> int:
    """The last whole step up to this one. before: without this one."""
    return max((one for one in whole if one <= index - before), default=0)
