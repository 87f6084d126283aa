"""Environments in which OneFlow cannot be used, as a user may have them: each has its sentence."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lib_onediff.devices.oneflow.gate import OneFlowGate, Verdict

CPU = torch.device("cpu")


def verdict_with(folder: Path) -> Verdict:
    """With this folder's packages before all others."""
    return OneFlowGate(environment={**os.environ, "PYTHONPATH": str(folder)}).verdict(CPU, torch.float32)


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], Path]:
    def into_a_folder(requirement: str) -> Path:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
        if subprocess.run([*command, requirement], capture_output=True, check=False).returncode:
            pytest.skip(f"{requirement} cannot be installed here")
        return tmp_path

    return into_a_folder


@pytest.mark.parametrize(("requirement", "word"), [("numpy==2.0.2", "umpy"), ("protobuf==4.25.3", "Descriptors")])
def test_a_package_that_is_too_new(install: Callable[[str], Path], requirement: str, word: str) -> None:
    reason = verdict_with(install(requirement)).reason
    assert reason.startswith("OneFlow failed when it was imported") and word in reason


def test_missing_cuda_libraries(tmp_path: Path) -> None:
    # OneFlow looks for them in the folder beside its own.
    package = Path(find_spec("oneflow").origin).parent
    (tmp_path / "oneflow").mkdir()
    (tmp_path / "oneflow.libs").symlink_to(package.with_name("oneflow.libs"))
    for part in package.iterdir():
        copy = tmp_path / "oneflow" / part.name
        if part.suffix == ".so":
            shutil.copyfile(part, copy)
        else:
            copy.symlink_to(part)
    reason = verdict_with(tmp_path).reason
    assert reason.startswith("OneFlow failed when it was imported") and ".so." in reason


def test_a_torch_that_shares_no_memory(tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch\n\ndel torch.to_dlpack\n")
    reason = verdict_with(tmp_path).reason
    assert reason.startswith(f"OneFlow failed when it was handed torch's tensors, beside torch {torch.__version__}: ")


def test_a_graph_that_computes_something_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n\nplain = torch.nn.functional.silu\ntorch.nn.functional.silu = lambda x: plain(x) * 1.01\n"
    )
    reason = verdict_with(tmp_path).reason
    assert reason.startswith("OneFlow failed when it computed") and "something else" in reason
