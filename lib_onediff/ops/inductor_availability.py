"""Why PyTorch's Inductor cannot be used here, in a sentence that says what to do. Nothing of it is imported."""
from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec

import torch

from .availability import how_to_install, why_no_compiler
from .requirements import OLDEST_CAPABILITY, release, written

OLDEST_TORCH = (2, 4)
# The first torch whose compiler runs in a Python; in newer ones than these none is known to.
TORCH_FOR_PYTHON = {(3, 12): (2, 4), (3, 13): (2, 6), (3, 14): (2, 10)}
DEVICES = ("cuda", "cpu")


def why_no_inductor(device: torch.device) -> str | None:
    """Why Inductor cannot compile for a device, in one sentence; None if nothing is known to stand in the way.

    Takes up to a millisecond: ask once for a device.
    """
    if release(torch.__version__)[:2] < OLDEST_TORCH:
        return f"Inductor needs torch {written(OLDEST_TORCH)} or newer, and this is torch {torch.__version__}"
    needed = TORCH_FOR_PYTHON.get(sys.version_info[:2], OLDEST_TORCH)
    if release(torch.__version__)[:2] < needed:
        python = written(sys.version_info[:2])
        return (
            f"Inductor needs torch {written(needed)} or newer in Python {python}, and this is torch {torch.__version__}"
        )
    if device.type not in DEVICES:
        return f"OneDiff uses Inductor on CUDA and the CPU only, and this UNet is on the {device.type}"
    return why_no_kernels(device) if device.type == "cuda" else why_no_cpp_compiler()


def why_no_kernels(device: torch.device) -> str | None:
    """What Inductor would miss on a GPU."""
    if find_spec("triton") is None:
        return f"Inductor needs Triton, which is not installed: {how_to_install()}"
    if not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            return (
                f"Inductor needs a GPU of compute capability {written(OLDEST_CAPABILITY)} or higher, and the "
                f"{torch.cuda.get_device_name(device)} has {written(capability)}"
            )
    return why_no_compiler()


def why_no_cpp_compiler() -> str | None:
    """What Inductor would miss on a CPU, where it writes C++."""
    named = os.environ.get("CXX")
    if named:
        if shutil.which(shlex.split(named)[0]) is None:
            return (
                f"Inductor needs a C++ compiler, and CXX names {named!r}, which is not there: correct CXX or take it "
                "away"
            )
        return None
    known = {"win32": ("cl",), "darwin": ("clang++",)}.get(sys.platform, ("g++", "clang++"))
    if any(map(shutil.which, known)):
        return None
    how = {
        "win32": "Start the WebUI from a prompt of the Visual Studio Build Tools",
        "darwin": "Run: xcode-select --install",
    }.get(sys.platform, "On Debian and Ubuntu: apt install g++")
    return f"Inductor needs a C++ compiler on the CPU, and there is no {' or '.join(known)} here. {how}"
