"""The search for the steps of a sampling that DeepCache computes completely, as full passes (whole steps): which steps
it caches first, and that DeepCache computes its trials."""
from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("diffusers")

from lib_onediff.bench import images, schedules
from lib_onediff.demo import EMOJI_DIT
from lib_onediff.public import compile_pipe, uncompile_pipe
from lib_onediff.runtime.runtime import runtime

# How much the score falls if a step is cached, for each step.
COSTS = [100.0, 9.0, 8.0, 1.0, 7.0, 2.0, 6.0, 3.0]
CPU = torch.device("cpu")


def test_the_search_for_full_passes_caches_the_cheapest_steps_first() -> None:
    """COSTS: how much the score falls if a step is cached. The search returns the best sets of six and of three full
    passes."""
    def score(whole: frozenset[int]) -> float:
        return -sum(cost for index, cost in enumerate(COSTS) if index not in whole)

    found = dict(schedules.searched(score, len(COSTS), (3, 6)))
    assert found == {6: frozenset({0, 1, 2, 4, 6, 7}), 3: frozenset({0, 1, 2})}


def test_full_passes_are_moved_by_one_step_until_no_move_raises_the_score() -> None:
    """The score is highest, 0, if the three full passes are at the wanted steps."""
    wanted = frozenset({0, 3, 6})

    def score(whole: frozenset[int]) -> float:
        return -sum(abs(one - other) for one, other in zip(sorted(whole), sorted(wanted), strict=True))

    assert schedules.moved(score, 8, frozenset({0, 2, 5})) == wanted


def test_the_trials_of_the_search_are_computed_by_deepcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a trial of 12 steps, 5 and 10 are cached: DeepCache counts ten full and two cached passes. Compared with the
    image of 12 full passes, the trial's image has a higher PSNR than the image with one full pass. Afterwards, the
    runtime has its own policies again."""
    monkeypatch.setattr(images, "SIDE", 64)
    pipe = images.load_model(EMOJI_DIT.name, torch.float32, CPU)
    policies = runtime.stepping.policies
    trial = schedules.Trial()
    with trial.in_place():
        compile_pipe(pipe, **schedules.OPTIONS)
        drawn = schedules.Images(trial, partial(images.draw, pipe, schedules.cases(1), 12), 12)
        [policy] = runtime.stepping.policies
        before = policy.status.copy()
        nearer = drawn.psnr(frozenset(range(12)) - {5, 10})
        assert (policy.status["full"] - before["full"], policy.status["cached"] - before["cached"]) == (10, 2)
        assert drawn.psnr(frozenset(range(12))) >= 80 > nearer > drawn.psnr(frozenset({0}))
        uncompile_pipe(pipe)
    assert trial.kind == "transformer" and runtime.stepping.policies is policies
