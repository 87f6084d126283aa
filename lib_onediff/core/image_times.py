"""How long the UNet took in an image, over all of its steps, and how long the host's own would have taken for them.

A step that computes less than the whole UNet (a cached pass of DeepCache, the prompt alone, a forecast) stands for a
whole one: what it saves is seen in the mean of all steps, beside the host's own time of whole ones.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from .call import CACHED
from .table import Stopwatch, ratio_of

# What a step computes; HOSTS: the host's own UNet did.
WHOLE, PROMPT_ALONE, FORECAST, HOSTS = "whole", "prompt alone", "forecast", "host"
KINDS = (WHOLE, CACHED, PROMPT_ALONE, FORECAST, HOSTS)


class Step(NamedTuple):
    """A call of the UNet. own: the times of such calls; host: those of the host's own in its place. None: unknown."""

    kind: str
    own: Stopwatch | None
    host: Stopwatch | None


class Times(NamedTuple):
    """Means over steps, in milliseconds; None where one of the steps was never timed. ratio: None too where a time
    stands on too few."""

    step_ms: float | None
    host_ms: float | None
    ratio: float | None


class ImageTimes:
    """Of one image, or of several that are made at once. seconds: what one took, everything included; host_seconds:
    what one like it took by the host's own UNet, with OneDiff off; None where nobody has measured it. places: the
    (model, resolution) of its calls."""

    def __init__(self) -> None:
        self.steps: Counter[Step] = Counter()
        self.seconds: float | None = None
        self.host_seconds: float | None = None
        self.places: set[tuple[str, str]] = set()

    @property
    def hosts(self) -> set[Stopwatch]:
        """Whose steps are in it."""
        return {step.host for step in self.steps.copy() if step.host is not None}

    def kinds(self) -> dict[str, int]:
        """How many steps computed what."""
        counts: Counter[str] = Counter()
        for step, count in self.steps.copy().items():
            counts[step.kind] += count
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def times(self, host: Stopwatch | None = None) -> Times:
        """Over all steps, or over those that stand for a host's."""
        steps = [(step, n) for step, n in self.steps.copy().items() if host is None or step.host is host]
        own, hosts = [(step.own, n) for step, n in steps], [(step.host, n) for step, n in steps]
        ratio = ratio_of(mean(own, attrgetter("settled_ms")), mean(hosts, attrgetter("settled_ms")))
        is_hosts = all(step.kind == HOSTS for step, _ in steps)
        return Times(
            mean(own, attrgetter("median_ms")), mean(hosts, attrgetter("median_ms")), None if is_hosts else ratio
        )


Parts = list[tuple["Stopwatch | None", int]]


def mean(parts: Parts, value: Callable[[Stopwatch], float | None]) -> float | None:
    """Of values of stopwatches, each as often as it is told; None where one is unknown."""
    values = [(None if stopwatch is None else value(stopwatch), count) for stopwatch, count in parts]
    known = [(found, count) for found, count in values if found is not None]
    if not known or len(known) < len(values):
        return None
    return sum(found * count for found, count in known) / sum(count for _, count in known)
