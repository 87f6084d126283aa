"""Which route a call takes, when it is checked, and what the status tells about it."""
from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error
from torch import Tensor

from lib_onediff.core.call import UNetCall
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.weights.scan import HostTraits


class Host:
    """The host's forward of one call, counted."""

    def __init__(self, unet: Any, call: UNetCall) -> None:
        self.unet, self.call, self.runs = unet, call, 0

    def __call__(self) -> Tensor:
        self.runs += 1
        return diffusers_output(self.unet, self.call)


@torch.no_grad()
def run(accelerator: Runtime, unet: Any, call: UNetCall) -> tuple[Tensor, int]:
    """(output, how often the host's forward ran for it)"""
    host = Host(unet, call)
    return accelerator.run(unet, call, host), host.runs


@pytest.fixture
def accelerator() -> Runtime:
    return Runtime()


@pytest.fixture
def adopted(accelerator: Runtime) -> Any:
    unet = diffusers_unet()
    accelerator.adopt(unet)
    return unet


def test_only_the_first_use_of_a_shape_is_checked(accelerator: Runtime, adopted: Any) -> None:
    call = a_call(adopted)
    expected = diffusers_output(adopted, call)
    first, checks = run(accelerator, adopted, call)
    assert checks > 0
    for _ in range(2):
        output, checks = run(accelerator, adopted, call)
        assert (checks, torch.equal(output, first)) == (0, True)
    assert relative_error(first, expected) < 1e-5


@pytest.mark.parametrize("other", [
    {"height": 9}, {"width": 9}, {"batch": 1}, {"tokens": 154},
], ids=str)
def test_every_new_shape_is_checked(accelerator: Runtime, adopted: Any, other: dict[str, int]) -> None:
    run(accelerator, adopted, a_call(adopted))
    assert run(accelerator, adopted, a_call(adopted, **other))[1] > 0
    assert len(accelerator.table.entries()) == 2


def test_a_unet_that_nobody_handed_over_is_the_hosts(accelerator: Runtime) -> None:
    unet = diffusers_unet()
    output, runs = run(accelerator, unet, a_call(unet))
    assert runs == 1 and torch.equal(output, diffusers_output(unet, a_call(unet)))
    assert accelerator.status()["reason"] == "this UNet was not handed to OneDiff"


def test_a_released_unet_is_the_hosts_again(accelerator: Runtime, adopted: Any) -> None:
    run(accelerator, adopted, a_call(adopted))
    accelerator.release(adopted)
    accelerator.release(adopted)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in adopted.parameters())
    run(accelerator, adopted, a_call(adopted))
    assert accelerator.status()["route"] == "host"


def test_the_hosts_own_error_is_the_hosts(accelerator: Runtime, adopted: Any) -> None:
    def broken() -> Tensor:
        raise LookupError("the host has a fault")

    with torch.no_grad(), pytest.raises(LookupError, match="the host has a fault"):
        accelerator.run(adopted, a_call(adopted), broken)


def test_status_starts_without_a_picture(accelerator: Runtime) -> None:
    status = accelerator.status()
    assert (status["route"], status["model"], status["resolution"], status["step_ms"]) == (None, None, None, None)
    assert status["reason"] == "no image has been made yet"
    assert status["calls"] == {"graph": 0, "plain": 0, "blocks": 0, "host": 0}


@pytest.mark.usefixtures("host_timed_often")
def test_status_tells_what_the_last_call_was(accelerator: Runtime, adopted: Any) -> None:
    for _ in range(3):
        run(accelerator, adopted, a_call(adopted, height=9, width=11))
    # Of the three, the first was checked and not timed.
    assert accelerator.status()["ratio"] is accelerator.status()["ratio_range"] is None
    run(accelerator, adopted, a_call(adopted, height=9, width=11))
    status = accelerator.status()
    assert (status["enabled"], status["backend"], status["route"]) == (True, "eager", "plain")
    assert status["model"] == "SD 1.x UNet, small (prompt width 48)"
    assert status["resolution"] == "88x72"
    assert status["reason"] == "CUDA graphs need an NVIDIA GPU; this UNet is on the CPU"
    assert status["step_ms"] > 0 and status["host_ms"] > 0
    assert status["ratio"] == status["host_ms"] / status["step_ms"]
    low, high = status["ratio_range"]
    assert low <= status["ratio"] <= high
    assert status["relative_error"] < 1e-5
    assert status["calls"] == {"graph": 0, "plain": 4, "blocks": 0, "host": 0}


def test_status_is_plain_values(accelerator: Runtime, adopted: Any) -> None:
    run(accelerator, adopted, a_call(adopted))
    assert json.loads(json.dumps(accelerator.status())) == accelerator.status()


def test_the_backend_chosen_by_name_needs_no_excuse(accelerator: Runtime, adopted: Any) -> None:
    accelerator.configure(Settings(backend="eager"))
    run(accelerator, adopted, a_call(adopted))
    assert (accelerator.status()["route"], accelerator.status()["reason"]) == ("plain", "")


@pytest.mark.parametrize("how", ["configured", "own", "for the run"])
def test_switched_off_is_the_hosts_picture(accelerator: Runtime, how: str) -> None:
    unet, off = diffusers_unet(), Settings(enabled=False)
    accelerator.adopt(unet, off if how == "own" else None)
    if how == "configured":
        accelerator.configure(off)
    with accelerator.settings_for_run(off if how == "for the run" else None):
        output, runs = run(accelerator, unet, a_call(unet))
    assert runs == 1 and torch.equal(output, diffusers_output(unet, a_call(unet)))
    assert (accelerator.status()["route"], accelerator.status()["reason"]) == ("host", "OneDiff is switched off")


def test_settings_for_a_run_nest_and_end_even_by_an_error(accelerator: Runtime, adopted: Any) -> None:
    def now() -> str:
        run(accelerator, adopted, a_call(adopted))
        return accelerator.status()["route"]

    off, on = Settings(enabled=False), Settings(enabled=True)
    with accelerator.settings_for_run(off):
        assert now() == "host" and accelerator.status()["enabled"] is False
        with pytest.raises(KeyError), accelerator.settings_for_run(on):
            assert now() == "plain" and accelerator.status()["enabled"] is True
            raise KeyError
        assert now() == "host"
    assert now() == "plain"


@pytest.mark.parametrize("at", ["managed_and_settings", "adopt"])
def test_a_fault_before_the_call_is_known_costs_a_reason_and_no_image(
    accelerator: Runtime, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    unet = diffusers_unet()
    host = Host(unet, a_call(unet))

    def fails(*arguments: Any, **named: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(accelerator, at, fails)
    with torch.no_grad():
        output = accelerator.run(unet, host.call, host, HostTraits())
    assert torch.equal(output, diffusers_output(unet, host.call)) and host.runs == 1
    assert "a fault of OneDiff in looking a UNet up" in accelerator.status()["reason"]
