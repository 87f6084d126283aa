"""The backend oneflow as a user chooses it: when it serves, and which backend serves otherwise."""
from __future__ import annotations

import time

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from builders import SMALL, SMALL_XL, a_call, diffusers_output, diffusers_unet, served
from oneflow_builders import close
from samplings import STEPS, Rig, call_of, evenly_spaced, few_steps_suffice, passes  # noqa: F401

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.devices.oneflow.gate import OneFlowGate
from lib_onediff.runtime.runtime import runtime


def last_backend_and_route() -> tuple[str, str]:
    return status()["backend"], status()["route"]


def test_eager_serves_until_the_graph_of_oneflow_is_compiled_and_checked() -> None:
    """Afterwards the backend oneflow serves, whose first output was compared with diffusers'. All outputs are close to
    diffusers'; after uncompiling, the output equals diffusers' to the bit."""
    unet = compile_unet(diffusers_unet(**SMALL_XL), backend="oneflow")
    call = a_call(unet)
    seen = []
    until = time.monotonic() + 240
    while last_backend_and_route() != ("oneflow", "graph") and time.monotonic() < until:
        assert close(served(unet, call), diffusers_output(unet, call))
        seen.append((*last_backend_and_route(), status()["reason"]))
    assert seen[0][:2] == ("eager", "plain") and "OneFlow" in seen[0][2]
    assert seen[-1] == ("oneflow", "graph", "")
    # The runtime has compared the graph's first output with the host's.
    [entry] = [entry for entry in runtime.table.entries() if entry.key.backend == "oneflow"]
    assert 0 < entry.relative_error < 1e-5
    uncompile_unet(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call))


def test_in_a_warm_up_oneflow_serves_every_size_and_edited_weights() -> None:
    """A warm-up waits for the compilation. Parameters are edited in place, and one is replaced. All outputs are close
    to diffusers'."""
    unet = compile_unet(diffusers_unet(**SMALL), backend="oneflow")
    with runtime.warming_up():
        for seed, size in enumerate([(8, 8), (16, 8), (8, 8)]):
            call = a_call(unet, *size, seed=seed)
            assert close(served(unet, call), diffusers_output(unet, call))
            assert last_backend_and_route() == ("oneflow", "graph")
        for parameter in unet.parameters():
            parameter.mul_(1.05)
        assert close(served(unet, call), diffusers_output(unet, call))
        unet.conv_in.weight = nn.Parameter(torch.randn_like(unet.conv_in.weight) * 0.1)
        call = a_call(unet, seed=9)
        assert close(served(unet, call), diffusers_output(unet, call))
        assert last_backend_and_route() == ("oneflow", "graph")


def test_where_oneflow_cannot_be_used_eager_serves_and_the_status_has_the_reason(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "OneFlow is not installed"
    monkeypatch.setattr(OneFlowGate, "why_not", lambda *given: reason)
    unet = compile_unet(diffusers_unet(**SMALL), backend="oneflow")
    call = a_call(unet)
    assert close(served(unet, call), diffusers_output(unet, call))
    assert (*last_backend_and_route(), status()["reason"]) == ("eager", "plain", reason)


def test_the_backend_eager_computes_all_steps_of_deepcache_and_the_reason_names_oneflow() -> None:
    """The user chose the backend oneflow, which cannot compute cached passes. So eager computes them, and the full
    passes (steps 0, 3 and 6) too. The status has the reason."""
    rig = Rig(SMALL, backend="oneflow")
    reasons = []
    for _ in range(2):
        rig.begin(STEPS[:7])
        for step in STEPS[:7]:
            rig.run(call_of(rig.unet, step))
            current = rig.runtime.status()
            assert current["backend"] == "eager" and "OneFlow" in current["reason"]
            reasons.append(current["reason"])
        # Let the gate try OneFlow before the second sampling.
        rig.runtime.devices.named("oneflow")._gate.why_not(torch.device("cpu"), torch.float32)
    assert rig.log[7:] == passes([0, 3, 6], 7) and "does not support DeepCache" in reasons[-1], reasons
