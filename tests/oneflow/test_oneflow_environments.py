"""Environments in which OneFlow cannot be used, as a user may have them: each has its sentence."""
from __future__ import annotations

import os
from pathlib import Path

import torch

from lib_onediff.devices.oneflow.gate import OneFlowGate

CPU = torch.device("cpu")


def reason_with(folder: Path) -> str | None:
    """With this folder's packages before all others."""
    return OneFlowGate(environment={**os.environ, "PYTHONPATH": str(folder)}).why_not(CPU, torch.float32)


def test_a_torch_that_shares_no_memory(tmp_path: Path) -> None:
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import torch\n\ndel torch.to_dlpack\n")
    reason = reason_with(tmp_path)
    assert reason.startswith(f"OneFlow failed beside torch {torch.__version__} ") and "to_dlpack" in reason


def test_a_graph_that_computes_something_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n\nplain = torch.nn.functional.silu\ntorch.nn.functional.silu = lambda x: plain(x) * 1.01\n"
    )
    reason = reason_with(tmp_path)
    assert reason.startswith("OneFlow failed ") and "something else" in reason
