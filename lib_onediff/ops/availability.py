"""Why our kernels cannot be used here, in a sentence that says what to do."""
from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec

import torch

from .requirements import (
    OLDEST_CAPABILITY,
    OLDEST_TRITON,
    Setup,
    how_to_be_fast,
    install_triton,
    python_header,
    release,
    setup_here,
    triton_here,
    triton_is_usable,
    written,
)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, in one sentence; None if nothing is known to stand in the way.

    Triton itself is not imported. Takes up to a millisecond: ask once for a device.
    """
    return why_no_triton_gpu(device) or why_no_triton_package() or why_no_compiler()


def why_no_triton_gpu(device: torch.device) -> str | None:
    """Why Triton kernels are not for this device."""
    if device.type != "cuda":
        return f"OneDiff's kernels need an NVIDIA GPU, and this is the {device.type}"
    if torch.version.hip:
        return "OneDiff's kernels have not been tried on AMD GPUs, so PyTorch's own operators are used"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (
            f"OneDiff's kernels need a GPU of compute capability {written(OLDEST_CAPABILITY)} or higher, "
            f"such as GTX 16 and RTX 20, and the {torch.cuda.get_device_name(device)} has {written(capability)}"
        )
    return None


def why_no_triton_package() -> str | None:
    """Why this Python has no Triton that our kernels can use; how_to_be_fast_here() says how to get it."""
    version = triton_here()
    if triton_is_usable(version):
        return None
    if version is None:
        return "OneDiff's kernels need Triton, which is not installed"
    return f"OneDiff's kernels need Triton {written(OLDEST_TRITON)} or newer, and {version} is installed"


def how_to_be_fast_here() -> str | None:
    """What would make OneDiff fast on this machine's GPU and how to get it, in one or two sentences; None where nothing
    is missing, and where our kernels are not for this GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        lack = why_no_triton_gpu(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError:
        # A GPU that does not start.
        return None
    return None if lack else how_to_be_fast(setup_here(torch.__version__))


def why_no_compiler() -> str | None:
    """What Triton's first launch would miss: it builds a small Python module in C."""
    header = python_header()
    if sys.platform == "win32":
        # triton-windows brings a compiler of its own, but not Python's headers, which an embedded Python lacks.
        return None if header.exists() else f"Triton needs this Python's {header}, which is not there"
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            return f"Triton needs a C compiler, and CC names {named!r}, which is not there: correct CC or take it away"
    elif not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is no gcc or clang here. On Debian and Ubuntu: apt install gcc"
    if not header.exists():
        python = f"python{written(sys.version_info[:2])}"
        return f"Triton needs this Python's {header}. On Debian and Ubuntu: apt install {python}-dev"
    return None


def how_to_install() -> str:
    """The command for the Triton that goes with this torch."""
    return install_triton(Setup(torch.__version__, None))


def triton_version() -> str:
    """Triton's version, or 'none'; it is not imported."""
    return triton_here() or "none"


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
