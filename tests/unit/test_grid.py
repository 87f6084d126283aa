"""The few cases that stand for all combinations on a CPU."""
from __future__ import annotations

from itertools import product

import pytest
from grid import cases

AXES = [
    [range(5), range(4), range(2)], [range(3), range(3)], [range(2), range(2), range(2)], [range(1), range(6)],
    [range(4), range(2)], [range(7)],
]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_value_of_every_axis_is_tested_and_nothing_twice(axes: list[range]) -> None:
    made = cases(*axes, whole=False)
    assert len(made) == len(set(made)) == max(map(len, axes))
    for values, tested in zip(axes, zip(*made, strict=True), strict=True):
        assert set(tested) == set(values)
    assert set(cases(*axes, whole=True)) == set(product(*axes))


def test_short_axes_do_not_go_in_step() -> None:
    assert {(first, second) for _, first, second in cases(range(4), range(2), range(2), whole=False)} > {(0, 0), (1, 1)}
