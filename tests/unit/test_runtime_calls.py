"""Each call takes the fastest route that works and is checked. After a fault of ours, the host's output is returned."""
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
from lib_onediff.weights.scan import HostTraits


@torch.no_grad()
def host_runs(new_runtime: Runtime, unet: Any, call: UNetCall, traits: HostTraits | None = None) -> int:
    """The number of times that the host's forward ran for a call, whose output must be the host's."""
    runs: list[Tensor] = []
    expected = diffusers_output(unet, call)
    output = new_runtime.run(unet, call, lambda: (runs.append(expected), expected)[1], traits)
    assert relative_error(output, expected) < 1e-5
    return len(runs)


@pytest.fixture
def new_runtime() -> Runtime:
    """A Runtime beside that of the process."""
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
    """host_runs() returns how often the host's forward ran."""
    for change in ({}, other):
        assert host_runs(new_runtime, adopted, a_call(adopted, **change)) > 0
        for seed in range(2):
            assert host_runs(new_runtime, adopted, a_call(adopted, seed=seed, **change)) == 0
    assert len(new_runtime.table.entries()) == 2


def test_a_unet_that_was_never_adopted_or_was_released_is_served_by_the_host(new_runtime: Runtime) -> None:
    """After its release, each parameter has memory of its own again."""
    unet = diffusers_unet()
    assert host_runs(new_runtime, unet, a_call(unet)) == 1
    assert new_runtime.status()["reason"] == "OneDiff is not switched on for this UNet"
    new_runtime.adopt(unet)
    host_runs(new_runtime, unet, a_call(unet))
    assert new_runtime.status()["route"] == "plain"
    for _ in range(2):
        new_runtime.release(unet)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in unet.parameters())
    assert host_runs(new_runtime, unet, a_call(unet)) == 1 and new_runtime.status()["route"] == "host"


@pytest.mark.usefixtures("host_timed_often")
def test_the_status_describes_the_last_call(new_runtime: Runtime, adopted: Any) -> None:
    """Its values before any call, and after four. A ratio needs times of the host and of ours."""
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


def test_the_first_log_line_names_the_backend_and_the_reason(
    new_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"on cpu with torch {torch.__version__}"
    reason = "CUDA graphs need an NVIDIA or AMD GPU, and this is the CPU"
    assert new_runtime.devices.start_line(Settings()) == f"eager is used {here}: {reason}"
    assert new_runtime.devices.start_line(Settings(enabled=False)) == f"switched off in the settings {here}"
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert f" torch 99.0 (newer than {NEWEST_TORCH}, the newest tested)" in new_runtime.devices.start_line(Settings())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert new_runtime.devices.start_line(Settings()).endswith(", and this is the MPS")


@pytest.mark.parametrize("how", ["configured", "its own", "for the run"])
def test_while_onediff_is_off_the_host_serves(new_runtime: Runtime, how: str) -> None:
    """Off in the runtime's settings, for this UNet, or for one image. host_runs() returns how often the host's forward
    ran."""
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
    return served_by()[1]


@pytest.mark.parametrize("at", ["network_and_settings", "adopt"])
def test_a_fault_in_finding_a_unets_network_leaves_the_call_to_the_host_with_a_reason(
    new_runtime: Runtime, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(new_runtime, at, fails)
    unet = diffusers_unet()
    assert host_runs(new_runtime, unet, a_call(unet), HostTraits()) == 1
    assert "a fault of OneDiff in looking a UNet up" in new_runtime.status()["reason"]


def test_a_call_that_records_gradients_is_computed_by_the_host_and_has_them() -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    unet(call.latent, call.timestep, call.context).sample.sum().backward()
    assert unet.conv_in.weight.grad.abs().sum() > 0
    assert (route(), reason()) == ("host", "PyTorch records gradients, as for training (use torch.inference_mode())")
    served(unet, call)
    assert route() == "plain"


def test_a_call_under_autocast_does_not_fail_the_check_of_later_calls() -> None:
    """Under autocast the host itself rounds to bfloat16, which says nothing about later calls."""
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
def test_inputs_of_wrong_shapes_raise_diffusers_own_exception(misfit: Callable[[UNetCall], UNetCall]) -> None:
    """Type and text are those without OneDiff, and the next valid call is served."""
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


def test_two_unets_in_two_threads_have_outputs_close_to_their_own() -> None:
    """Both have one architecture, and share the table's two entries, but no weights."""
    unets = [lib_onediff.compile_unet(diffusers_unet(seed)) for seed in (1, 2)]

    def worst(unet: Any) -> float:
        return max(error(unet, a_call(unet, 8, 8 + seed % 2, seed=seed)) for seed in range(6))

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(worst, unets)) < 1e-5
    assert len(runtime.table.entries()) == 2
