"""What OneFlow's compiler does to a process, and environments in which it cannot be used: each has its sentence."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from builders import SMALL, a_call, diffusers_output, diffusers_unet
from oneflow_builders import Ours, agree

from lib_onediff.core.settings import Settings
from lib_onediff.devices.oneflow.gate import OneFlowGate
from lib_onediff.devices.oneflow.route import (
    COMPILING,
    MOST_GRAPHS,
    ONEFLOW_CONVOLUTION,
    ONEFLOW_MATMUL,
    OneFlow,
    oneflow_variables,
)
from lib_onediff.families.registry import FAMILIES

AFTER_A_FAILURE = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from builders import SMALL, a_call, diffusers_output, diffusers_unet
from oneflow_builders import Ours, agree
from lib_onediff.devices.oneflow.route import OneFlow
from lib_onediff.families.registry import FAMILIES
from dataclasses import replace

torch.set_grad_enabled(False)
graphs = OneFlow(FAMILIES.output)
unet = diffusers_unet(**SMALL)
good, call = Ours(unet, graphs), a_call(unet)
good.output(call)
# OneFlow has no convolution in float16 for the CPU, and finds that out when it plans.
in_half = diffusers_unet(**SMALL).half()
for size in (8, 16):
    given = a_call(unet, size, size)
    print(Ours(in_half, graphs).runner(replace(given, latent=given.latent.half())))
print(good.runner(a_call(unet, 16, 8)))
assert agree(good.output(call), diffusers_output(unet, call))
print("what there was still runs")
"""


def test_after_a_failure_nothing_is_compiled() -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.with_name("unit")), str(here.parent), str(here.parents[1])]
    ended = subprocess.run(
        [sys.executable, "-c", AFTER_A_FAILURE, *paths], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    *refusals, last = [line for line in ended.stdout.splitlines() if line.startswith(("OneFlow", "what"))]
    assert last == "what there was still runs"
    assert len(refusals) == 3 and len(set(refusals)) == 1
    assert refusals[0].startswith("OneFlow failed to compile (") and "restart" in refusals[0]


def test_a_cap_on_graphs() -> None:
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet, OneFlow(FAMILIES.output, most=1))
    call = a_call(unet)
    ours.output(call)
    refusal = ours.runner(a_call(unet, 8, 16))
    assert refusal.startswith("OneFlow has compiled 1 graphs") and "restart" in refusal
    assert agree(ours.output(call), diffusers_output(unet, call))
    assert MOST_GRAPHS > 1


def test_it_compiles_in_the_background() -> None:
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet, OneFlow(FAMILIES.output))
    call = a_call(unet)
    assert ours.runner(call, is_warm_up=False) == COMPILING
    assert ours.graphs.count == 1
    steps = 0
    until = time.monotonic() + 120
    while (runner := ours.runner(call, is_warm_up=False)) == COMPILING and time.monotonic() < until:
        diffusers_output(unet, call)
        steps += 1
    assert steps > 1
    assert agree(runner.run(call), diffusers_output(unet, call))


def test_a_model_that_goes_while_its_graph_is_compiled() -> None:
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet, OneFlow(FAMILIES.output))
    call = a_call(unet)
    assert ours.runner(call, is_warm_up=False) == COMPILING
    for parameter in unet.parameters():
        parameter.data = torch.empty(0)
    del unet
    ours.graphs._worker.shutdown(wait=True)
    assert ours.graphs.count == 1 and not ours.graphs.failure


def test_what_it_is_told_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    runner = ours.runner(call)
    graph = runner.graph
    seen = []

    def watched(*given: object) -> object:
        seen.append((os.environ.get(ONEFLOW_MATMUL), os.environ.get(ONEFLOW_CONVOLUTION)))
        return graph(*given)

    monkeypatch.setenv(ONEFLOW_MATMUL, "as it was")
    monkeypatch.setenv(ONEFLOW_CONVOLUTION, "as it was")
    runner.graph = watched
    for chosen in (Settings(accumulation="half"), Settings()):
        runner.variables = oneflow_variables(chosen)
        runner.run(call)
    assert seen == [("1", "1"), ("0", "0")]


def reason_with(folder: Path) -> str | None:
    """With this folder's packages before all others."""
    gate = OneFlowGate(environment={**os.environ, "PYTHONPATH": str(folder)})
    return gate.why_not(torch.device("cpu"), torch.float32)


def test_a_torch_that_shares_no_memory(tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch\n\ndel torch.to_dlpack\n")
    reason = reason_with(tmp_path)
    assert reason.startswith(f"OneFlow failed with torch {torch.__version__} ") and "to_dlpack" in reason


def test_a_graph_that_computes_something_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n\nplain = torch.nn.functional.silu\ntorch.nn.functional.silu = lambda x: plain(x) * 1.01\n"
    )
    reason = reason_with(tmp_path)
    assert reason.startswith("OneFlow failed ") and "results differ" in reason
