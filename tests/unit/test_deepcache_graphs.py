"""Graphs of both halves: one address for the deep feature, whoever writes and reads it, and its memory counted."""
from __future__ import annotations

import pytest
import torch
from builders import SMALL_XL
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE
from samplings import (  # noqa: F401
    STEPS,
    Rig,
    call_of,
    equal_distances,
    few_steps_suffice,
)

from lib_onediff.core.call import CACHED, FULL
from lib_onediff.core.table import Entry, State
from lib_onediff.families.unet import forward as compute
from lib_onediff.runtime.runtime import runtime


@pytest.fixture
def rig(pretended: PretendedGraphs) -> Rig:
    return Rig(SMALL_XL, runtime=runtime)


def entry(part: str) -> Entry:
    [found] = [entry for entry in runtime.table.entries() if (entry.key.part, entry.key.backend) == (part, NATIVE)]
    return found


def sample(rig: Rig, count: int = 8, prompts: tuple[tuple[str, ...], ...] = (("cat", "ugly"),)) -> list[str]:
    """The routes of a sampling, every answer of which is checked."""
    rig.begin(STEPS[:count])
    whole = {*range(0, count, 3), count - 1}
    routes = []
    for index, time in enumerate(STEPS[:count]):
        for names in prompts:
            rig.check(call_of(rig.unet, time, names, seed=id(rig) % 97), "+".join(names),
                      FULL if index in whole else CACHED)
            routes.append(runtime.call_stats.last_call.route)
    return routes


def test_both_halves_are_captured_and_replayed(rig: Rig, pretended: PretendedGraphs) -> None:
    assert sample(rig) == ["plain", "plain", "graph", "plain", "graph", "graph", "graph", "graph"]
    assert [entry(part).state for part in (FULL, CACHED)] == [State.READY] * 2
    assert len(pretended.captured) == 2
    for _ in range(3):
        assert set(sample(rig)) == {"graph"}
    assert len(pretended.captured) == 2


def test_other_weights_in_mid_sampling_make_the_next_call_of_each_prompt_full(
    rig: Rig, pretended: PretendedGraphs
) -> None:
    """The first of them finds the change out; the other's feature is as old."""
    prompts = (("cat",), ("ugly",))
    for _ in range(2):
        sample(rig, prompts=prompts)
    assert len(pretended.captured) == 2, "prompts in calls of their own share the graphs"
    rig.begin(STEPS[:8])
    for index, half in enumerate([FULL, CACHED, FULL, FULL, CACHED]):
        if index == 2:
            for unet in (rig.unet, rig.oracle.unet):
                with torch.no_grad():
                    unet.get_submodule("mid_block.resnets.0.conv1").weight.mul_(1.5)
        for names in prompts:
            rig.check(call_of(rig.unet, STEPS[index], names), names[0], half)
    assert runtime.call_stats.last_call.route == "graph"


def test_pre_warming_makes_both_halves_ready(rig: Rig) -> None:
    with runtime.warming_up():
        for _ in range(3):
            rig.run(call_of(rig.unet, 500.0))
    assert [entry(part).state for part in (FULL, CACHED)] == [State.READY] * 2
    assert set(sample(rig)) == {"graph"}
    assert rig.reason == ""


def test_a_shallow_half_that_fails_leaves_the_full_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(compute, "cached_pass", broken)
    rig.begin(STEPS[:6])
    assert rig.sample(STEPS[:6]) == [FULL] * 6
    assert entry(CACHED).state is State.FAILED
    assert "cached pass failed: a kernel is missing" in rig.reason


def test_a_shallow_half_that_is_not_the_full_one_is_not_used(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compute.cached_pass
    monkeypatch.setattr(compute, "cached_pass", lambda *args: right(*args) * 1.01)
    rig.begin(STEPS[:4])
    assert rig.sample(STEPS[:4]) == [FULL] * 4
    assert "differs from the full one by 1.0e-02" in rig.reason
