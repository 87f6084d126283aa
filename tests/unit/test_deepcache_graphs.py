"""CUDA graphs of full and cached passes: the deep feature keeps its address, and its memory is counted."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import SMALL_XL, relative_error
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE
from samplings import (  # noqa: F401
    STEPS,
    Rig,
    call_of,
    equal_distances,
    few_steps_suffice,
)
from torch import nn

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
    """The routes of the calls of a sampling. Every output is checked."""
    rig.begin(STEPS[:count])
    whole = {*range(0, count, 3), count - 1}
    routes = []
    for index, time in enumerate(STEPS[:count]):
        for names in prompts:
            rig.check(call_of(rig.unet, time, names, seed=id(rig) % 97), "+".join(names),
                      FULL if index in whole else CACHED)
            routes.append(runtime.call_stats.last_call.route)
    return routes


def test_full_and_cached_passes_are_captured_and_replayed(rig: Rig, pretended: PretendedGraphs) -> None:
    """Within one sampling, each pass is computed, captured, and then replayed. A third capture would mean that the deep
    feature has moved. PretendedGraphs stand for CUDA's."""
    assert sample(rig) == ["plain", "plain", "graph", "plain", "graph", "graph", "graph", "graph"]
    assert [entry(part).state for part in (FULL, CACHED)] == [State.READY] * 2
    assert len(pretended.captured) == 2
    for _ in range(3):
        assert set(sample(rig)) == {"graph"}
    assert len(pretended.captured) == 2


READ_BY_BOTH = "conv_in"
READ_BY_WHOLE_PASSES = "mid_block.resnets.0.conv1"


@pytest.mark.parametrize(("path", "halves"), [
    (READ_BY_BOTH, [FULL, CACHED, FULL, FULL, CACHED]), (READ_BY_WHOLE_PASSES, [FULL, CACHED, CACHED, FULL, CACHED]),
])
def test_an_edit_takes_effect_at_once_in_the_outer_part_and_at_the_next_whole_step_elsewhere(
    rig: Rig, pretended: PretendedGraphs, path: str, halves: list[str]
) -> None:
    """The weights are edited before step 2, a cached one by its schedule. The outer part needs a full pass then; the
    inner one waits for step 3. With two prompts: the call of the first one notices the edit, and the other one's
    feature is outdated too."""
    prompts = (("cat",), ("ugly",))
    for _ in range(2):
        sample(rig, prompts=prompts)
    assert len(pretended.captured) == 2, "prompts in calls of their own share the graphs"
    rig.begin(STEPS[:8])
    for index, half in enumerate(halves):
        if index == 2:
            for unet in (rig.unet, rig.oracle.unet):
                with torch.no_grad():
                    unet.get_submodule(path).weight.mul_(1.5)
        for names in prompts:
            rig.check(call_of(rig.unet, STEPS[index], names), names[0], half)
    assert runtime.call_stats.last_call.route == "graph"


SHALLOW = "up_blocks.1.resnets.1"
DEEP = "mid_block.resnets.0"


def set_forward(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda x: 1.1 * forward(x)


def set_hook(layer: Any) -> None:
    layer.register_forward_hook(lambda layer, inputs, output: 1.1 * output)


def set_hook_of_inputs(layer: Any) -> None:
    layer.register_forward_pre_hook(lambda layer, inputs: (1.1 * inputs[0],))


@torch.no_grad()
def routes_and_last(rig: Rig, count: int, edit: Callable[[], None]) -> tuple[list[str], Any]:
    """The routes of the first steps of a sampling in which edit is called before the third; and the last output's
    relative error."""
    for _ in range(2):
        sample(rig)
    rig.begin(STEPS[:8])
    routes = []
    for index in range(count):
        if index == 2:
            edit()
        call = call_of(rig.unet, STEPS[index])
        output = rig.runtime.run(rig.unet, call, partial(rig.host, call))
        routes.append(runtime.call_stats.last_call.route)
    return routes, relative_error(output, rig.host(call))


@pytest.mark.parametrize("edit", [set_forward, set_hook, set_hook_of_inputs])
@pytest.mark.parametrize(("block", "routes"), [
    (SHALLOW, ["graph", "graph", "host"]), (DEEP, ["graph", "graph", "graph", "host"]),
])
def test_replaced_code_takes_effect_at_once_in_the_outer_part_and_at_the_next_whole_step_elsewhere(
    rig: Rig, block: str, routes: list[str], edit: Callable[[Any], None]
) -> None:
    """A function or hook is set before step 2, a cached one. The host computes calls with such code: at once where the
    cached pass runs the layer, else at step 3."""
    layer = rig.unet.get_submodule(f"{block}.conv1")
    assert routes_and_last(rig, len(routes), lambda: edit(layer)) == (routes, 0)


def test_replaced_code_of_a_module_that_both_parts_share_takes_effect_at_once(rig: Rig) -> None:
    """One Dropout is in a layer of the outer part and in one of the deep part."""
    shared = nn.Dropout(0.0)
    rig.unet.get_submodule("down_blocks.1.attentions.0.transformer_blocks.0.ff.net")[1] = shared
    rig.unet.get_submodule(SHALLOW).dropout = shared
    assert routes_and_last(rig, 3, lambda: set_forward(shared)) == (["graph", "graph", "host"], 0)


def test_pre_warming_makes_both_passes_ready(rig: Rig) -> None:
    """Three warm-up calls outside of a sampling suffice: every call of the next image is a replay."""
    with runtime.warming_up():
        for _ in range(3):
            rig.run(call_of(rig.unet, 500.0))
    assert [entry(part).state for part in (FULL, CACHED)] == [State.READY] * 2
    assert set(sample(rig)) == {"graph"}
    assert rig.reason == ""


def test_if_the_cached_pass_fails_full_passes_are_used(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(compute, "cached_pass", broken)
    rig.begin(STEPS[:6])
    assert rig.sample(STEPS[:6]) == [FULL] * 6
    assert entry(CACHED).state is State.FAILED
    assert "cached step failed: a kernel is missing" in rig.reason


def test_a_cached_pass_that_does_not_reproduce_the_full_pass_is_not_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compute.cached_pass
    monkeypatch.setattr(compute, "cached_pass", lambda *args: right(*args) * 1.01)
    rig.begin(STEPS[:4])
    assert rig.sample(STEPS[:4]) == [FULL] * 4
    assert "differs from the full one by a relative error of 1.0e-02" in rig.reason
