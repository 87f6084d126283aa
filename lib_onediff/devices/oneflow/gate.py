"""Finds out whether OneFlow works here, and if not, the reason as a sentence that tells the user what to do.

OneFlow is tried in another process, because it may crash. This file is also the program of that process: it takes a
device and a dtype, such as cuda:0 float16, and prints one line of JSON at its end.
"""
from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.version import release, written

log = logging.getLogger("onediff")
# The versions of Python and of OneFlow that OneDiff supports.
PYTHON = (3, 10)
ONEFLOW = (0, 9)
# The dtypes that OneFlow supports, by kind of device.
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float16, torch.float32)}
# The reason while a test runs.
TRYING = "OneFlow is being tested in the background"
# The time limit of the test, in seconds.
SECONDS = 120.0
REPOSITORY = Path(__file__).parents[3]
# The largest accepted difference from torch's result, relative to the largest value of that result: ten times as much
# as rounding explains.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}


class OneFlowGate:
    """Tests OneFlow once for each device and dtype, in another process, and keeps the result as long as it lives. May
    be used in several threads.

    seconds: the time limit of the other process. environment: its environment variables; None: ours.
    """

    def __init__(self, seconds: float = SECONDS, environment: Mapping[str, str] | None = None) -> None:
        self._seconds = seconds
        self._environment = environment
        self._verdicts: dict[tuple[torch.device, torch.dtype], str | None] = {}
        self._trials: dict[tuple[torch.device, torch.dtype], threading.Thread] = {}
        self._lock = threading.Lock()

    def why_not(self, device: torch.device, dtype: torch.dtype, waits: bool = True) -> str | None:
        """Why OneFlow cannot be used for this device and dtype, in one sentence for the user; None if it can. The first
        call for a device and dtype starts the test, which takes seconds. waits: wait for the test; otherwise, the
        result is TRYING until the test has ended."""
        pair = device, dtype
        with self._lock:
            if pair not in self._trials:
                trial = threading.Thread(target=self._try, args=pair, name="onediff-oneflow", daemon=True)
                trial.start()
                self._trials[pair] = trial
        if waits:
            self._trials[pair].join()
        return self._verdicts.get(pair, TRYING)

    def _try(self, device: torch.device, dtype: torch.dtype) -> None:
        """Find out whether OneFlow works for a device and a dtype, and write why_not's result to _verdicts. Runs in a
        thread of its own."""
        lack = why_not_for(device, dtype) or why_no_package()
        self._verdicts[device, dtype] = lack or self._in_a_process(device, dtype)

    def _in_a_process(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why OneFlow cannot be used, as found by running this file as another process; None if it can."""
        where = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
        command = [sys.executable, "-m", f"{__package__}.gate", where, str(dtype).removeprefix("torch.")]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=self._seconds, check=False,
                stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=self._environment,
            )
        except subprocess.TimeoutExpired:
            return f"OneFlow cannot be used, because a test of it did not end within {self._seconds:.0f} s"
        except OSError as error:
            return f"OneFlow could not be tested, because no other Python process can be started ({error})"
        log.debug("the test of OneFlow ended with exit code %s: %s", ended.returncode, ended.stderr)
        return verdict_of(ended.stdout, ended.returncode)


def why_not_for(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why OneFlow supports no model of this dtype on this kind of device, in one sentence; None if it may. Tests
    nothing: only the other process finds out that a GPU is too old or too new."""
    if dtype in DTYPES.get(device.type, ()):
        return None
    place = "the GPU" if device.type == "cuda" else device.type
    return f"OneFlow cannot run this model: it does not support {str(dtype).removeprefix('torch.')} on {place}"


def why_no_package() -> str | None:
    """Why OneFlow cannot work in this Python: another version or system, or a missing or wrong package. One sentence;
    None if the right package is installed. Does not import the package."""
    if (sys.platform, platform.machine(), sys.version_info[:2]) != ("linux", "x86_64", PYTHON):
        here = f"{written(sys.version_info[:2])} for {platform.system()} on {platform.machine()}"
        return f"OneFlow exists for Python {written(PYTHON)} for Linux on x86-64, and this is {here}"
    if find_spec("oneflow") is None:
        return "OneFlow is not installed: see .readme/hosts.md"
    try:
        version = metadata.version("oneflow")
    except metadata.PackageNotFoundError:
        # A folder of this name is not the package.
        return f"OneDiff needs OneFlow {written(ONEFLOW)}, and another oneflow is found: pip install oneflow==0.9.0"
    if release(version)[:2] != ONEFLOW:
        return f"OneDiff needs OneFlow {written(ONEFLOW)}, and {version} is installed: pip install oneflow==0.9.0"
    return None


def verdict_of(output: str, code: int) -> str | None:
    """Why OneFlow cannot be used, in one sentence; None if it can.

    output: what the other process printed: OneFlow's own lines, and a line of JSON from the end of this file. Without
    that line, the process has crashed. code: the process's exit code, only for the message.
    """
    words: dict[str, Any] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            words |= json.loads(line)
    needs = f"with torch {torch.__version__} (requirements: .readme/hosts.md)"
    if "error" not in words:
        return f"OneFlow crashed in a test {needs}, with exit code {code}"
    return f"OneFlow failed {needs}: {brief(words['error'])}" if words["error"] else None


def brief(message: str) -> str:
    """The first line of one of OneFlow's messages, without its colours and a final point, of at most 160 characters;
    "no reason given" for an empty message."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", message).strip().splitlines() if line.strip()]
    return lines[0][:160].rstrip(".: ") if lines else "no reason given"


def main(device: str, dtype: torch.dtype) -> None:
    """Test OneFlow in this process: share a tensor with it without a copy, and run a small graph with changing weights.
    device: such as "cuda:0". Returns if OneFlow works; raises what OneFlow raises, and RuntimeError if its results
    differ from torch's. The lines at the end of this file call it, and print the outcome as JSON."""
    # Write no core dump after a crash. Windows writes none, and does not have this module.
    with contextlib.suppress(ImportError):
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # As in the WebUI, torch uses the device before OneFlow does.
    weight = torch.ones(64, 64, device=device, dtype=dtype)
    kernel = torch.randn(8, 4, 3, 3, device=device, dtype=dtype)
    import oneflow as flow
    from oneflow.utils.tensor import from_torch, to_torch

    from ...core.layer_weights import LayerWeights
    from .operators import graph_of, run_graph, unowned

    if to_torch(from_torch(unowned(weight))).data_ptr() != weight.data_ptr():
        raise RuntimeError("a tensor was copied on its way to OneFlow and back")

    def build(weights: Any, tokens: Any, image: Any) -> Any:
        convolved = flow.nn.functional.conv2d(image, weights["kernel"].weight, None, 1, 1)
        return flow.matmul(tokens, weights["linear"].weight), flow.nn.functional.silu(convolved)

    graph = graph_of(build, {"linear": LayerWeights(weight, None), "kernel": LayerWeights(kernel, None)})
    for factor in (1.0, 2.0):
        weight.fill_(factor)
        tokens = kernel.new_empty(2, 64).normal_()
        image = kernel.new_empty(2, 4, 8, 8).normal_()
        convolved = torch.nn.functional.conv2d(image, kernel, padding=1)
        refuse_difference(run_graph(graph, [tokens, image]), tokens @ weight, torch.nn.functional.silu(convolved))


def refuse_difference(results: list[Tensor], *exact: Tensor) -> None:
    """Raise RuntimeError if a result of OneFlow differs from torch's (exact, in the same order) by more than TOLERANCE,
    or is not finite."""
    for result, wanted in zip(results, exact, strict=True):
        error = float((result.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        if not error <= TOLERANCE[wanted.dtype]:
            raise RuntimeError(f"its results differ from PyTorch's (relative error {error:.0e})")


if __name__ == "__main__":
    failure = ""
    try:
        main(sys.argv[1], getattr(torch, sys.argv[2]))
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    print(json.dumps({"error": failure}), flush=True)
