"""DeepCache with CUDA graphs, for which PretendedGraphs stand: full and cached passes are captured and replayed, edits
of weights and code take effect, and a faulty cached pass is not used. The outer part of the UNet is computed by both
passes, the inner part by full passes alone; steps count from 0, and the interval is 3."""
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
    evenly_spaced,
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
    """The routes of the calls of a sampling of `count` steps, whose outputs are compared with the oracle's. prompts:
    for each call of a step, the prompts of its rows."""
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
    """Within one sampling, each pass is computed without a graph, captured, and then replayed. A third capture would
    mean that the deep feature, which the full pass writes and the cached pass reads, has another address."""
    assert sample(rig) == ["plain", "plain", "graph", "plain", "graph", "graph", "graph", "graph"]
    assert [entry(part).state for part in (FULL, CACHED)] == [State.READY] * 2
    assert len(pretended.captured) == 2
    for _ in range(3):
        assert set(sample(rig)) == {"graph"}
    assert len(pretended.captured) == 2


READ_BY_BOTH = "conv_in"
READ_BY_FULL_PASSES = "mid_block.resnets.0.conv1"


@pytest.mark.parametrize(("path", "halves"), [
    (READ_BY_BOTH, [FULL, CACHED, FULL, FULL, CACHED]), (READ_BY_FULL_PASSES, [FULL, CACHED, CACHED, FULL, CACHED]),
])
def test_an_edited_weight_takes_effect_at_once_in_the_outer_part_else_at_the_next_full_pass(
    rig: Rig, pretended: PretendedGraphs, path: str, halves: list[str]
) -> None:
    """The weight of a layer (path) is edited before step 2, which would be a cached pass. An edit in the outer part
    makes step 2 a full pass; one in the inner part waits for step 3. Each prompt has a call of its own: the first
    prompt's call finds the edit, and the second prompt's feature is outdated too. halves: the passes of the steps."""
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
    """(the routes of the first `count` steps of a sampling, in which edit() is called before step 2; the relative error
    of the last output against the host's)."""
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
def test_replaced_code_takes_effect_at_once_in_the_outer_part_else_at_the_next_full_pass(
    rig: Rig, block: str, routes: list[str], edit: Callable[[Any], None]
) -> None:
    """Before step 2, which would be a cached pass, a forward or a hook is set on a layer of `block`. The host computes
    calls with such code, and the last output equals its own: at step 2 for a layer of the outer part (SHALLOW), at step
    3 for one of the inner part (DEEP). routes: the routes of the steps."""
    layer = rig.unet.get_submodule(f"{block}.conv1")
    assert routes_and_last(rig, len(routes), lambda: edit(layer)) == (routes, 0)


def test_replaced_code_of_a_module_that_both_parts_share_takes_effect_at_once(rig: Rig) -> None:
    """One Dropout object is in a layer of the outer part and in a layer of the inner part."""
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
    """The reason in the status has the error."""
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
    """With the feature of the same step, a cached pass must have the full pass's output. Here it is 1 % larger."""
    right = compute.cached_pass
    monkeypatch.setattr(compute, "cached_pass", lambda *args: right(*args) * 1.01)
    rig.begin(STEPS[:4])
    assert rig.sample(STEPS[:4]) == [FULL] * 4
    assert "differs too much from the full one (relative error 1.0e-02" in rig.reason
