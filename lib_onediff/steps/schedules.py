"""Which steps of a sampling are whole: tables that were searched on trained weights (schedules.json), and a rule for
networks without one.

`python -m lib_onediff.bench schedules` makes the tables. A sampling with another number of steps than theirs gets the
nearest one's schedule by position: where in the sampling the whole steps are close together, they are close together.
"""
from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# See core.family.Family.schedule.
TRANSFORMER = "transformer"
# Of networks without a schedule.
SLOPE = 0.5
# The DeepCache authors' exponent, and how their search for one that leaves as many different steps goes down.
POWER = 1.4
POWER_STEP = 0.02
ROUNDING = 1e-6


class Schedule(NamedTuple):
    """slope: how far the inner part's result is continued along the line through its last two, of the whole way: the
    line misses more the farther it goes. whole: the whole steps. steps: of how many."""

    slope: float
    whole: tuple[int, ...]
    steps: int

    @property
    def interval(self) -> int:
        """The interval that it was searched for."""
        return round(self.steps / len(self.whole))

    def count(self, total: int) -> int:
        """The number of whole steps of so many, with the schedule's share of them."""
        return round(total * len(self.whole) / self.steps)


def read_tables(path: Path) -> dict[str, list[Schedule]]:
    """The schedules of each kind of network in a file; see core.family.Family.schedule."""
    found: dict[str, list[Schedule]] = {}
    for kind, read in json.loads(path.read_text(encoding="utf-8")).items():
        found[kind] = [Schedule(one["slope"], tuple(one["whole"]), one["steps"]) for one in read]
    return found


# Read with this module: an update while the WebUI runs may bring a file of another form.
TABLES = read_tables(Path(__file__).with_name("schedules.json"))


def count_of(total: int, interval: int) -> int:
    """The number of whole steps of so many, where no schedule says: about one in interval, and one more."""
    return min(total, math.ceil(total / interval) + 1)


def nearest(kind: str, total: int, interval: int) -> Schedule | None:
    """The schedule of a kind of network whose number of steps is nearest, and among these the share of whole ones; of
    two that are as near, the one with more whole steps."""
    share = Fraction(count_of(total, interval), total)

    def distance(one: Schedule) -> tuple[Fraction, Fraction, int]:
        ratio = Fraction(max(one.steps, total), min(one.steps, total))
        return ratio, abs(Fraction(len(one.whole), one.steps) - share), -len(one.whole)

    return min(TABLES.get(kind, []), key=distance, default=None)


@lru_cache(maxsize=256)
def slope_of(kind: str, total: int, interval: int) -> float:
    """See Schedule; SLOPE for networks without any."""
    found = nearest(kind, total, interval)
    return SLOPE if found is None else found.slope


@lru_cache(maxsize=256)
def whole_steps(kind: str, total: int, interval: int) -> frozenset[int]:
    """The indices of the steps that compute the whole network, of so many. kind: of the network; one without a schedule
    has the rule of early, and the last step."""
    count = count_of(total, interval)
    if interval <= 1 or count >= total:
        return frozenset(range(total))
    found = nearest(kind, total, interval)
    if found is None:
        return early(total, interval) | {total - 1}
    if found.interval == interval:
        # With one whole step less than were searched, images of emoji-dit lost 2 dB.
        count = found.count(total)
    return stretched(found.whole, found.steps, total, count)


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
