"""A verdict belongs to the weights and the code that it was found with, and a failure is final only the second time."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_unet
from ladder_builders import error
from torch import nn

import lib_onediff
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
WRONG_WEIGHT = 3.0


@pytest.fixture
def errs_with_loud_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our forward is wrong for some weights, as saturated attention in float16 is."""
    compute = FAMILIES.output

    def erring(layout: Any, weights: Any, ops: Any, call: Any) -> Any:
        output = compute(layout, weights, ops, call)
        loud = weights[layout.out_norm.path].weight.mean() > WRONG_WEIGHT / 2
        return output * 1.2 if loud else output

    monkeypatch.setattr(FAMILIES, "output", erring)


def checkpoint(loud: bool) -> Any:
    unet = diffusers_unet(**SMALL_XL)
    if loud:
        with torch.no_grad():
            unet.conv_norm_out.weight.fill_(WRONG_WEIGHT)
    return lib_onediff.compile_unet(unet)


def route_of(unet: nn.Module, **change: Any) -> str:
    """The route of a call, whose output must be the host's."""
    assert error(unet, replace(a_call(unet), **change)) < CLOSE
    return str(runtime.status()["route"])


def test_a_checkpoint_loaded_into_the_same_module_is_checked_anew(errs_with_loud_weights: None) -> None:
    """Our forward is wrong for one of the two checkpoints (the fixture), which have the same architecture and so the
    same shape's entry."""
    unet = checkpoint(False)
    other = checkpoint(True)
    before = {name: one.clone() for name, one in unet.state_dict().items()}
    read = runtime.services.families.read
    assert read(unet).architecture == read(other).architecture
    for _ in range(2):
        assert (route_of(other), route_of(unet)) == ("host", "plain")
    with torch.no_grad():
        unet.conv_norm_out.weight.fill_(WRONG_WEIGHT)
    assert route_of(unet) == "host" and "differs from the model's own" in runtime.status()["reason"]
    unet.load_state_dict(before)
    assert route_of(unet) == "plain"


@pytest.mark.parametrize(("name", "stays"), [("where_it_lies", True), ("how_it_computes", False)])
def test_a_verdict_survives_an_attribute_by_which_the_host_notes_a_move_of_weights(name: str, stays: bool) -> None:
    """placed: the attributes that a host declares to be such notes. Another new attribute may change what the module
    computes, so that the weights' identity is another."""
    unet = checkpoint(False)
    network = runtime.services.networks.get(unet)
    network.bound.host_traits = replace(network.bound.host_traits, placed=frozenset({"where_it_lies"}))
    route_of(unet)
    before = network.bound.identity()
    setattr(unet.conv_in, name, True)
    unet.conv_in.weight.data = unet.conv_in.weight.data.clone()
    assert route_of(unet) == "plain"
    assert (network.bound.identity() == before) is stays


def test_a_check_with_the_noise_of_a_warm_up_is_repeated_with_a_users_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our forward is wrong for large prompt embeddings alone, which noise has not."""
    compute = FAMILIES.output

    def erring(layout: Any, weights: Any, ops: Any, call: Any) -> Any:
        output = compute(layout, weights, ops, call)
        return output * 1.2 if call.context.abs().max() > 50 else output

    monkeypatch.setattr(FAMILIES, "output", erring)
    unet = checkpoint(False)
    with runtime.warming_up():
        assert route_of(unet) == "plain"
    assert route_of(unet, context=100 * a_call(unet).context) == "host"


class Transient:
    """Lets our forward fail so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self._compute = FAMILIES.output
        self.left = times
        monkeypatch.setattr(FAMILIES, "output", self)

    def __call__(self, *given: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("bad weather")
        return self._compute(*given)


def test_after_one_failure_our_forward_is_tried_again_in_the_next_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    unet = checkpoint(False)
    Transient(monkeypatch, 1)
    with lib_onediff.sampling(unet):
        assert [route_of(unet) for _ in range(3)] == ["host"] * 3
        assert "bad weather" in runtime.status()["reason"]
    with lib_onediff.sampling(unet):
        assert [route_of(unet) for _ in range(2)] == ["plain"] * 2


def test_after_two_failures_these_weights_are_the_hosts_until_they_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the same architecture with other values are ours."""
    unet = checkpoint(False)
    other = checkpoint(False)
    with torch.no_grad():
        other.conv_in.weight.mul_(1.5)
    weather = Transient(monkeypatch, 2)
    assert [route_of(unet) for _ in range(4)] == ["host"] * 4 and not weather.left
    assert route_of(other) == "plain"
    lib_onediff.uncompile_unet(unet)
    assert route_of(lib_onediff.compile_unet(unet)) == "plain"
