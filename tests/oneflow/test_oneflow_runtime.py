"""The backend oneflow, as a user chooses it."""
from __future__ import annotations

import time

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from builders import SMALL, SMALL_XL, a_call, diffusers_output, diffusers_unet, served
from oneflow_builders import agree
from samplings import STEPS, Rig, call_of, equal_distances, few_steps_suffice, passes  # noqa: F401

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.devices.oneflow.gate import OneFlowGate
from lib_onediff.runtime.runtime import runtime


def now() -> tuple[str, str]:
    return status()["backend"], status()["route"]


def test_it_serves_once_it_is_ready() -> None:
    unet = compile_unet(diffusers_unet(**SMALL_XL), backend="oneflow")
    call = a_call(unet)
    seen = []
    until = time.monotonic() + 240
    while now() != ("oneflow", "graph") and time.monotonic() < until:
        assert agree(served(unet, call), diffusers_output(unet, call))
        seen.append((*now(), status()["reason"]))
    assert seen[0][:2] == ("eager", "plain") and "OneFlow" in seen[0][2]
    assert seen[-1] == ("oneflow", "graph", "")
    # It was checked against the host.
    [entry] = [entry for entry in runtime.table.entries() if entry.key.backend == "oneflow"]
    assert 0 < entry.relative_error < 1e-5
    uncompile_unet(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call))


def test_patience_edits_and_exchanges() -> None:
    unet = compile_unet(diffusers_unet(**SMALL), backend="oneflow")
    with runtime.warming_up():
        for seed, size in enumerate([(8, 8), (16, 8), (8, 8)]):
            call = a_call(unet, *size, seed=seed)
            assert agree(served(unet, call), diffusers_output(unet, call))
            assert now() == ("oneflow", "graph")
        for parameter in unet.parameters():
            parameter.mul_(1.05)
        assert agree(served(unet, call), diffusers_output(unet, call))
        unet.conv_in.weight = nn.Parameter(torch.randn_like(unet.conv_in.weight) * 0.1)
        call = a_call(unet, seed=9)
        assert agree(served(unet, call), diffusers_output(unet, call))
        assert now() == ("oneflow", "graph")


def test_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneFlowGate, "why_not", lambda *given: "OneFlow has no luck today")
    unet = compile_unet(diffusers_unet(**SMALL), backend="oneflow")
    call = a_call(unet)
    assert agree(served(unet, call), diffusers_output(unet, call))
    assert (*now(), status()["reason"]) == ("eager", "plain", "OneFlow has no luck today")


def test_deepcache_is_for_others() -> None:
    rig = Rig(SMALL, backend="oneflow")
    reasons = []
    for _ in range(2):
        rig.begin(STEPS[:7])
        for step in STEPS[:7]:
            rig.run(call_of(rig.unet, step))
            now = rig.runtime.status()
            assert now["backend"] == "eager" and "OneFlow" in now["reason"]
            reasons.append(now["reason"])
        # It is tried meanwhile.
        rig.runtime.devices.named("oneflow")._gate.why_not(torch.device("cpu"), torch.float32)
    assert rig.log[7:] == passes([0, 3, 6], 7) and "the steps that DeepCache shortens" in reasons[-1], reasons
