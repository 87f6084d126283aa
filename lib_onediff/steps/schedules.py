"""The steps of a sampling in which DeepCache computes the whole network (whole steps).

schedules.json has schedules that were searched on trained weights by `python -m lib_onediff.bench schedules`, for some
numbers of steps. A sampling with another number of steps takes the nearest schedule that serves it, stretched. Other
samplings follow the DeepCache authors' rule.
"""
from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..core.sampling import Solver

# The Family.schedule of transformers.
TRANSFORMER = "transformer"
# The slope of samplings without a searched schedule; see Schedule.
SLOPE = 0.5
# The slope of such samplings at interval 2, from this number of steps on. On emoji-sd, at CFG scales of 4 and 7, it is
# 1.0 to 2.3 dB closer than SLOPE with 30 and 50 steps, and up to 3.1 dB less close with 10. At interval 3 and a CFG
# scale of 7, it is less close, except with the searched schedule and a depth of 3.
LARGER_SLOPE = 0.75
FEWEST_STEPS_FOR_IT = 30
# See Schedule.high_cfg_slope.
HIGH_CFG_SCALE = 5.0
# A multistep solver's largest slope, and the largest CFG scale at which it has one: it computes with differences of
# outputs, which amplify the error of the line, as high CFG scales do. All measured: .readme/measurements.md.
MULTISTEP_SLOPE = 0.5
MULTISTEP_CFG_SCALE = 4.0
# The exponent of the DeepCache authors' non-uniform schedule, and the step by which authors_whole_steps() lowers it.
POWER = 1.4
POWER_STEP = 0.02
# Added before a position is truncated to an index: a power that should be a whole number may lie just below it.
ROUNDING = 1e-6


class Schedule(NamedTuple):
    """The whole steps of a sampling.

    whole: their indices from 0, in ascending order.
    steps: the number of steps of the sampling.
    slope: the factor on the slope of the line by which the other steps extrapolate the deep feature; 0 reuses the last
        feature. Schedules with few whole steps have a smaller factor: the error of the line grows with the distance.
    high_cfg_slope: the factor at CFG scales above HIGH_CFG_SCALE, which amplify the error of the line.
    """

    whole: tuple[int, ...]
    steps: int
    slope: float
    high_cfg_slope: float

    def slope_of(self, solver: Solver, cfg_scale: float | None) -> float:
        """The factor on the slope in a sampling with this solver. cfg_scale: the sampling's CFG scale; an unknown one
        (None) counts as high. 0 for a solver whose features do not lie on a line."""
        scale = math.inf if cfg_scale is None else cfg_scale
        if solver is Solver.FIRST_ORDER:
            return self.high_cfg_slope if scale > HIGH_CFG_SCALE else self.slope
        if solver is Solver.MULTISTEP and scale <= MULTISTEP_CFG_SCALE:
            return min(self.slope, MULTISTEP_SLOPE)
        return 0.0

    def last_whole(self, index: int, before: bool = False) -> int:
        """The index of the last whole step that is not later than the step `index`; 0 if there is none. before: of the
        last whole step earlier than the step `index`."""
        return max((one for one in self.whole if one <= index - before), default=0)

    def stretched(self, total: int, count: int) -> Schedule:
        """A new schedule for a sampling with `total` steps, of which `count` are whole (2 <= count <= total). In each
        part of the sampling, its whole steps are as dense as here, and the slopes are the same."""
        whole = self.whole
        found: list[int] = []
        for number in range(count):
            position = number * (len(whole) - 1) / (count - 1)
            before = min(int(position), len(whole) - 2)
            index = whole[before] + (position - before) * (whole[before + 1] - whole[before])
            earliest = found[-1] + 1 if found else 0
            latest = total - count + number
            found.append(min(latest, max(earliest, round(index * (total - 1) / (self.steps - 1)))))
        return self._replace(whole=tuple(found), steps=total)


class Searched(NamedTuple):
    """A schedule that was searched on trained weights, and the samplings that may use it, stretched.

    interval: the setting (DeepCache interval) that it was searched for.
    serves_others: whether samplings with other intervals may use it as well.
    fewest_steps, least_depth: samplings with fewer steps, or with a smaller DeepCache depth, may not use it, because
        the schedule was less close there.
    """

    schedule: Schedule
    interval: int
    serves_others: bool
    fewest_steps: int
    least_depth: int

    def serves(self, total: int, interval: int, depth: int) -> bool:
        """Whether a sampling of `total` steps with this interval and this DeepCache depth may use the schedule."""
        if total < self.fewest_steps or depth < self.least_depth:
            return False
        return self.serves_others or interval == self.interval


def read_tables(path: Path) -> dict[str, list[Searched]]:
    """The searched schedules in a JSON file, as lists by the kind of network (Family.schedule)."""
    found: dict[str, list[Searched]] = {}
    for kind, schedules in json.loads(path.read_text(encoding="utf-8")).items():
        found[kind] = [
            Searched(
                Schedule(tuple(one["whole"]), one["steps"], one["slope"], one["high_cfg_slope"]), one["interval"],
                one["serves_others"], one["fewest_steps"], one["least_depth"],
            ) for one in schedules
        ]
    return found


# Read at import: an update while the WebUI runs may replace the file by one in another format.
TABLES = read_tables(Path(__file__).with_name("schedules.json"))


@lru_cache(maxsize=256)
def schedule_for(kind: str, total: int, interval: int, depth: int) -> Schedule:
    """The schedule of a sampling: the nearest searched one that may serve it, stretched; if there is none, the
    DeepCache authors' rule, with the last step whole too. Every step is whole with an interval of 1, and in a sampling
    of few steps (see whole_step_count). Computed once for the same arguments, because every call of a sampling needs
    it.

    kind: the network's Family.schedule. total: the number of steps. interval: the mean number of steps from one whole
    step to the next, as set by the user. depth: the DeepCache depth: how many stages or blocks cached steps compute.
    """
    found = nearest_searched(kind, total, interval, depth)
    slope = unsearched_slope(total, interval)
    count = whole_step_count(total, interval)
    if interval <= 1 or count >= total:
        return Schedule(tuple(range(total)), total, slope, slope)
    if found is None:
        return Schedule(tuple(sorted(authors_whole_steps(total, interval) | {total - 1})), total, slope, slope)
    searched = found.schedule
    if found.interval == interval:
        # The searched share of whole steps. With one less of 32, images of emoji-dit lost 2 dB of PSNR.
        count = round(total * len(searched.whole) / searched.steps)
    return searched.stretched(total, count)


def unsearched_slope(total: int, interval: int) -> float:
    """The slope of a sampling without a searched schedule. total, interval: see schedule_for."""
    return LARGER_SLOPE if interval == 2 and total >= FEWEST_STEPS_FOR_IT else SLOPE


def whole_step_count(total: int, interval: int) -> int:
    """The number of whole steps at an interval for which no schedule was searched: one for each interval, and the last
    step; at most `total`, the number of all steps."""
    return min(total, math.ceil(total / interval) + 1)


def nearest_searched(kind: str, total: int, interval: int, depth: int) -> Searched | None:
    """The searched schedule for this kind of network (Family.schedule) whose number of steps is nearest to `total`, by
    their ratio; of several, the one whose share of whole steps is nearest to that of whole_step_count(); of several
    again, the one with most whole steps. Not stretched. None if no searched schedule serves such samplings."""
    share = Fraction(whole_step_count(total, interval), total)

    def distance(one: Searched) -> tuple[Fraction, Fraction, int]:
        steps = one.schedule.steps
        count = len(one.schedule.whole)
        return Fraction(max(steps, total), min(steps, total)), abs(Fraction(count, steps) - share), -count

    serving = [one for one in TABLES.get(kind, []) if one.serves(total, interval, depth)]
    return min(serving, key=distance, default=None)


def authors_whole_steps(total: int, interval: int) -> frozenset[int]:
    """The indices of the whole steps by the DeepCache authors' non-uniform schedule (sample_from_quad_center) with its
    center at step 0: close together at the beginning of a sampling and rarer later, ceil(total / interval) of them.

    If the authors' exponent (POWER) puts two whole steps at the same index, it is lowered until all indices differ.
    """
    count = -(-total // interval)
    power = POWER
    while True:
        chosen = frozenset(math.trunc(total * (index / count) ** power + ROUNDING) for index in range(count))
        if len(chosen) == count:
            return chosen
        power = max(1.0, power - POWER_STEP)
