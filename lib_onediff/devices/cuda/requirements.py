"""Which GPU and Triton OneDiff's kernels need, and why they cannot be used here."""
from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from ...core.version import release, written

# The first whose language has erf and rsqrt of its own. Our kernels compile with it for compute capability 7.0 to 9.0,
# and so they do with 3.8; only Triton's interpreter, which the tests use, needs 3.2. What Triton 2.x cannot compile it
# does not refuse, but ends the process: 2.1 over the joining of group norm statistics and over attention for compute
# capability 7.5, 2.3 over attention for 7.0 and, cut in some ways, for 9.0.
OLDEST_TRITON = (3, 0)
# Triton has never served less. Since 3.3 its makers test 8.0 and newer, but what no tensor core does still compiles.
OLDEST_CAPABILITY = (7, 0)
# Triton's int8 products are compiled for tensor cores of 7.5 by 3.2 (tried: not by 3.3 and 3.8), of 8.0 by all.
INT8_CAPABILITY, LAST_TRITON_FOR_TURING, TURING = (8, 0), (3, 2), (7, 5)
TRITON_PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm")


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
    """Why this Python has no Triton that our kernels can use."""
    version = triton_here()
    if triton_is_usable(version):
        return None
    if version is None:
        return "OneDiff's kernels need Triton, which is not installed"
    return f"OneDiff's kernels need Triton {written(OLDEST_TRITON)} or newer, and {version} is installed"


def why_no_compiler() -> str | None:
    """What Triton's first launch would miss: it builds a small Python module in C."""
    header = python_header()
    if sys.platform == "win32":
        # triton-windows brings a compiler of its own, but not Python's headers, which an embedded Python lacks.
        return None if header.exists() else f"Triton needs this Python's {header}, which is not there"
    # Triton takes CC at its word.
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        names = " or ".join(compilers)
        return f"Triton needs a C compiler, and there is no {names} here. On Debian and Ubuntu: apt install gcc"
    if not header.exists():
        python = f"python{written(sys.version_info[:2])}"
        return f"Triton needs this Python's {header}. On Debian and Ubuntu: apt install {python}-dev"
    return None


def triton_here() -> str | None:
    """Triton's version, "" where nobody knows it; None: there is none. It is not imported."""
    if find_spec("triton") is None:
        return None
    for name in TRITON_PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def triton_is_usable(version: str | None) -> bool:
    return version is not None and not () < release(version) < OLDEST_TRITON


def oldest_int8_capability(triton: str | None) -> tuple[int, int]:
    """The compute capability from which on this Triton multiplies int8 by tensor cores."""
    version = release(triton)[:2]
    return TURING if () < version <= LAST_TRITON_FOR_TURING else INT8_CAPABILITY


def python_header() -> Path:
    """Where Triton's compiler looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own Python installs packages elsewhere, but not its headers.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
