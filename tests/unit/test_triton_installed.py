"""The tests of our kernels are skipped where Triton is missing: that must not happen where they are to be run."""
from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import install


def test_install_py_brings_triton_and_it_has_somewhere_to_run() -> None:
    if Path(sys.prefix).resolve() != install.VENV.resolve():
        pytest.skip("this is not the .venv that install.py --test makes")
    if sys.platform != "linux":
        pytest.skip("Triton is for Linux; without it our kernels are not tested here")
    assert find_spec("triton") is not None, "pyproject.toml's extra 'test' asks for Triton, but it is not there"
    import torch

    assert torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
