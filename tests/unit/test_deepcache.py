"""Full and cached passes of a UNet; which steps of a schedule are whole steps (those with a full pass); the step that a
timestep belongs to."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from builders import a_call, our_output, relative_error, shared_ldm_unet, shared_unet
from samplings import Oracle
from torch import Tensor, nn

from lib_onediff.core.refusal import Refusal
from lib_onediff.core.sampling import Position, Sampling, Solver, Step, Timeline
from lib_onediff.families.unet.call import Control, UNetCall
from lib_onediff.steps.schedules import TABLES, Schedule, authors_whole_steps, nearest_searched, schedule_for

SIZES = pytest.mark.parametrize("size", [(8, 8), (9, 11)], ids=["even", "odd"])
DEPTHS = [("SD1", depth) for depth in (1, 3, 4, 7, 11)] + [("SDXL", depth) for depth in (1, 3, 8)]


@SIZES
@pytest.mark.parametrize(("name", "depth"), DEPTHS)
def test_a_full_pass_equals_the_forward_and_a_cached_pass_with_its_deep_feature_repeats_it(
    name: str, depth: int, size: tuple[int, int]
) -> None:
    """Outputs are equal bit for bit. depth: how many outer input stages, and as many output stages, a cached pass
    computes. Oracle (samplings.py) makes our passes: whole() returns the output and the deep feature, shallow() the
    output from a given deep feature."""
    unet = shared_unet(name)
    cut = Oracle(unet, depth)
    call = a_call(unet, *size)
    output, deep = cut.whole(call)
    assert torch.equal(output, our_output(unet, call))
    assert torch.equal(cut.shallow(call, deep), output)


@torch.no_grad()
def outer_blocks_of_ldm(unet: nn.Module, call: UNetCall, depth: int, deep: Tensor) -> Tensor:
    """The output of ldm's own outer blocks, with a deep feature in place of the inner ones' output."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    embedding = unet.time_embed(timestep_embedding(call.timestep, unet.model_channels))
    image = call.latent
    skips = []
    for block in unet.input_blocks[:depth]:
        image = block(image, embedding, call.context)
        skips.append(image)
    image = deep
    for block in unet.output_blocks[-depth:]:
        skip = skips.pop()
        image = functional.interpolate(image, skip.shape[-2:], mode="nearest")
        image = block(torch.cat([image, skip], dim=1), embedding, call.context)
    return unet.out(image)


@SIZES
@pytest.mark.parametrize("depth", [1, 4, 11])
def test_a_cached_pass_is_close_to_the_outer_blocks_of_ldm_with_the_same_old_deep_feature(
    depth: int, size: tuple[int, int]
) -> None:
    """depth: the number of outer input blocks that are computed, and of outer output blocks. The deep feature, in place
    of the inner blocks' output, is from a call with another latent: a pass that computed it anew would have another
    output."""
    unet = shared_ldm_unet()
    cut = Oracle(unet, depth)
    call = a_call(unet, *size)
    _, stale = cut.whole(a_call(unet, *size, seed=1))
    output = cut.shallow(call, stale)
    assert relative_error(output, outer_blocks_of_ldm(unet, call, depth, stale)) < 1e-5
    assert relative_error(output, our_output(unet, call)) > 1e-2


def test_a_cached_pass_adds_the_controlnet_residuals_of_the_stages_that_it_computes() -> None:
    """Here, a ControlNet adds residuals to the first input stage and to the last output stage, both of which a cached
    pass computes."""
    unet = shared_unet("SD1")
    cut = Oracle(unet, 3)
    call = a_call(unet)
    first = torch.randn(2, 16, 8, 8)
    last = torch.randn(2, 16, 8, 8)
    controlled = replace(call, control=Control(input=(first,), output=(None,) * 11 + (last,)))
    output, deep = cut.whole(controlled)
    assert torch.equal(output, our_output(unet, controlled))
    assert torch.equal(cut.shallow(controlled, deep), output)
    assert relative_error(cut.shallow(call, deep), output) > 1e-3


def steps_of(times: list[float], known: list[float]) -> list[Step]:
    timeline = Timeline(known)
    return [timeline.step(time)[0] for time in times]


# The results of the authors' sample_from_quad_center for (steps, interval), with center 0 and power 1.4.
PUBLISHED = {
    (50, 5): [0, 1, 5, 9, 13, 18, 24, 30, 36, 43], (30, 3): [0, 1, 3, 5, 8, 11, 14, 18, 21, 25],
    (20, 3): [0, 1, 3, 6, 9, 12, 16],
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_without_a_searched_schedule_full_passes_are_at_the_published_steps_and_the_last_step(
    case: tuple[int, int],
) -> None:
    """PUBLISHED: the results of the DeepCache authors' own code for case, (steps, interval). The other steps reuse the
    deep feature of the last full pass (last_whole)."""
    total, interval = case
    assert sorted(authors_whole_steps(total, interval)) == PUBLISHED[case]
    schedule = schedule_for("no table", total, interval, 1)
    whole = schedule.whole
    assert list(whole) == sorted({*PUBLISHED[case], total - 1})
    for index in range(total):
        assert schedule.last_whole(index) == max(one for one in whole if one <= index)
        assert schedule.last_whole(index, before=True) == max((one for one in whole if one < index), default=0)


@pytest.mark.parametrize("kind", TABLES)
def test_a_searched_schedule_is_used_unchanged_for_its_steps_and_interval(kind: str) -> None:
    """TABLES: the schedules that a search found, by kind of network."""
    for one in TABLES[kind]:
        assert schedule_for(kind, one.schedule.steps, one.interval, max(1, one.least_depth)) == one.schedule


@pytest.mark.parametrize("kind", ["unet", "transformer"])
def test_every_schedule_begins_with_a_full_pass_and_has_no_more_than_the_interval_allows(kind: str) -> None:
    """With an interval of 1, all steps make a full pass. With a larger one, at most one step in `interval` does, and
    the last. A searched schedule may have as large a share of full passes as it was searched with."""
    for total in range(1, 61):
        assert schedule_for(kind, total, 1, 1).whole == tuple(range(total))
        for interval in range(2, 21):
            whole = schedule_for(kind, total, interval, 3).whole
            one = nearest_searched(kind, total, interval, 3)
            most = math.ceil(total / interval) + 1
            if one is not None and one.interval == interval:
                most = max(most, math.ceil(total * len(one.schedule.whole) / one.schedule.steps))
            assert whole[0] == 0 and list(whole) == sorted(set(whole)) and whole[-1] < total
            assert min(total, most) // 2 <= len(whole) <= min(total, most)


@pytest.mark.parametrize(("steps", "interval", "depth", "is_searched"), [
    (30, 3, 3, True), (50, 3, 4, True), (29, 3, 3, False), (30, 3, 2, False), (30, 2, 3, False), (30, 5, 3, False),
])
def test_the_searched_unet_schedule_needs_30_steps_interval_3_and_depth_3(
    steps: int, interval: int, depth: int, is_searched: bool
) -> None:
    """At least 30 steps and depth 3; otherwise, the DeepCache authors' schedule is used. On emoji-sd (the demo's small
    model), images were less close to exact ones with the searched schedule at 20 steps, and with its slope at depth 1
    and a CFG scale of 7."""
    authors = schedule_for("no table", steps, interval, depth)
    assert (schedule_for("unet", steps, interval, depth) != authors) is is_searched


@pytest.mark.parametrize("kind", TABLES)
def test_the_chosen_schedule_does_not_depend_on_the_order_of_the_schedules_in_their_file(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """schedules.json (TABLES) has the schedules that a search has found, in a list for each kind of network. kind: the
    kind of network."""
    cases = [(total, interval, 3) for total in range(1, 61) for interval in range(1, 21)]
    expected = [nearest_searched(kind, *case) for case in cases]
    monkeypatch.setitem(TABLES, kind, TABLES[kind][::-1])
    assert [nearest_searched(kind, *case) for case in cases] == expected


@pytest.mark.parametrize("total, interval, slope", [(30, 2, 0.75), (29, 2, 0.5), (10, 2, 0.5), (50, 3, 0.5)])
def test_cached_steps_extrapolate_with_a_larger_slope_only_at_interval_2_with_30_steps(
    total: int, interval: int, slope: float
) -> None:
    """slope: the share of the line through the last two deep features that a cached step follows; 0 reuses the last
    one. On emoji-sd with 10 steps, images with 0.75 were 1.8 dB less close to exact ones than with 0.5."""
    assert schedule_for("no table", total, interval, 1).slope == slope


@pytest.mark.parametrize(("solver", "cfg_scale", "slope"), [
    (Solver.FIRST_ORDER, 4.0, 0.75), (Solver.FIRST_ORDER, 5.0, 0.75), (Solver.FIRST_ORDER, 5.5, 0.25),
    (Solver.FIRST_ORDER, None, 0.25), (Solver.MULTISTEP, 4.0, 0.5), (Solver.MULTISTEP, 4.5, 0.0),
    (Solver.MULTISTEP, None, 0.0), (Solver.OTHER, 4.0, 0.0), (Solver.UNKNOWN, 4.0, 0.0),
], ids=str)
def test_the_slope_of_a_schedule_depends_on_the_solver_and_the_cfg_scale(
    solver: Solver, cfg_scale: float | None, slope: float
) -> None:
    """The schedule has the slope 0.75, and 0.25 above a CFG scale of 5 or if the scale is unknown (None). A multistep
    solver extrapolates up to a CFG scale of 4."""
    assert Schedule((0, 1), 2, 0.75, 0.25).slope_of(solver, cfg_scale) == slope


def test_the_deepcache_authors_schedule_has_as_many_full_passes_as_an_evenly_spaced_one() -> None:
    """Both have total / interval full passes, rounded up, the first of them at step 0."""
    for total in range(1, 61):
        for interval in range(2, 21):
            chosen = sorted(authors_whole_steps(total, interval))
            assert chosen[0] == 0 and chosen[-1] < total and len(chosen) == math.ceil(total / interval)


# --- steps by timesteps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "known", "indexes"), [
    ([900.0, 600.0, 600.0, 300.0, 300.0, 0.0, 0.0], [900.0, 600.0, 300.0, 0.0], [0, 1, 1, 2, 2, 3, 3]),
    ([900.0, 750.0, 600.0, 440.0, 300.0, 120.0, 0.0], [900.0, 600.0, 300.0, 0.0], [0, 0, 1, 1, 2, 2, 3]),
    ([999.0, 899.5, 800.0, 0.0], [999.0, 900.0, 800.0, 0.0], [0, 1, 2, 3]),
    ([999.0, 900.5, 800.0, 0.0], [999.0, 900.0, 800.0, 0.0], [0, 1, 2, 3]),
    ([400.0, 300.0, 200.0], [600.0, 500.0, 400.0, 300.0, 200.0], [0, 1, 2]),
], ids=["Heun", "DPM2", "rounded down", "rounded up", "img2img"])
def test_a_timestep_belongs_to_the_last_step_that_has_begun(
    times: list[float], known: list[float], indexes: list[int]
) -> None:
    """times: the timesteps of the calls. known: those of the schedule, one for each step; rounding may differ by half a
    timestep. indexes: the step of each call. Second-order samplers call the UNet twice in a step, also at timesteps
    between those of the schedule."""
    steps = steps_of(times, known)
    assert [step.index for step in steps] == indexes
    assert [step.is_last for step in steps] == [index == indexes[-1] for index in indexes]
    assert {step.total for step in steps} == {indexes[-1] + 1}


def test_a_larger_timestep_than_that_of_the_last_call_is_reported_as_a_jump_back() -> None:
    """Samplers with restarts, and a next image, go back to more noise."""
    timeline = Timeline([900.0, 600.0, 300.0, 0.0])
    jumps = [timeline.step(time)[1] for time in (900.0, 600.0, 600.0, 300.0, 900.0, 600.0)]
    assert jumps == [False, False, False, False, True, False]


def test_timesteps_in_another_unit_than_the_schedule_are_refused() -> None:
    """diffusers' pipelines of Cosmos and Anima call the network with timesteps from 1 to 0, while the schedule goes
    from 1000 to 80. 0.97 must not be taken for the schedule's end: Sampling.position raises Refusal, so that no step
    policy applies. With a schedule in the same unit, 0.97 is between the first two steps, and belongs to the first."""
    def position(time: float, times: list[float]) -> Position:
        return Sampling(times=lambda: times).position(torch.full((2,), time))

    times = [float(time) for time in range(1000, 80, -40)]
    with pytest.raises(Refusal, match="other timesteps"):
        position(0.97, times)
    assert position(1000.0, times).step.index == 0
    assert position(0.97, [time / 1000 for time in times]).step.index == 0
