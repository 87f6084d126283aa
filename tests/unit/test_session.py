"""Later calls of a sampling are replayed by plans (runtime/plan.py), which earlier calls have made; after a change
between two calls, no outdated plan is replayed."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    SMALL_XL,
    a_call,
    compute,
    diffusers_output,
    diffusers_unet,
    generating,
    relative_error,
)
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE
from torch import Tensor, nn

import lib_onediff
from lib_onediff import Settings
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.patch_points import MIDDLE, PatchPoints
from lib_onediff.runtime.backend_choice import BackendChoice
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import HostTraits

CLOSE = 1e-5
KEYS = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"


@pytest.fixture
def calls_without_plan(monkeypatch: pytest.MonkeyPatch, pretended: PretendedGraphs) -> list[UNetCall]:
    """The calls that were computed without a plan."""
    calls: list[UNetCall] = []
    begin = BackendChoice.begin

    def counting(self: BackendChoice, network: Any, settings: Settings, call: UNetCall) -> Any:
        calls.append(call)
        return begin(self, network, settings, call)

    monkeypatch.setattr(BackendChoice, "begin", counting)
    return calls


def run(unet: nn.Module, call: UNetCall, step: int = 0) -> tuple[str, float]:
    """The route of a call, and the error of its output against the host's own."""
    call = replace(call, latent=call.latent + 0.1 * step, timestep=call.timestep - step)
    with torch.no_grad():
        expected = diffusers_output(unet, call)
        output = runtime.run(unet, call, lambda: expected)
    return str(runtime.status()["route"]), relative_error(output, expected)


def ready(unet: nn.Module, call: UNetCall, of: Callable[[UNetCall], UNetCall] = lambda call: call) -> None:
    """Make three calls of a shape: the first is checked against the host, the second is captured, the third replays and
    makes a plan, which the next call uses. of: makes the call for each of them."""
    routes = [run(unet, of(call), step)[0] for step in range(3)]
    assert routes == ["plain", "plain", "graph"], runtime.status()["reason"]


def copied(call: UNetCall) -> UNetCall:
    """The same call with the prompt in new tensors."""
    return replace(call, context=call.context.clone(), y=None if call.y is None else call.y.clone())


@pytest.fixture
def unet() -> Any:
    return lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), backend=NATIVE)


def test_within_a_sampling_calls_with_the_prompt_in_new_tensors_are_replayed_by_the_plan(
    unet: Any, calls_without_plan: list[UNetCall]
) -> None:
    """The prompt may also have other values, as A1111's prompt syntax [a:b:0.5] gives it in the middle of a sampling.
    The first call of the next sampling has no plan. Outputs are compared with diffusers' own."""
    call = a_call(unet)
    runtime.begin_sampling(unet)
    ready(unet, call, copied)
    # Another prompt within the sampling, as [a:b:0.5] makes it, is computed in the same graph.
    for step in range(3, 7):
        other = replace(copied(call), context=call.context + step)
        route, error = run(unet, other, step)
        assert route == "graph" and error < CLOSE
    assert len(calls_without_plan) == 3
    runtime.begin_sampling(unet)
    run(unet, copied(call))
    assert len(calls_without_plan) == 4


def move(unet: nn.Module, call: UNetCall) -> UNetCall:
    """Replace a weight by one at another address, with other values."""
    weight = unet.get_submodule("conv_in").weight
    weight.data = weight.detach().clone() * 1.5
    return call


def edit_keys(unet: nn.Module, call: UNetCall) -> UNetCall:
    with torch.no_grad():
        unet.get_submodule(KEYS).weight.mul_(2.0)
    return call


def another_prompt(unet: nn.Module, call: UNetCall) -> UNetCall:
    return replace(call, context=call.context + 1.0)


def purge(unet: nn.Module, call: UNetCall) -> UNetCall:
    runtime.purge()
    return call


def other_settings(unet: nn.Module, call: UNetCall) -> UNetCall:
    lib_onediff.compile_unet(unet, backend=NATIVE, memory_budget=100)
    return call


# What happens between two calls, and whether the second one then has no plan.
CHANGES = {
    move: True, edit_keys: True, another_prompt: False, purge: True, other_settings: True,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_replay_computes_with_the_weights_prompt_and_settings_of_its_own_call(
    unet: Any, calls_without_plan: list[UNetCall], change: Callable[[nn.Module, UNetCall], UNetCall]
) -> None:
    """change: what happens between two calls; CHANGES: whether the second call then has no plan. The output is compared
    with the host's after the change."""
    call = a_call(unet)
    ready(unet, call)
    run(unet, call, 3)
    assert len(calls_without_plan) == 3
    changed = change(unet, call)
    route, error = run(unet, changed, 4)
    assert route in ("plain", "graph") and error < CLOSE and len(calls_without_plan) == 3 + CHANGES[change]


def test_after_an_edit_every_shape_is_checked_against_the_host_again(
    unet: Any, calls_without_plan: list[UNetCall]
) -> None:
    """A check holds only for the weights that it was made with. A call of another shape is the first after the edit;
    the next call of the shape that had a plan is computed without a graph all the same."""
    call = a_call(unet)
    ready(unet, call)
    run(unet, call, 3)
    assert len(calls_without_plan) == 3
    edit_keys(unet, call)
    run(unet, a_call(unet, 16, 16), 4)
    assert len(calls_without_plan) == 4
    route, error = run(unet, call, 4)
    assert route == "plain" and error < CLOSE and len(calls_without_plan) == 5


def test_a_lora_of_another_strength_is_merged_before_the_replay(unet: Any, calls_without_plan: list[UNetCall]) -> None:
    """On A1111, the strength of a LoRA may change with the steps. A1111 merges the LoRA in its own forward, which a
    replay does not run, so that OneDiff asks for the merge (sync_lora) at each call. The output is compared with
    diffusers' own with the merged weights."""
    lora: dict[str, float] = {"wanted": 1.0, "merged": 1.0}

    def merge(layers: Any) -> None:
        with torch.no_grad():
            unet.get_submodule("conv_in").weight.mul_(lora["wanted"] / lora["merged"])
        lora["merged"] = lora["wanted"]

    lib_onediff.uncompile_unet(unet)
    traits = HostTraits(sync_lora=merge, wanted_lora=lambda: lora["wanted"])
    runtime.adopt(unet, Settings(backend=NATIVE), traits)
    call = a_call(unet)
    runtime.begin_sampling(unet)
    ready(unet, call, copied)
    run(unet, copied(call), 3)
    assert len(calls_without_plan) == 3
    lora["wanted"] = 1.5
    replayed = output_without_host(unet, copied(call))
    assert lora["merged"] == 1.5 and relative_error(replayed, diffusers_output(unet, call)) < CLOSE
    assert len(calls_without_plan) == 4


def output_without_host(unet: nn.Module, call: UNetCall) -> Tensor:
    """Our output for a call. Fails if the host computes."""
    with torch.no_grad():
        return runtime.run(unet, call, lambda: pytest.fail("the host has computed"))


@pytest.mark.parametrize("looks", [True, False], ids=["a page looks", "nobody looks"])
def test_after_an_unsupported_change_the_host_serves_even_if_a_page_has_read_the_unet_before(
    unet: Any, calls_without_plan: list[UNetCall], looks: bool
) -> None:
    """The change is a hook on a layer; once it is removed, OneDiff serves again. looks: a page or a pre-warm reads the
    layout between the change and the next call, which must still notice the change."""
    call = a_call(unet)
    ready(unet, call)
    hook = unet.get_submodule("conv_in").register_forward_hook(lambda module, given, output: 2 * output)
    for step in range(3, 5):
        if looks:
            with pytest.raises(Refusal, match="hook"):
                runtime.services.networks[unet].bound.layout_now()
        assert run(unet, call, step) == ("host", 0.0) and "hook" in runtime.status()["reason"]
    hook.remove()
    if looks:
        runtime.services.networks[unet].bound.layout_now()
    route, error = run(unet, call, 5)
    assert route in ("plain", "graph") and error < CLOSE


def test_a_generation_inside_another_has_its_own_settings(unet: Any, calls_without_plan: list[UNetCall]) -> None:
    """An extension that repairs faces makes such a generation while the image around the face is being made.
    Afterwards, the outer settings hold, and the outer generation's graph is replayed."""
    call = a_call(unet)
    ready(unet, call)
    with generating(runtime, Settings(enabled=False), "off for this face"):
        assert run(unet, call, 3)[0] == "host" and runtime.status()["reason"] == "off for this face"
    with generating(runtime, Settings(backend=NATIVE, memory_budget=100)):
        assert run(unet, call, 3)[1] < CLOSE
    route, error = run(unet, call, 4)
    assert route == "graph" and error < CLOSE


class Louder(PatchPoints):
    """A function of an extension that multiplies the output of the UNet's middle by 1.5."""

    structure = ("middle by somebody",)

    def has_function(self, point: str, *arguments: Any) -> bool:
        return point == "after_stage" and arguments[0] == MIDDLE

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        return hidden_states * 1.5 if part == MIDDLE else hidden_states


def test_calls_with_and_without_an_extensions_function_have_their_own_graphs(
    unet: Any, calls_without_plan: list[UNetCall]
) -> None:
    """Perturbed attention guidance makes calls of both kinds in each step. The output with the function is compared
    with that of torch's operators without a graph, and differs from that without the function."""
    call = a_call(unet)
    ready(unet, call)
    patched = replace(call, patches=Louder())
    bound = runtime.services.networks.get(unet).bound
    with torch.no_grad():
        expected = compute(bound.layout, bound.binding.weights(), torch_ops, patched)
    for route in ("plain", "plain", "graph", "graph"):
        assert run(unet, call, 3)[0] == "graph"
        with torch.no_grad():
            output = runtime.run(unet, patched, lambda: expected)
        assert runtime.status()["route"] == route, runtime.status()["reason"]
        assert relative_error(output, expected) < CLOSE
        assert relative_error(output, diffusers_output(unet, call)) > 1e-3
    assert len(calls_without_plan) == 7


def test_after_a_purge_no_plan_keeps_a_graph_alive(unet: Any, calls_without_plan: list[UNetCall]) -> None:
    call = a_call(unet)
    ready(unet, call)
    run(unet, call, 3)
    network = runtime.services.networks[unet]
    [plan] = network.plans.values()
    graph = weakref.ref(plan.runner)
    del plan
    runtime.purge()
    assert not network.plans and graph() is None


def test_a_sampling_begins_without_plans_but_with_the_graphs(unet: Any, calls_without_plan: list[UNetCall]) -> None:
    """The first call of a sampling has no plan, but finds the graph that was captured before, and replays it."""
    call = a_call(unet)
    runtime.begin_sampling(unet)
    ready(unet, call)
    run(unet, call, 3)
    assert len(calls_without_plan) == 3
    runtime.begin_sampling(unet)
    assert not runtime.services.networks[unet].plans
    assert run(unet, call, 4)[0] == "graph" and len(calls_without_plan) == 4


def test_a_replay_does_not_show_why_deepcache_was_inactive_for_another_unet(
    unet: Any, calls_without_plan: list[UNetCall]
) -> None:
    """DeepCache is on, but inactive for the other UNet. It is off for this one, so that the status has no reason."""
    call = a_call(unet)
    other = lib_onediff.compile_unet(diffusers_unet(seed=1), deepcache_interval=3)
    ready(unet, call)
    run(other, a_call(other))
    assert "is inactive" in runtime.status()["deepcache"]["reason"]
    assert run(unet, call, 3)[0] == "graph" and runtime.status()["deepcache"]["reason"] == ""
