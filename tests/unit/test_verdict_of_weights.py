"""A verdict, the result of comparing our output with the host's, holds for the weights with which it was found, and a
failure of our forward is final only the second time."""
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
    """Our forward's output is wrong with the weights of checkpoint(loud=True), and right with others. (In reality,
    attention that saturates in float16 depends on weights in this way.)"""
    compute = FAMILIES.output

    def erring(layout: Any, weights: Any, ops: Any, call: Any) -> Any:
        output = compute(layout, weights, ops, call)
        loud = weights[layout.out_norm.path].weight.mean() > WRONG_WEIGHT / 2
        return output * 1.2 if loud else output

    monkeypatch.setattr(FAMILIES, "output", erring)


def checkpoint(loud: bool) -> Any:
    """A compiled UNet. loud: whether its last norm has weights with which errs_with_loud_weights errs."""
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
    """With the weights of one checkpoint, our forward is wrong (see the fixture), so the host computes its calls. Two
    checkpoints of the same architecture share the entry of a shape, but not the verdict. The same holds if one module
    gets other weights in place."""
    unet = checkpoint(False)
    other = checkpoint(True)
    before = {name: one.clone() for name, one in unet.state_dict().items()}
    read = runtime.services.families.read
    assert read(unet).architecture == read(other).architecture
    for _ in range(2):
        assert (route_of(other), route_of(unet)) == ("host", "plain")
    with torch.no_grad():
        unet.conv_norm_out.weight.fill_(WRONG_WEIGHT)
    assert route_of(unet) == "host" and "differs too much from the one without OneDiff" in runtime.status()["reason"]
    unet.load_state_dict(before)
    assert route_of(unet) == "plain"


@pytest.mark.parametrize(("name", "stays"), [("where_it_lies", True), ("how_it_computes", False)])
def test_a_new_attribute_of_a_module_ends_a_verdict_unless_it_only_tells_where_the_weights_are(
    name: str, stays: bool
) -> None:
    """host_traits.placed: the attributes with which a host notes where it keeps weights. Any other new attribute may
    change what the module computes, so the identity, under which the verdict is stored, changes. stays: whether the
    identity stays the same."""
    unet = checkpoint(False)
    network = runtime.services.networks.get(unet)
    network.bound.host_traits = replace(network.bound.host_traits, placed=frozenset({"where_it_lies"}))
    route_of(unet)
    before = network.bound.identity()
    setattr(unet.conv_in, name, True)
    unet.conv_in.weight.data = unet.conv_in.weight.data.clone()
    assert route_of(unet) == "plain"
    assert (network.bound.identity() == before) is stays


def test_a_check_with_the_noise_of_a_warm_up_is_repeated_with_the_prompt_of_a_user(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our forward is made wrong for large prompt embeddings. A warm-up's noise is small, so its check succeeds; that
    with the user's prompt must fail, and the host computes the call."""
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
    """Makes the next `times` calls of our forward raise an error. left: how many of them are to come."""

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
    """Until then the host computes the calls."""
    unet = checkpoint(False)
    Transient(monkeypatch, 1)
    with lib_onediff.sampling(unet):
        assert [route_of(unet) for _ in range(3)] == ["host"] * 3
        assert "bad weather" in runtime.status()["reason"]
    with lib_onediff.sampling(unet):
        assert [route_of(unet) for _ in range(2)] == ["plain"] * 2


def test_after_two_failures_the_host_computes_these_weights_until_they_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneDiff still computes a UNet of the same architecture with other weights."""
    unet = checkpoint(False)
    other = checkpoint(False)
    with torch.no_grad():
        other.conv_in.weight.mul_(1.5)
    weather = Transient(monkeypatch, 2)
    assert [route_of(unet) for _ in range(4)] == ["host"] * 4 and not weather.left
    assert route_of(other) == "plain"
    lib_onediff.uncompile_unet(unet)
    assert route_of(lib_onediff.compile_unet(unet)) == "plain"
