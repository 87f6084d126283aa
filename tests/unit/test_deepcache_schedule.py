"""Which steps are whole, and which step a timestep belongs to."""
from __future__ import annotations

import math

import pytest

from lib_onediff.model.deepcache.options import DeepCacheOptions, depth_of
from lib_onediff.model.deepcache.schedule import early, is_whole, last_whole
from lib_onediff.model.deepcache.timeline import Step, timeline_of

KARRAS = (14.6, 9.5, 6.0, 3.6, 2.1, 1.1, 0.55, 0.24, 0.09, 0.03)


def steps_of(times: list[float], known: list[float] | None = None, count: int | None = None) -> list[Step]:
    timeline = timeline_of(known, count)
    return [timeline.step(time)[0] for time in times]


def whole(choice: DeepCacheOptions, total: int) -> list[int]:
    """The whole steps of a sampling whose host says where its steps begin."""
    times = [1000 - 1000 * index / total for index in range(total)]
    return [step.index for step in steps_of(times, times) if is_whole(choice, step)]


# What the authors' sample_from_quad_center gives for these (steps, interval) with center 0 and power 1.4.
PUBLISHED = {
    (50, 5): [0, 1, 5, 9, 13, 18, 24, 30, 36, 43], (30, 3): [0, 1, 3, 5, 8, 11, 14, 18, 21, 25],
    (20, 3): [0, 1, 3, 6, 9, 12, 16],
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_early_schedule_is_the_authors_with_its_center_at_the_first_step(case: tuple[int, int]) -> None:
    total, interval = case
    assert sorted(early(total, interval)) == PUBLISHED[case]
    assert whole(DeepCacheOptions(interval), total) == sorted({*PUBLISHED[case], total - 1})


def test_an_early_schedule_has_as_many_steps_as_the_uniform_one_and_each_gap_is_as_long_as_the_one_before() -> None:
    for total in range(1, 61):
        for interval in range(2, 21):
            chosen = sorted(early(total, interval))
            assert chosen[0] == 0 and chosen[-1] < total and len(chosen) == math.ceil(total / interval)
            gaps = [after - before for before, after in zip(chosen, chosen[1:], strict=False)]
            # Whole numbers of steps: a gap may be one shorter than the one before.
            assert all(after >= before - 1 for before, after in zip(gaps, gaps[1:], strict=False)), chosen


def test_where_the_number_of_steps_is_unknown_early_is_uniform() -> None:
    found = [step.index for step in steps_of([1000 - 50 * index for index in range(19)])
             if is_whole(DeepCacheOptions(4), step)]
    assert found[:5] == [0, 4, 8, 12, 16]


def test_a_feature_is_too_old_when_a_whole_step_has_come_between() -> None:
    steps = steps_of(list(range(20, 0, -1)), list(range(20, 0, -1)))
    expected = [0, 1, 1, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12, 12, 16, 16, 16, 19]
    assert [last_whole(DeepCacheOptions(3), step) for step in steps] == expected


# --- steps by timesteps -------------------------------------------------------------------------------------------


def test_heun_ends_a_step_where_the_next_one_begins() -> None:
    times = [900.0, 600.0, 600.0, 300.0, 300.0, 0.0, 0.0]
    for known in (None, sorted(set(times))):
        assert [step.index for step in steps_of(times, known)] == [0, 1, 1, 2, 2, 3, 3]


def test_a_call_between_two_steps_belongs_to_the_earlier_one() -> None:
    """DPM2 and DPM++ SDE call once more half way."""
    known = [900.0, 600.0, 300.0, 0.0]
    times = [900.0, 750.0, 600.0, 440.0, 300.0, 120.0, 0.0]
    steps = steps_of(times, known)
    assert [step.index for step in steps] == [0, 0, 1, 1, 2, 2, 3]
    assert [step.is_last for step in steps] == [False] * 6 + [True]
    assert {step.total for step in steps} == {4}


@pytest.mark.parametrize("middle", [900.0 + 1e-4, 900.0 - 1e-4, 899.5, 900.5])
def test_rounding_does_not_move_a_step(middle: float) -> None:
    steps = steps_of([999.0, middle, 800.0, 0.0], [999.0, 900.0, 800.0, 0.0])
    assert [step.index for step in steps] == [0, 1, 2, 3]


def test_img2img_begins_with_the_step_that_comes_first() -> None:
    known = [float(time) for time in range(950, -1, -50)]
    steps = steps_of(known[12:], known)
    assert [step.index for step in steps] == list(range(8))
    assert {step.total for step in steps} == {8}
    assert steps[0].fraction == 0 and steps[-1].is_last


def test_time_that_jumps_back_is_told() -> None:
    for known in (None, [900.0, 600.0, 300.0, 0.0]):
        timeline = timeline_of(known)
        jumps = [timeline.step(time)[1] for time in (900.0, 600.0, 600.0, 300.0, 900.0, 600.0)]
        assert jumps == [False, False, False, False, True, False]


@pytest.mark.parametrize("times", [
    [float(time) for time in range(951, 0, -50)],                      # leading
    [float(time) for time in range(999, 0, -50)],                      # trailing
    [999 - index * 999 / 19 for index in range(20)],                   # linspace
    [999.0, 949.0, 868.0, 740.0, 570.0, 380.0, 205.0, 80.0, 20.0, 0],  # Karras
    [max(0.0, 250 * math.log(sigma / KARRAS[-1])) / 1.55 for sigma in KARRAS],
], ids=["leading", "trailing", "linspace", "karras", "log"])
def test_the_last_step_is_never_missed_without_a_hosts_help(times: list[float]) -> None:
    steps = steps_of(times)
    assert steps[-1].is_last
    assert sum(step.is_last for step in steps) <= 4


def test_a_count_tells_the_last_step() -> None:
    steps = steps_of([999.0, 749.25, 499.5, 249.75], count=4)
    assert [step.is_last for step in steps] == [False, False, False, True]
    assert [step.fraction for step in steps] == [0, 0.25, 0.5, 0.75]


# --- depth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "block", "layers", "depth"), [
    (0, 0, 2, 2), (0, 1, 2, 3), (0, 2, 2, 4), (1, 0, 2, 5), (2, 1, 2, 9), (0, 0, 1, 2), (0, 1, 1, 3), (1, 0, 1, 4),
])
def test_onediffs_layer_and_block_as_a_depth(layer: int, block: int, layers: int, depth: int) -> None:
    assert depth_of(layer, block, layers) == depth


@pytest.mark.parametrize(("layer", "block"), [(-1, 0), (0, -1), (0, 3)])
def test_a_layer_that_is_none_is_refused(layer: int, block: int) -> None:
    with pytest.raises(ValueError, match="cache_layer_id is 0 or more and cache_block_id 0 to 2"):
        depth_of(layer, block)
