"""If something fails during a call, the call is still computed once, by OneDiff or by the host; and the host's
own exceptions are raised unchanged."""
from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_arguments, diffusers_output, diffusers_unet, relative_error
from ladder_builders import reason, served_by
from own_forward import own_forward
from samplings import ON, STEPS, Rig, Samplings, few_steps_suffice  # noqa: F401
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.attempt import HostError, HostFunction, Outcome, attempted
from lib_onediff.core.policy import Answer
from lib_onediff.core.refusal import Refusal
from lib_onediff.families import registry
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.hosts.hooks import ClassPatch
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


def raises(error: BaseException) -> Callable[..., Any]:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fails


@pytest.mark.parametrize(("error", "outcome"), [
    (Refusal("not here"), Outcome.REFUSED), (OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY), (KeyError("ours"), Outcome.FAULT),
], ids=repr)
def test_attempted_classifies_an_exception_as_refusal_out_of_memory_or_fault(
    error: Exception, outcome: Outcome
) -> None:
    """outcome: the class of this exception in the result of attempted(). given() of that result raises the exception,
    or returns what the work has returned."""
    tried = attempted(raises(error))
    assert tried.outcome is outcome and (tried.fault is error) is (outcome is Outcome.FAULT)
    with pytest.raises(type(error)):
        tried.given()
    assert attempted(lambda: 3).given() == 3


@pytest.mark.parametrize(("error", "again"), [
    (Refusal("not here"), Refusal), (OUT_OF_MEMORY, torch.cuda.OutOfMemoryError), (KeyError("ours"), RuntimeError),
], ids=repr)
def test_a_failed_attempt_raises_its_exception_once_and_then_a_new_one_with_its_reason(
    error: Exception, again: type[Exception]
) -> None:
    """given() raises the exception itself at its first call only, and then drops it, because its frames hold tensors.
    again: the class of the exceptions that further calls raise."""
    tried = attempted(raises(error))
    with pytest.raises(type(error)):
        tried.given()
    for _ in range(2):
        with pytest.raises(again, match=re.escape(tried.reason)) as raised:
            tried.given()
        assert type(raised.value) is again and tried.error is None


@pytest.mark.parametrize("error", [ValueError("theirs"), OUT_OF_MEMORY, KeyboardInterrupt()], ids=repr)
def test_an_exception_of_the_host_passes_through_attempted_unchanged(error: BaseException) -> None:
    """A HostFunction raises it as a HostError, which attempted() lets pass and which holds the same exception object.
    Only with host_oom_is_ours does attempted() return the host's out-of-memory as an outcome."""
    host = HostFunction(raises(error))
    with pytest.raises(HostError) as passing:
        attempted(host)
    assert passing.value.as_raised() is error
    if passing.value.is_out_of_memory:
        assert attempted(host, host_oom_is_ours=True).outcome is Outcome.OUT_OF_MEMORY


def test_tensors_computed_before_a_fault_are_freed() -> None:
    """The host computes the call next, and needs the memory. One tensor is in a frame of the fault, the other in a
    frame of the exception that was being handled when the fault was raised."""
    tensors: list[Any] = []

    def handled() -> None:
        other = torch.zeros(8)
        tensors.append(weakref.ref(other))
        raise KeyError("first")

    def fails() -> None:
        big = torch.zeros(8)
        tensors.append(weakref.ref(big))
        try:
            handled()
        except KeyError:
            big.view(3)

    tried = attempted(fails)
    assert tried.fault is not None and [one() for one in tensors] == [None, None]
    assert tried.fault.__traceback__ is not None, "it can still be logged"


def test_an_exception_that_the_host_is_handling_keeps_its_local_variables() -> None:
    """attempted() clears the frames of our own fault only, although Python links the fault to the exception that is
    being handled (__context__)."""

    def host() -> None:
        frames.append("kept")
        raise ValueError("the host's")

    frames: list[Any] = []
    try:
        host()
    except ValueError as error:
        assert attempted(raises(KeyError("ours"))).fault is not None
        assert error.__traceback__.tb_next.tb_frame.f_locals["frames"] is frames


# --- step policies ----------------------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {**ON, "deepcache": {"deepcache_interval": 3}}


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_of_the_host_inside_a_step_policy_is_no_fault_of_the_policy(
    policy: str, error: BaseException, caplog: Any
) -> None:
    """The host's function, which a policy calls, raises. The caller gets that exception, the host is called once, and
    no fault is recorded."""
    rig = Rig(**{"deepcache_interval": 1, **POLICIES[policy]})
    rig.begin()
    runs: list[int] = []

    def host() -> Tensor:
        runs.append(1)
        raise error

    call = Samplings("guidance").call(STEPS[0])
    with pytest.raises(type(error)) as raised, torch.no_grad():
        rig.runtime.run(rig.unet, call, host)
    assert raised.value is error and len(runs) == 1
    assert rig.runtime.guard.faults == [] and "fault" not in rig.runtime.status()[policy]["reason"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("policy", ["forecast", "deepcache", "guidance"])
def test_a_fault_of_our_forward_inside_a_step_policy_is_not_recorded_for_the_policy(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy calls our forward for a step, and the choice of a backend fails. The host computes the call once, and
    the policy stays on."""
    rig = Rig(**{"deepcache_interval": 1, **POLICIES[policy]})
    rig.begin()
    monkeypatch.setattr(rig.runtime.by_card.choice, "begin", raises(IndexError("ours")))
    runs: list[Tensor] = []
    call = Samplings("guidance").call(STEPS[0])

    def host() -> Tensor:
        runs.append(diffusers_output(rig.unet, call))
        return runs[-1]

    with torch.no_grad():
        output = rig.runtime.run(rig.unet, call, host)
    assert len(runs) == 1 and torch.equal(output, diffusers_output(rig.unet, call))
    assert rig.runtime.guard.faults == ["a fault of OneDiff in the UNet's forward, please report it: ours"]
    assert "fault" not in rig.runtime.status()[policy]["reason"]


def test_if_a_step_policy_fails_after_our_forward_has_computed_the_call_its_output_is_returned(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy "forecast" raises after it has called our forward. Our forward is called once."""
    ours = Samplings("forecast")
    ours.begin()
    [policy] = [one for one in ours.runtime.stepping.policies if one.name == "forecast"]
    asked: list[int] = []

    def answerer(step_context: Any) -> Any:
        def answer(compute: Any) -> Answer:
            compute(step_context.call, step_context.host)
            raise IndexError("after it")

        return answer

    monkeypatch.setattr(policy, "answerer", answerer)
    forward = ours.runtime.by_card.answer
    monkeypatch.setattr(
        ours.runtime.by_card, "answer", lambda *args, **more: (asked.append(1), forward(*args, **more))[1]
    )
    call = ours.call(STEPS[0])
    with torch.no_grad():
        output = ours.runtime.run(ours.unet, call, lambda: diffusers_output(ours.unet, call))
    assert asked == [1] and relative_error(output, diffusers_output(ours.unet, call)) < CLOSE
    assert "after it" in ours.reason


# --- an existing answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("what", ["call_stats.note_served", "call_stats.count"])
def test_a_fault_in_the_statistics_of_a_call_does_not_lose_its_output(
    unet: nn.Module, replays: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """what: the function of the statistics that fails after the call was computed. replays: by a replay of a graph, or
    by our forward without one. The host must not compute the call again, and the fault is recorded."""
    given = diffusers_arguments(a_call(unet))
    with torch.no_grad():
        expected = own_forward(unet)(**given).sample
        for _ in range(3 if replays else 1):
            unet(**given)
        owner, name = what.split(".")
        monkeypatch.setattr(getattr(runtime, owner), name, raises(IndexError("no statistics")))
        monkeypatch.setattr(runtime.pressure, "run_host", raises(AssertionError("the host is not asked")))
        assert relative_error(unet(**given).sample, expected) < CLOSE
    assert runtime.guard.faults == ["a fault of OneDiff in counting a call, please report it: no statistics"]


def test_a_fault_in_preparing_a_graph_keeps_the_computed_output_and_is_recorded_once(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the output was computed, the capture of a CUDA graph runs out of memory (no fault), and making room for it
    on the GPU raises (a fault). Three calls: each gives its output, computed by our forward, and the only fault in the
    list at the end is that one, once."""
    given = diffusers_arguments(a_call(unet))
    monkeypatch.setattr(runtime.services.holdings.made, "prepare", raises(torch.cuda.OutOfMemoryError("full")))
    monkeypatch.setattr("lib_onediff.runtime.network.Network.make_room", raises(IndexError("no room")))
    with torch.no_grad():
        expected = own_forward(unet)(**given).sample
        for _ in range(3):
            assert relative_error(unet(**given).sample, expected) < CLOSE and served_by()[1] == "plain", reason()
    assert runtime.guard.faults == ["a fault of OneDiff in getting ready for later calls, please report it: no room"]


# --- reading a call ---------------------------------------------------------------------------------------------------


def test_a_fault_in_reading_the_arguments_leaves_the_call_to_the_host_and_is_logged_once(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """timestep_of_batch, which raises here, is a part of reading diffusers' arguments. Both outputs equal diffusers'
    own; the fault at the second call is not logged again."""
    given = diffusers_arguments(a_call(unet))
    monkeypatch.setattr(diffusers_host, "timestep_of_batch", raises(IndexError("ours")))
    sentence = "a fault of OneDiff in the UNet's forward, please report it: ours"
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(unet(**given).sample, own_forward(unet)(**given).sample)
            assert served_by()[1] == "host" and reason() == sentence and runtime.guard.faults == [sentence]
    assert sum(record.exc_info is not None for record in caplog.records) == 1, "once"


def test_arguments_that_diffusers_refuses_raise_the_exception_of_diffusers(
    unet: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Class and text of the exception are those of diffusers' own forward. No fault is recorded, although OneDiff
    failed to read these arguments too."""
    given: dict[str, Any] = diffusers_arguments(a_call(unet))
    for wrong in (
        {name: value for name, value in given.items() if name != "timestep"}, {**given, "nonsense": 1},
        {**given, "timestep": "noon"}, {**given, "added_cond_kwargs": 3}, {**given, "encoder_hidden_states": 3},
    ):
        with torch.no_grad(), pytest.raises(Exception) as expected:
            own_forward(unet)(**wrong)
        with torch.no_grad(), pytest.raises(expected.type) as raised:
            unet(**wrong)
        assert str(raised.value) == str(expected.value), wrong
        assert runtime.guard.faults == [] and "fault" not in reason()
    assert not [record for record in caplog.records if record.exc_info and record.levelname != "DEBUG"]


def test_a_patched_method_refuses_invalid_arguments_as_without_our_patch() -> None:
    """Python's TypeError names Owner.forward(), and does not mention the function that we have set in its place."""
    class Owner:
        def forward(self, x: int) -> int:
            return x + 1

    reasons: list[str] = []
    guard = runtime.guard
    guard.resume()
    patch = ClassPatch(
        Owner, "forward", lambda original, module, x: original(module, x), guard, "a method",
        lambda module, reason: reasons.append(reason),
    )
    patch.apply()
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError, match=r"Owner\.forward\(\)") as raised:
            Owner().forward(*wrong)
        assert "original" not in str(raised.value)
    assert Owner().forward(1) == 2
    assert guard.faults == [] and reasons == [] and not guard.suspended


def test_a_model_that_we_fail_to_read_runs_in_diffusers_and_the_fault_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Families.read, which reads a model's layers, raises. At the first call the status has the fault as its reason,
    and later that OneDiff has failed to read the model. Outputs equal diffusers' own."""
    unet = diffusers_unet()
    given = diffusers_arguments(a_call(unet))
    monkeypatch.setattr(registry.Families, "read", raises(TypeError("ours")))
    runtime.adopt(unet)
    diffusers_host.attach(unet)
    for number in range(3):
        with torch.no_grad():
            assert torch.equal(unet(**given).sample, own_forward(unet)(**given).sample)
        assert served_by()[1] == "host" and (number > 0 or reason() == runtime.guard.faults[0])
    assert runtime.guard.faults == ["a fault of OneDiff in the UNet's forward, please report it: ours"]
    assert reason() == "OneDiff has failed to read this model: ours"
    assert sum(record.exc_info is not None for record in caplog.records if record.levelname != "DEBUG") == 1
    lib_onediff.uncompile_unet(unet)
