"""The search for whole steps: which it leaves out, and that it imitates the step policy."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from lib_onediff.bench import schedules
from lib_onediff.steps.deepcache import FARTHEST, Line

# What it costs to leave each step out, in decibels.
COSTS = [100.0, 9.0, 8.0, 1.0, 7.0, 2.0, 6.0, 3.0]


class Priced:
    """Images that lose so much for each step that is left out."""

    def __init__(self) -> None:
        self.imitation = SimpleNamespace(steps=len(COSTS))

    def states(self, whole: frozenset[int]) -> list[Any]:
        return [None] * len(COSTS)

    def psnr(self, whole: frozenset[int], state: Any = None, start: int = 0) -> torch.Tensor:
        lost = sum(cost for index, cost in enumerate(COSTS) if index not in whole)
        return torch.full((4,), 200 - lost)


def test_the_steps_that_cost_least_are_left_out_first() -> None:
    images: Any = Priced()
    found = dict(schedules.searched(images, (3, 6)))
    assert found == {6: frozenset({0, 1, 2, 4, 6, 7}), 3: frozenset({0, 1, 2})}


@pytest.mark.parametrize("slope", [0.5, 1.0])
def test_its_forecast_is_the_policys(slope: float) -> None:
    line = Line()
    points = []
    for step in (0, 3, 5):
        tensor = torch.full((2,), float(step**2))
        line.note(step, tensor, 0)
        points.append((step, tensor))
    for step in (6, 7, 12):
        ours = schedules.forecast(tuple(points), step, slope)
        expected = line.at(step, slope, FARTHEST)
        assert expected is not None and torch.equal(ours, expected)
    assert torch.equal(schedules.forecast(tuple(points), 6, 0.0), points[-1][1])
