"""Searches the steps of a sampling that DeepCache should compute completely (whole steps), on trained weights. The
results are in steps/schedules.json.

A greedy search: it begins with all steps whole, and repeatedly makes the step cached that changes the images least.
Then it moves single whole steps by one if the images are closer to the exact ones. Each trial draws all images anew,
by the DeepCache policy itself.
"""
from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.refusal import Refusal
from ..demo import EMOJI_DIT, SHIPPED
from ..public import compile_pipe, uncompile_pipe
from ..runtime.runtime import runtime
from ..steps.deepcache import DeepCache
from ..steps.schedules import Schedule, whole_step_count
from .images import LOWEST, PROMPTS, draw, load_model
from .steps import DTYPES, Row

# Factors on the slope of the line that extrapolates the deep feature; see Schedule. The best one depends on the number
# of whole steps.
SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0)
INTERVALS = (2, 3, 4, 5)
# DeepCache at these settings; only its schedule is replaced. More layers in the cached steps were no nearer in the same
# time.
OPTIONS: dict[str, Any] = {"deepcache_interval": 2, "deepcache_depth": 1}
# The share of the images, the worst ones, that counts for half of a schedule's score.
WORST = 0.25
# Rounds of moving whole steps by one.
ROUNDS = 2
# The smallest mean squared difference that is told from none: a PSNR of 80 dB.
LEAST_ERROR = 1e-8

# The score of a set of whole steps, given by their indices; higher is better.
Score = Callable[[frozenset[int]], float]


class Trial:
    """The schedule that is being tried. DeepCache calls this object instead of schedule_for() of steps/schedules.py;
    the search sets `whole` and `slope` before each sampling.

    whole: the indices of the steps that are computed completely. slope: see Schedule in steps/schedules.py.
    kind: the network's Family.schedule, as DeepCache has passed it; "" before its first call.
    """

    def __init__(self) -> None:
        self.whole: frozenset[int] = frozenset()
        self.slope = 0.0
        self.kind = ""

    def __call__(self, kind: str, total: int, interval: int, depth: int) -> Schedule:
        """The schedule with `whole` and `slope`; `interval` and `depth` are not used. total: the number of steps of the
        sampling."""
        self.kind = kind
        return Schedule(tuple(sorted(self.whole)), total, self.slope, self.slope)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the runtime's only step policy is a DeepCache that uses this schedule."""
        before = runtime.stepping.policies
        runtime.stepping.policies = (DeepCache(self),)
        try:
            yield
        finally:
            runtime.stepping.policies = before


class Images:
    """Draws the images of some prompts with a trial's schedule, and compares them with the exact images, in which every
    step is whole. The exact images are drawn once, when this object is made."""

    def __init__(self, trial: Trial, draw_all: Callable[[], Tensor], steps: int) -> None:
        """draw_all: draws all images, (n, 3, height, width) from 0 to 1, with the trial's present schedule. steps: the
        number of steps of a sampling."""
        self._trial = trial
        self._draw = draw_all
        self._exact = self._drawn(frozenset(range(steps)))

    def psnr(self, whole: frozenset[int]) -> Tensor:
        """The PSNR of each image in decibels, (n,), with these steps whole; at most 80 (LEAST_ERROR). Draws all images.
        """
        error = (self._drawn(whole) - self._exact).square().flatten(1).mean(1)
        return -10 * error.clamp_min(LEAST_ERROR).log10()

    def score(self, whole: frozenset[int]) -> float:
        """The Score of these whole steps, in decibels: the mean of psnr() over all images, and its mean over the worst
        ones (WORST), averaged."""
        psnr = self.psnr(whole)
        worst = psnr.sort().values[:max(1, int(WORST * len(psnr)))]
        return float((psnr.mean() + worst.mean()) / 2)

    def _drawn(self, whole: frozenset[int]) -> Tensor:
        """All images, drawn with these steps whole: (n, 3, height, width) from 0 to 1. Sets the trial's `whole`."""
        self._trial.whole = whole
        return self._draw()


def searched(score_of: Score, steps: int, counts: Sequence[int]) -> Iterator[tuple[int, frozenset[int]]]:
    """The best whole steps that the search finds, as (count, indices of the whole steps) for each of `counts`, the
    largest first. Each search goes on from the result before. counts: from 1 to `steps`, the number of steps of a
    sampling."""
    whole = frozenset(range(steps))
    for count in sorted(counts, reverse=True):
        while len(whole) > count:
            whole = without_one(score_of, whole)
        whole = moved(score_of, steps, whole)
        yield count, whole


def without_one(score_of: Score, whole: frozenset[int]) -> frozenset[int]:
    """The whole steps except one: the one whose removal lowers the score least. Step 0 always remains."""
    return max((whole - {index} for index in sorted(whole - {0})), key=score_of)


def moved(score_of: Score, steps: int, whole: frozenset[int]) -> frozenset[int]:
    """The whole steps after each was moved to the step before or after it where that raises the score, at most ROUNDS
    times through all of them. Their number stays, and so does step 0. steps: the number of steps of a sampling."""
    best = score_of(whole)
    for _ in range(ROUNDS):
        before = whole
        for index in sorted(whole - {0}):
            for other in (index - 1, index + 1):
                if index not in whole or other in whole or not 0 < other < steps:
                    continue
                with_other = whole - {index} | {other}
                found = score_of(with_other)
                if found > best:
                    best = found
                    whole = with_other
        if whole == before:
            break
    return whole


def cases(count: int, for_test: bool = False) -> list[Row]:
    """`count` prompts in the form of images.held_out, each with a seed of its own. They are repeated if PROMPTS has too
    few. for_test: True for the test of the search's results, which has other prompts and seeds than the search."""
    every = json.loads(PROMPTS.read_text(encoding="utf-8"))
    known = every[1::2] if for_test else every[::2]
    first_seed = 1000 if for_test else 0
    return [{**known[number % len(known)], "seed": first_seed + number} for number in range(count)]


def tested(images: Images, whole: frozenset[int]) -> Row:
    """A part of a row: the median PSNR in decibels of images with these steps whole ("psnr_db"), and the 5 % quantile
    ("psnr_lowest_5")."""
    psnr = images.psnr(whole).sort().values.tolist()
    return {"psnr_db": psnr[len(psnr) // 2], "psnr_lowest_5": psnr[int(LOWEST * len(psnr))]}


def schedules(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `schedules`, for each model, slope of SLOPES and number of whole steps (--whole, by
    default those of INTERVALS): the indices of the whole steps in a sampling of --steps steps ("all_whole"), searched
    with the Euler sampler on --images prompts, and their PSNR on as many other prompts. Raises Refusal for a wrong
    --whole, and if a model cannot be loaded."""
    steps = options.steps
    counts = options.whole or [whole_step_count(steps, interval) for interval in INTERVALS]
    if not all(1 <= count <= steps for count in counts):
        raise Refusal(f"--whole takes numbers from 1 to {steps}, the number of steps")
    for name in options.model or (SHIPPED.name, EMOJI_DIT.name):
        pipe = load_model(name, DTYPES[options.dtype], device)
        trial = Trial()
        with trial.in_place():
            compile_pipe(pipe, **OPTIONS)
            # All at once: every trial is one sampling.
            draw_cases = partial(draw, pipe, steps=steps, guidance=options.guidance, at_once=options.images)
            with runtime.warming_up():
                draw_cases(cases(options.images))
            for slope in SLOPES:
                trial.slope = slope
                images = Images(trial, partial(draw_cases, cases(options.images)), steps)
                others = Images(trial, partial(draw_cases, cases(options.images, for_test=True)), steps)
                for count, whole in searched(images.score, steps, counts):
                    row = {"model": name, "kind": trial.kind, "steps": steps, "slope": slope, "whole": count}
                    yield {**row, **tested(others, whole), "all_whole": sorted(whole)}
            uncompile_pipe(pipe)
