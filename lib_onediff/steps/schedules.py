"""The steps of a sampling in which DeepCache computes the whole network (whole steps).

schedules.json has schedules that were searched on trained weights by `python -m lib_onediff.bench schedules`, for some
numbers of steps. A sampling with another number of steps takes the nearest schedule, stretched. Networks without a
searched schedule follow the DeepCache authors' rule.
"""
from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# The Family.schedule of transformers.
TRANSFORMER = "transformer"
# The slope of networks without a searched schedule; see Schedule.
SLOPE = 0.5
# The exponent of the DeepCache authors' non-uniform schedule. POWER_STEP: see early().
POWER = 1.4
POWER_STEP = 0.02
ROUNDING = 1e-6


class Schedule(NamedTuple):
    """The whole steps of a sampling.

    whole: their indices from 0, in ascending order.
    steps: the number of steps of the sampling.
    slope: the factor on the slope of the line by which the other steps extrapolate the deep feature; 0 reuses the last
        feature. Schedules with few whole steps have a smaller factor: the error of the line grows with the distance.
    """

    whole: tuple[int, ...]
    steps: int
    slope: float

    @property
    def interval(self) -> int:
        """The DeepCache interval for which a searched schedule is used."""
        return round(self.steps / len(self.whole))

    def last_whole(self, index: int, before: bool = False) -> int:
        """The last whole step up to a step. before: the last one before the step."""
        return max((one for one in self.whole if one <= index - before), default=0)

    def stretched(self, total: int, count: int) -> Schedule:
        """The schedule of a sampling with total steps, of which count are whole, from 2 to total. In each part of the
        sampling, its whole steps are as dense as here."""
        whole = self.whole
        found: list[int] = []
        for number in range(count):
            position = number * (len(whole) - 1) / (count - 1)
            before = min(int(position), len(whole) - 2)
            index = whole[before] + (position - before) * (whole[before + 1] - whole[before])
            earliest = found[-1] + 1 if found else 0
            latest = total - count + number
            found.append(min(latest, max(earliest, round(index * (total - 1) / (self.steps - 1)))))
        return Schedule(tuple(found), total, self.slope)


def read_tables(path: Path) -> dict[str, list[Schedule]]:
    """The searched schedules in a file, by Family.schedule."""
    found: dict[str, list[Schedule]] = {}
    for kind, schedules in json.loads(path.read_text(encoding="utf-8")).items():
        found[kind] = [Schedule(tuple(one["whole"]), one["steps"], one["slope"]) for one in schedules]
    return found


# Read at import: an update while the WebUI runs may replace the file by one in another format.
TABLES = read_tables(Path(__file__).with_name("schedules.json"))


@lru_cache(maxsize=256)
def schedule_for(kind: str, total: int, interval: int) -> Schedule:
    """The schedule of a sampling. kind: the network's Family.schedule. total: the number of steps. interval: the number
    of steps from one whole step to the next, in the mean; 1 makes every step whole."""
    found = nearest(kind, total, interval)
    slope = SLOPE if found is None else found.slope
    count = count_of(total, interval)
    if interval <= 1 or count >= total:
        return Schedule(tuple(range(total)), total, slope)
    if found is None:
        return Schedule(tuple(sorted(early(total, interval) | {total - 1})), total, slope)
    if found.interval == interval:
        # The searched share of whole steps. With one less of 32, images of emoji-dit lost 2 dB of PSNR.
        count = round(total * len(found.whole) / found.steps)
    return found.stretched(total, count)


def count_of(total: int, interval: int) -> int:
    """The number of whole steps where no schedule was searched for this interval. total: the number of all steps."""
    return min(total, math.ceil(total / interval) + 1)


def nearest(kind: str, total: int, interval: int) -> Schedule | None:
    """The searched schedule with the nearest number of steps; of several, the one with the nearest share of whole
    steps; then the one with more of them. None for a kind of network without schedules."""
    share = Fraction(count_of(total, interval), total)

    def distance(one: Schedule) -> tuple[Fraction, Fraction, int]:
        ratio = Fraction(max(one.steps, total), min(one.steps, total))
        return ratio, abs(Fraction(len(one.whole), one.steps) - share), -len(one.whole)

    return min(TABLES.get(kind, []), key=distance, default=None)


def early(total: int, interval: int) -> frozenset[int]:
    """Whole steps that are close together at the beginning of a sampling and rarer later: ceil(total / interval) of
    them. This is the DeepCache authors' non-uniform schedule (sample_from_quad_center) with its center at step 0.

    If their exponent puts two whole steps at the same index, it is lowered until all differ.
    """
    count = -(-total // interval)
    power = POWER
    while True:
        chosen = frozenset(math.trunc(total * (index / count) ** power + ROUNDING) for index in range(count))
        if len(chosen) == count:
            return chosen
        power = max(1.0, power - POWER_STEP)
