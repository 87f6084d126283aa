"""Why our kernels cannot be used here, in a sentence that says what to do."""
from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

# The first whose language has erf and rsqrt of its own. Our kernels compile with it for compute capability 7.0 to 9.0,
# and so they do with 3.7; only Triton's interpreter, which the tests use, needs 3.2.
OLDEST_TRITON = (3, 0)
# Triton has never served less. Since 3.3 its makers test 8.0 and newer, but what no tensor core does still compiles.
OLDEST_CAPABILITY = (7, 0)
# What goes with each torch. Newer ones than these take the newest.
TRITON_FOR_TORCH = {
    (2, 4): "3.1" if sys.platform == "win32" else "3.0", (2, 5): "3.1", (2, 6): "3.2", (2, 7): "3.3", (2, 8): "3.4",
    (2, 9): "3.5", (2, 10): "3.6", (2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7",
}
OLDEST_TORCH_WITH_TRITON = min(TRITON_FOR_TORCH)


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
    installed = find_spec("triton") is not None
    version = triton_version() if installed else ""
    # A version that cannot be read is believed to be new enough.
    if installed and not () < release(version) < OLDEST_TRITON:
        return None
    if release(torch.__version__) < OLDEST_TORCH_WITH_TRITON:
        return (
            f"OneDiff's kernels need Triton {written(OLDEST_TRITON)}, which torch {torch.__version__} is too old for: "
            f"install torch {written(OLDEST_TORCH_WITH_TRITON)} or newer"
        )
    if not installed:
        return f"OneDiff is faster with Triton, which is not installed: {how_to_install()}"
    return (
        f"OneDiff's kernels need Triton {written(OLDEST_TRITON)} or newer, and {version} is installed: "
        f"{how_to_install()}"
    )


def why_no_compiler() -> str | None:
    """What Triton's first launch would miss: on Linux it builds a small Python module in C."""
    # triton-windows brings a compiler of its own, and Python's headers.
    if sys.platform == "win32":
        return None
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            return f"Triton needs a C compiler, and CC names {named!r}, which is not there: correct CC or take it away"
    elif not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, and there is no gcc or clang here. On Debian and Ubuntu: apt install gcc"
    if not python_header().exists():
        python = f"python{written(sys.version_info[:2])}"
        return f"Triton needs this Python's {python_header()}. On Debian and Ubuntu: apt install {python}-dev"
    return None


def python_header() -> Path:
    """Where Triton's compiler looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own Python installs packages elsewhere, but not its headers.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")


def how_to_install() -> str:
    """The pip command for the Triton that goes with this torch."""
    package = "triton-windows" if sys.platform == "win32" else "triton"
    fitting = TRITON_FOR_TORCH.get(release(torch.__version__)[:2])
    return f'pip install "{package}=={fitting}.*"' if fitting else f"pip install {package}"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 7, 1) for 2.7.1+cu128, () where there are none."""
    return tuple(int(number) for number in re.findall(r"\d+", (re.match(r"[\d.]*", version) or [""])[0]))


def written(numbers: tuple[int, ...]) -> str:
    """(3, 10) as 3.10."""
    return ".".join(map(str, numbers))


def triton_version() -> str:
    """Triton's version, or 'none'; it is not imported."""
    for name in ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
