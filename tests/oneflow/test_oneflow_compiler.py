"""OneFlow's compiler: a failed compilation, the limit of compiled graphs, compiling in the background, and the reasons
in environments in which OneFlow cannot be used."""
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
from oneflow_builders import Ours, close

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
from oneflow_builders import Ours, close
from lib_onediff.devices.oneflow.route import OneFlow
from lib_onediff.families.registry import FAMILIES
from dataclasses import replace

torch.set_grad_enabled(False)
graphs = OneFlow(FAMILIES.output)
unet = diffusers_unet(**SMALL)
compiled, call = Ours(unet, graphs), a_call(unet)
compiled.output(call)
# OneFlow has no convolution in float16 for the CPU, and finds that out when it plans.
in_half = diffusers_unet(**SMALL).half()
for size in (8, 16):
    given = a_call(unet, size, size)
    print(Ours(in_half, graphs).runner(replace(given, latent=given.latent.half())))
print(compiled.runner(a_call(unet, 16, 8)))
assert close(compiled.output(call), diffusers_output(unet, call))
print("the earlier graph still runs")
"""


def test_after_a_failed_compilation_earlier_graphs_run_and_no_new_graph_is_compiled() -> None:
    """A failed compilation breaks OneFlow's compiler for the rest of the process, so that this test runs in a process
    of its own. The call that fails and all later ones are refused with the same sentence, which asks for a restart."""
    here = Path(__file__).parent
    paths = [str(here), str(here.with_name("unit")), str(here.parent), str(here.parents[1])]
    ended = subprocess.run(
        [sys.executable, "-c", AFTER_A_FAILURE, *paths], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    *refusals, last = [line for line in ended.stdout.splitlines() if line.startswith(("OneFlow", "the earlier"))]
    assert last == "the earlier graph still runs"
    assert len(refusals) == 3 and len(set(refusals)) == 1
    assert refusals[0].startswith("OneFlow failed to compile (") and "restart" in refusals[0]


def test_beyond_the_limit_of_graphs_no_new_graph_is_compiled_and_earlier_ones_run() -> None:
    """OneFlow does not free compiled graphs, so that there is a limit, here of one graph. A call of another size is
    refused with a sentence that asks for a restart."""
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet, OneFlow(FAMILIES.output, most=1))
    call = a_call(unet)
    ours.output(call)
    refusal = ours.runner(a_call(unet, 8, 16))
    assert refusal.startswith("OneFlow has compiled 1 graphs") and "restart" in refusal
    assert close(ours.output(call), diffusers_output(unet, call))
    assert MOST_GRAPHS > 1


def test_a_graph_is_compiled_in_the_background_while_the_host_computes_steps() -> None:
    """For a call that is no warm-up, runner() returns COMPILING at once until the graph is compiled. A warm-up would
    wait for it."""
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
    assert close(runner.run(call), diffusers_output(unet, call))


def test_a_unet_that_is_deleted_while_its_graph_is_compiled_causes_no_failure() -> None:
    """The UNet's parameters are emptied while its graph is compiled in the background. A failure would end the use of
    OneFlow until a restart."""
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet, OneFlow(FAMILIES.output))
    call = a_call(unet)
    assert ours.runner(call, is_warm_up=False) == COMPILING
    for parameter in unet.parameters():
        parameter.data = torch.empty(0)
    del unet
    ours.graphs._worker.shutdown(wait=True)
    assert ours.graphs.count == 1 and not ours.graphs.failure


def test_a_run_sets_the_variables_by_which_oneflow_chooses_the_precision_of_sums(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneFlow reads these two environment variables at each run: "1" for sums in half precision, "0" otherwise.
    Settings.accumulation decides, whatever the user has set them to."""
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    runner = ours.runner(call)
    graph = runner.graph
    seen = []

    def recorded(*given: object) -> object:
        seen.append((os.environ.get(ONEFLOW_MATMUL), os.environ.get(ONEFLOW_CONVOLUTION)))
        return graph(*given)

    monkeypatch.setenv(ONEFLOW_MATMUL, "the user's")
    monkeypatch.setenv(ONEFLOW_CONVOLUTION, "the user's")
    runner.graph = recorded
    for chosen in (Settings(accumulation="half"), Settings()):
        runner.variables = oneflow_variables(chosen)
        runner.run(call)
    assert seen == [("1", "1"), ("0", "0")]


def reason_with(folder: Path) -> str | None:
    """Why OneFlow cannot be used if Python finds the packages of this folder before all others."""
    gate = OneFlowGate(environment={**os.environ, "PYTHONPATH": str(folder)})
    return gate.why_not(torch.device("cpu"), torch.float32)


def test_the_reason_names_the_function_for_sharing_memory_that_torch_lacks(tmp_path: Path) -> None:
    """The gate tries OneFlow in another process, which runs sitecustomize.py when it starts. Here it deletes
    torch.to_dlpack. The reason: why OneFlow cannot be used."""
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch\n\ndel torch.to_dlpack\n")
    reason = reason_with(tmp_path)
    assert reason.startswith(f"OneFlow failed with torch {torch.__version__} ") and "to_dlpack" in reason


def test_the_reason_says_that_the_results_of_oneflow_and_torch_differ(tmp_path: Path) -> None:
    """In the process in which the gate tries OneFlow, torch's SiLU is 1 % too large here. The reason: why OneFlow
    cannot be used."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n\nplain = torch.nn.functional.silu\ntorch.nn.functional.silu = lambda x: plain(x) * 1.01\n"
    )
    reason = reason_with(tmp_path)
    assert reason.startswith("OneFlow failed ") and "results differ" in reason
