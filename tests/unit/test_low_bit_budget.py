"""The error budget of low-bit (how far 8-bit layers may change the UNet's output): the measured errors of a checkpoint,
the classes of layers that stay out of 8 bits, and when they are measured again."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import generating, relative_error, served
from ladder_builders import StandInOperators, reason
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import EIGHT, EXACT, half_call, half_unet, served_by

import lib_onediff
from lib_onediff.core.leaves import CROSS_OUT, CROSS_QUERY, FEED_FORWARD_IN, FEED_FORWARD_OUT, SELF_OUT, SELF_QKV
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.backend_choice import LowBitRoute
from lib_onediff.runtime.low_bit_errors import BOTH, FIRST_HALF, MIDDLE, Choice
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.low_bit import (
    FP8,
    KINDS_OF,
)

CLASSES = (SELF_QKV, SELF_OUT, CROSS_QUERY, CROSS_OUT, FEED_FORWARD_IN, FEED_FORWARD_OUT)
@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in eight bits in each forward that was made to measure errors."""
    found: list[int] = []
    real = LowBitRoute._output

    def output(self: LowBitRoute, network: Any, lossy: Any, call: UNetCall, layers: Any) -> Tensor:
        found.append(len(layers))
        return real(self, network, lossy, call, layers)

    monkeypatch.setattr(LowBitRoute, "_output", output)
    return found


@torch.no_grad()
def with_outliers(unet: nn.Module, end: str, norms: float = 1.0) -> nn.Module:
    """Make the weights of one input a hundred times larger in the layers whose names end so; under a common scale, the
    other weights then lose precision. norms: a factor for norms, so that two checkpoints differ."""
    for name, parameter in unet.named_parameters():
        if name.endswith(end):
            parameter[:, 0] *= 100
        elif name.endswith("norm1.weight"):
            parameter *= norms
    return unet


def compiled(unet: nn.Module, option: str = "int8", budget: float = 0.02) -> Any:
    return lib_onediff.compile_unet(unet, low_bit=option, low_bit_budget=budget)


def found() -> dict[str, Any]:
    """The measured errors of the only checkpoint, from the status."""
    [errors] = lib_onediff.status()["low_bit"]
    return errors


def classes_in_eight_bits() -> set[str]:
    """The classes of layers that are chosen for 8 bits, from the status."""
    return {one["name"] for one in found()["classes"] if one["is_used"]}


def classes_kept(unet: nn.Module) -> set[str]:
    """The classes of layers of the present 8-bit weights."""
    network = runtime.services.networks.get(unet)
    classes = runtime.devices.lossy.low_bit.classes(network.bound.layout)
    return set() if network.low_bit is None else {classes[name] for name in network.low_bit.names()}


def exact(unet: nn.Module, call: UNetCall) -> Tensor:
    """The output by our own exact operators."""
    with generating(runtime, Settings(low_bit="off")):
        return served(unet, call)


# --- measurements, and classes that are left out ----------------------------------------------------------------------


def test_a_layer_class_with_outliers_stays_out_of_8_bits_and_the_rest_is_within_the_budget(
    on_a_gpu: StandInOperators
) -> None:
    """The weights of the feed-forwards' output layers have outliers, which 8 bits represent badly. The error in the
    status is that of the output against our exact operators."""
    unet = compiled(with_outliers(half_unet(), "ff.net.2.weight"), budget=0.04)
    call = half_call(unet, timestep=300.0)
    output = served(unet, call)
    assert served_by()[0] == EIGHT, reason()
    errors = {one["name"]: one["error"] for one in found()["classes"]}
    assert list(errors) == list(CLASSES), "each class alone, in the order of a block"
    assert max(errors, key=lambda name: errors[name]) == FEED_FORWARD_OUT and errors[FEED_FORWARD_OUT] > 0.1
    assert classes_in_eight_bits() == set(CLASSES) - {FEED_FORWARD_OUT}
    assert classes_kept(unet) == classes_in_eight_bits(), "what is left out takes no memory"
    assert {one["kinds"] for one in found()["classes"]} == {"int8"}
    assert 0 < found()["error"] <= found()["budget"] == 0.04
    said = found()["error"]
    assert said == pytest.approx(relative_error(output, exact(unet, call)), rel=0.02), "as is measured here"


@pytest.mark.parametrize("option", KINDS_OF)
def test_the_error_of_the_whole_output_is_within_any_budget(on_a_gpu: StandInOperators, option: str) -> None:
    """Errors are relative to the output of our exact operators. If no class of layers is within the budget, these
    compute. A larger budget puts at least as many classes in 8 bits. option: a value of the setting low_bit."""
    last = 0
    for budget in (0.0, 0.005, 0.02, 0.05, 0.119):
        unet = compiled(half_unet(), option, budget)
        call = half_call(unet)
        output = served(unet, call)
        expected = exact(unet, call)
        served(unet, call)
        error = relative_error(output, expected)
        assert error <= 1.02 * budget, (budget, found())
        assert (served_by()[0] == EXACT) == (not classes_in_eight_bits())
        assert budget or "exceeds 'Low-bit error budget' (0)" in reason()
        assert bool(classes_in_eight_bits()) == bool(runtime.totals().low_bit)
        assert len(classes_in_eight_bits()) >= last, "more budget, more layers"
        last = len(classes_in_eight_bits())
    assert last == len(CLASSES)


# --- when classes are measured ----------------------------------------------------------------------------------------


def test_errors_are_measured_once_for_each_half_of_the_timesteps_at_the_first_call_in_that_half(
    on_a_gpu: StandInOperators, passes: list[int]
) -> None:
    """Errors differ between the two halves of a sampling. passes has an item for each of a measurement's eight
    forwards: without 8 bits, with each of the six classes alone, and with all."""
    unet = compiled(half_unet(), budget=0.1)
    counts = []
    for timestep in (981.0, 950.0, 700.0, 1000 * MIDDLE, 300.0, 250.0, 1.0):
        served(unet, half_call(unet, timestep=timestep))
        counts.append(len(passes))
    assert counts == [8, 8, 8, 16, 16, 16, 16]
    assert served_by() == (EIGHT, "graph"), reason()
    served(unet, half_call(unet, seed=1))
    assert len(passes) == 16


def test_the_second_measurement_can_exclude_more_layers_and_graphs_are_captured_again(
    on_a_gpu: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first half of the timesteps is measured, a class gets a large error, which the measurement of the
    second half finds."""
    unet = compiled(half_unet(), budget=0.1)
    call = None
    for _ in range(3):
        call = half_call(unet)
        served(unet, call)
    assert served_by() == (EIGHT, "graph") and classes_in_eight_bits() == set(CLASSES)
    real = LowBitRoute._output
    low_bit = runtime.devices.lossy.low_bit

    def output(self: LowBitRoute, network: Any, lossy: Any, call: UNetCall, layers: Any) -> Tensor:
        classes = low_bit.classes(network.bound.layout)
        bad = any(classes[layer] == CROSS_OUT for layer in layers)
        return real(self, network, lossy, call, layers) * (2 if bad else 1)

    monkeypatch.setattr(LowBitRoute, "_output", output)
    served(unet, half_call(unet, timestep=400.0))
    assert served_by() == (EIGHT, "plain"), "its graph had cross-attention out in eight bits"
    assert classes_in_eight_bits() == set(CLASSES) - {CROSS_OUT} == classes_kept(unet)
    served(unet, call)
    output_again = served(unet, call)
    assert served_by() == (EIGHT, "graph")
    assert relative_error(output_again, exact(unet, call)) <= 0.1


# --- when they are measured again -------------------------------------------------------------------------------------


def test_a_new_checkpoint_is_measured_and_a_new_lora_is_not(on_a_gpu: StandInOperators, passes: list[int]) -> None:
    """A checkpoint is recognised by its norms and biases, which a LoRA leaves as they are. A1111 loads another
    checkpoint into the same modules. When the first checkpoint is loaded again, its errors are still known."""
    unet = compiled(half_unet(), budget=0.1)
    served(unet, half_call(unet))
    first = found()
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if name.endswith(("to_q.weight", "net.2.weight")):
                parameter.add_(0.05 * torch.randn_like(parameter))
    served(unet, half_call(unet))
    assert len(passes) == 8 and found() == first, "a LoRA leaves norms and biases as they are"
    unet.load_state_dict(with_outliers(half_unet(), "ff.net.2.weight", norms=1.01).state_dict())
    call = half_call(unet)
    served(unet, call)
    assert len(passes) > 15, "A1111 loads another checkpoint into the same modules"
    assert FEED_FORWARD_OUT not in classes_in_eight_bits() and found() != first
    assert relative_error(served(unet, call), exact(unet, call)) <= 0.1
    unet.load_state_dict(half_unet().state_dict())
    count = len(passes)
    served(unet, half_call(unet))
    assert (len(passes), found()) == (count, first), "known from before"


def test_measured_errors_are_read_by_the_next_process(
    on_a_gpu: StandInOperators, passes: list[int], tmp_path: Any
) -> None:
    """Opening the cache folder again, with nothing in memory, stands for the next process. Errors that are purged from
    the disk are measured again."""
    runtime.open_cache(tmp_path)
    before = compiled(half_unet(), budget=0.1)
    call = half_call(before)
    served(before, call)
    served(before, half_call(before, timestep=300.0))
    first = found()
    lib_onediff.uncompile_unet(before)
    runtime.history.close()
    runtime.tuning_cache.clear()
    runtime.open_cache(tmp_path)
    unet = compiled(half_unet(), budget=0.1)
    served(unet, call)
    assert served_by()[0] == EIGHT and len(passes) == 16
    assert found() == first
    runtime.tuning_cache.clear()
    served(unet, call)
    assert len(passes) == 24, "what was purged from the disk is measured again"


# --- Choice alone -----------------------------------------------------------------------------------------------------


def a_choice(budget: float, found: Any = None, classes: str = "abc", **errors: float) -> Choice:
    """A Choice with one layer in each class. found: the content of the store. errors: measured errors of a class (a) or
    of several together (abc)."""
    layers = {name: name for name in classes}
    choice = Choice("a model", dict.fromkeys(layers, FP8), layers, budget, found)
    for names, error in errors.items():
        choice = choice.measured(tuple(names), FIRST_HALF, error)
    return choice


def test_the_error_of_classes_not_measured_together_is_estimated_as_if_they_were_independent() -> None:
    """Errors of 0.03 and 0.04 are estimated as 0.05 together. A measurement of the classes together replaces the
    estimate. A class that was never measured is chosen, so that it is measured."""
    known = {"a": 0.03, "b": 0.04, "c": 0.001}
    assert a_choice(0.051, **known).chosen == ("a", "b", "c") and a_choice(0.049, **known).chosen == ("a", "c")
    assert a_choice(0.02, **known).chosen == ("c",) and a_choice(0.0005, **known).chosen == ()
    assert a_choice(0.051, **known, abc=0.06).chosen == ("a", "c"), "what was measured counts"
    every = a_choice(0.051, **known, abc=0.06, classes="abcd")
    assert every.chosen == ("a", "b", "c", "d"), "what nobody has measured is to be measured"


@pytest.mark.parametrize("value", [
    "nonsense", 7, [], {"a": 0.1}, {"a": [0.1]}, {"a": ["x", {}]}, {"a": [float("nan"), {}]}, {"a": [0.1, {"b": "c"}]},
    {"a": [-1, {}]}, {"a": [2, {}]}, {"a": [0.1, {"b": 1.5}]},
])
def test_invalid_stored_errors_are_measured_again(value: Any) -> None:
    """value: what the store has in place of a checkpoint's errors; Choice describes valid ones."""
    choice = a_choice(0.1, value, "a")
    assert choice.error is None and choice.awaits == BOTH and choice.chosen == ("a",)
    choice = choice.measured(("a",), FIRST_HALF, 0.5)
    assert choice.error_of(("a",)) == 0.5 and choice.chosen == ()
