"""Why our kernels cannot be used here, in a sentence that says what to do."""
from __future__ import annotations

import os
import shutil
import sys

import torch

from .requirements import (
    OLDEST_CAPABILITY,
    OLDEST_TRITON,
    how_to_be_fast,
    python_header,
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


def triton_version() -> str:
    """Triton's version, or 'none'; it is not imported."""
    return triton_here() or "none"
