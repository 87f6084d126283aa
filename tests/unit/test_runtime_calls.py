"""Each call of a UNet is computed by the fastest route that works and was checked against the host. If OneDiff is off,
fails, or does not support the call, the host computes it.

Routes: "graph" (a replay), "plain" (our forward without a graph), "host" (the host's own forward).
"""
from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, generating, relative_error, served
from ladder_builders import error, reason, served_by
from torch import Tensor

import lib_onediff
from lib_onediff.core.settings import Settings
from lib_onediff.core.version import NEWEST_TORCH
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import Runtime, runtime
from lib_onediff.runtime.services import TRAINING
from lib_onediff.weights.scan import HostTraits


@torch.no_grad()
def host_runs(new_runtime: Runtime, unet: Any, call: UNetCall, traits: HostTraits | None = None) -> int:
    """The number of times that the host's forward runs for a call. The output must be close to the host's."""
    runs: list[Tensor] = []
    expected = diffusers_output(unet, call)
    output = new_runtime.run(unet, call, lambda: (runs.append(expected), expected)[1], traits)
    assert relative_error(output, expected) < 1e-5
    return len(runs)


@pytest.fixture
def new_runtime() -> Runtime:
    """A new Runtime, beside the process's own."""
    return Runtime()


@pytest.fixture
def adopted(new_runtime: Runtime) -> Any:
    unet = diffusers_unet()
    new_runtime.adopt(unet)
    return unet


@pytest.mark.parametrize("other", [{"height": 9}, {"width": 9}, {"batch": 1}, {"tokens": 154}], ids=str)
def test_only_the_first_call_of_each_shape_is_compared_with_the_host(
    new_runtime: Runtime, adopted: Any, other: dict[str, int]
) -> None:
    """other: what the second shape has other than the first. host_runs() returns how often the host's forward ran."""
    for change in ({}, other):
        assert host_runs(new_runtime, adopted, a_call(adopted, **change)) > 0
        for seed in range(2):
            assert host_runs(new_runtime, adopted, a_call(adopted, seed=seed, **change)) == 0
    assert len(new_runtime.table.entries()) == 2


def test_a_unet_that_was_not_adopted_or_was_released_is_computed_by_the_host(new_runtime: Runtime) -> None:
    """After its release, which may be repeated, each parameter has a storage of its own again: fused weights are
    undone."""
    unet = diffusers_unet()
    assert host_runs(new_runtime, unet, a_call(unet)) == 1
    assert new_runtime.status()["reason"] == "OneDiff is not switched on for this model"
    new_runtime.adopt(unet)
    host_runs(new_runtime, unet, a_call(unet))
    assert new_runtime.status()["route"] == "plain"
    for _ in range(2):
        new_runtime.release(unet)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in unet.parameters())
    assert host_runs(new_runtime, unet, a_call(unet)) == 1 and new_runtime.status()["route"] == "host"


@pytest.mark.usefixtures("host_timed_often")
def test_the_status_describes_the_last_call(new_runtime: Runtime, adopted: Any) -> None:
    """The status has no values before any call. After four, it has a ratio (host_ms / step_ms), which needs enough
    times of both the host and OneDiff."""
    status = new_runtime.status()
    assert (status["route"], status["model"], status["resolution"], status["step_ms"]) == (None, None, None, None)
    assert status["reason"] == "no image has been made yet" and set(status["calls"].values()) == {0}
    for number in range(4):
        # Of the first three calls, the first one was checked and not timed.
        assert new_runtime.status()["ratio"] is None, number
        host_runs(new_runtime, adopted, a_call(adopted, height=9, width=11))
    status = new_runtime.status()
    assert (status["enabled"], status["backend"], status["route"]) == (True, "eager", "plain")
    assert status["model"] == "SD 1.x UNet, small (prompt width 48)" and status["resolution"] == "88x72"
    assert status["reason"] == "CUDA graphs need an NVIDIA or AMD GPU, and this is the CPU"
    assert status["ratio"] == status["host_ms"] / status["step_ms"]
    assert status["relative_error"] < 1e-5
    assert status["calls"] == {"graph": 0, "plain": 4, "host": 0}
    assert json.dumps(status), "plain values"
    new_runtime.configure(Settings(backend="eager"))
    host_runs(new_runtime, adopted, a_call(adopted))
    assert new_runtime.status()["reason"] == "", "what was chosen by name needs no excuse"


def test_the_first_log_line_names_the_backend_and_why_no_faster_one_is_used(
    new_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also names the device and torch's version, and says whether OneDiff is off or this torch is untested."""
    here = f"on cpu with torch {torch.__version__}"
    reason = "CUDA graphs need an NVIDIA or AMD GPU, and this is the CPU"
    assert new_runtime.devices.start_line(Settings()) == f"eager is used {here}: {reason}"
    assert new_runtime.devices.start_line(Settings(enabled=False)) == f"switched off in the settings {here}"
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert f" torch 99.0 (newer than {NEWEST_TORCH}, the newest tested)" in new_runtime.devices.start_line(Settings())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert new_runtime.devices.start_line(Settings()).endswith(", and this is the MPS")


@pytest.mark.parametrize("how", ["configured", "its own", "for the run"])
def test_while_onediff_is_off_the_host_computes_the_call(new_runtime: Runtime, how: str) -> None:
    """how: OneDiff is off in the runtime's settings (configured), in this UNet's own, or for one image (the run).
    host_runs() returns how often the host's forward ran."""
    unet = diffusers_unet()
    off = Settings(enabled=False)
    new_runtime.adopt(unet, off if how == "its own" else None)
    if how == "configured":
        new_runtime.configure(off)
    with generating(new_runtime, off) if how == "for the run" else contextlib.nullcontext():
        assert host_runs(new_runtime, unet, a_call(unet)) == 1
    assert (new_runtime.status()["route"], new_runtime.status()["reason"]) == ("host", "OneDiff is switched off")


# --- faults and misfits -------------------------------------------------------------------------------------------


def route() -> str:
    """The route of the last call."""
    return served_by()[1]


@pytest.mark.parametrize("at", ["network_and_settings", "adopt"])
def test_a_fault_while_onediff_looks_a_unet_up_leaves_the_call_to_the_host_with_a_reason(
    new_runtime: Runtime, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """at: the method of Runtime that raises."""
    def fails(*arguments: Any, **named: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(new_runtime, at, fails)
    unet = diffusers_unet()
    assert host_runs(new_runtime, unet, a_call(unet), HostTraits()) == 1
    assert "a fault of OneDiff in looking a UNet up" in new_runtime.status()["reason"]


def test_a_call_that_records_gradients_is_computed_by_the_host_and_backward_works() -> None:
    """The next call, without gradients, is served by OneDiff."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    unet(call.latent, call.timestep, call.context).sample.sum().backward()
    assert unet.conv_in.weight.grad.abs().sum() > 0
    assert (route(), reason()) == ("host", TRAINING)
    served(unet, call)
    assert route() == "plain"


def test_a_call_under_autocast_does_not_fail_the_check_of_later_calls() -> None:
    """Under autocast the host rounds to bfloat16: a difference from its output there must not count against later calls
    without autocast, which OneDiff serves."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = served(unet, a_call(unet))
        assert output.dtype == diffusers_output(unet, a_call(unet)).dtype
    assert relative_error(output.float(), diffusers_output(unet, a_call(unet))) < 0.05
    served(unet, a_call(unet))
    assert route() == "plain", reason()


MISFITS: dict[str, Callable[[UNetCall], UNetCall]] = {
    "context width": lambda call: replace(call, context=torch.randn(2, 77, 31)),
    "no context": lambda call: replace(call, context=None),
    "latent channels": lambda call: replace(call, latent=torch.randn(2, 5, 8, 8)),
    "latent dimensions": lambda call: replace(call, latent=torch.randn(2, 8, 8)),
    "latent type": lambda call: replace(call, latent=call.latent.double()),
    "no y": lambda call: replace(call, y=None),
    "timestep batch": lambda call: replace(call, timestep=torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_inputs_that_do_not_fit_the_unet_raise_the_same_exception_as_without_onediff(
    misfit: Callable[[UNetCall], UNetCall]
) -> None:
    """misfit: makes one input of a valid call missing, or wrong in shape or dtype. The exception has the same type and
    text, and the next valid call is served by OneDiff."""
    unet = diffusers_unet(**SMALL_XL)
    call = misfit(a_call(unet))
    with pytest.raises((RuntimeError, ValueError, TypeError)) as expected:
        diffusers_output(unet, call)
    lib_onediff.compile_unet(unet)
    with pytest.raises(expected.type) as raised:
        served(unet, call)
    assert str(raised.value) == str(expected.value)
    served(unet, a_call(unet))
    assert route() == "plain", reason()


def test_two_unets_called_in_two_threads_give_outputs_close_to_their_own_forwards() -> None:
    """They have the same architecture and different weights. They share the two entries of the table of shapes, one for
    each size."""
    unets = [lib_onediff.compile_unet(diffusers_unet(seed)) for seed in (1, 2)]

    def worst(unet: Any) -> float:
        return max(error(unet, a_call(unet, 8, 8 + seed % 2, seed=seed)) for seed in range(6))

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(worst, unets)) < 1e-5
    assert len(runtime.table.entries()) == 2
