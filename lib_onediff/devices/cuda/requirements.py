"""Which GPU, torch and Triton OneDiff's kernels need: why they cannot be used here, and how to get what is missing.

install.py loads this file alone, by its path and without torch: only what takes a device imports that.
"""
from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

OLDEST_TORCH = (2, 1, 2)
# The first whose language has erf and rsqrt of its own. Our kernels compile with it for compute capability 7.0 to 9.0,
# and so they do with 3.8; only Triton's interpreter, which the tests use, needs 3.2. What Triton 2.x cannot compile it
# does not refuse, but ends the process: 2.1 over the joining of group norm statistics and over attention for compute
# capability 7.5, 2.3 over attention for 7.0 and, cut in some ways, for 9.0.
OLDEST_TRITON = (3, 0)
# Triton has never served less. Since 3.3 its makers test 8.0 and newer, but what no tensor core does still compiles.
OLDEST_CAPABILITY = (7, 0)
# Triton's int8 products are compiled for tensor cores of 7.5 by 3.2 (tried: not by 3.3 and 3.8), of 8.0 by all.
INT8_CAPABILITY, LAST_TRITON_FOR_TURING, TURING = (8, 0), (3, 2), (7, 5)
# What each torch for Linux asks for in its metadata, where our kernels can use that; newer ones than these take the
# newest. The fork for Windows begins with torch 2.4.
TRITON_FOR_TORCH: dict[tuple[int, ...], str] = {
    (2, 4): "3.0", (2, 5): "3.1", (2, 6): "3.2", (2, 7): "3.3", (2, 8): "3.4", (2, 9): "3.5", (2, 10): "3.6",
    (2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7",
}
TRITON_FOR_TORCH_ON_WINDOWS = {**TRITON_FOR_TORCH, (2, 4): "3.1"}
# For whoever needs a newer torch: its builds for CUDA 12 run on the drivers that served torch 2.1, and serve every GPU
# that our kernels do but the RTX 50.
NEW_TORCH, NEW_TORCHVISION, NEW_CUDA = "2.7.1", "0.22.1", "12.6"
TRITON_PACKAGES = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm")


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, in one sentence; None if nothing is known to stand in the way.

    Triton itself is not imported. Takes up to a millisecond: ask once for a device.
    """
    return why_no_triton_gpu(device) or why_no_triton_package() or why_no_compiler()


def why_no_triton_gpu(device: torch.device) -> str | None:
    """Why Triton kernels are not for this device."""
    import torch

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


class Setup(NamedTuple):
    """What is installed for this Python; None: it is not there.

    triton: "" where nobody knows the version, and then it is believed to be new enough. python: its path. headers:
    whether Python.h is where Triton's compiler looks.
    """

    torch: str | None
    triton: str | None
    platform: str = sys.platform
    python: str = sys.executable
    python_version: tuple[int, ...] = sys.version_info[:2]
    headers: bool = True
    xformers: bool = False


def setup_here(torch: str | None) -> Setup:
    """This machine's. torch: its version, which only an import of torch tells with its build tag."""
    return Setup(torch, triton_here(), headers=python_header().exists(), xformers=find_spec("xformers") is not None)


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


def how_to_be_fast_here() -> str | None:
    """What would make OneDiff fast on this machine's GPU and how to get it, in one or two sentences; None where nothing
    is missing, and where our kernels are not for this GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        lack = why_no_triton_gpu(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError:
        # A GPU that does not start.
        return None
    return None if lack else how_to_be_fast(setup_here(torch.__version__))


def how_to_be_fast(setup: Setup) -> str | None:
    """What makes OneDiff fast on an NVIDIA GPU where its kernels cannot be used, and what is used until then, in one or
    two sentences; None where nothing is missing. Only for GPUs of OLDEST_CAPABILITY and newer."""
    windows, steps, pip = setup.platform == "win32", [], f"{quoted(setup.python)} -m pip install"
    new_enough = release(setup.torch) >= min(TRITON_FOR_TORCH)
    torch = setup.torch if new_enough else NEW_TORCH
    triton = triton_for(torch, setup.platform)
    if not new_enough:
        # Windows' package for pip's usual index is made for CPUs.
        index = f" --index-url URL (URL: PyTorch's index for CUDA {NEW_CUDA}, which its page Start Locally names)"
        steps.append(f"run {pip} --upgrade torch=={NEW_TORCH} torchvision=={NEW_TORCHVISION}{index if windows else ''}")
        if setup.xformers:
            steps.append("start the WebUI without --xformers, which belongs to the old torch")
    # A new torch for Linux brings its Triton.
    if not triton_is_usable(setup.triton) if new_enough else windows:
        package = "triton-windows" if windows else "triton"
        steps.append(f'run {pip} "{package}=={triton}.*"{" in a command prompt" if windows else ""}')
    if windows and not setup.headers:
        # What the Python that comes with a WebUI lacks: Triton compiles a small module for it. Not pathlib's parent:
        # this may be asked for another system.
        folder = quoted(re.split(r"[\\/][^\\/]*$", setup.python)[0])
        version = written(setup.python_version)
        steps.append(f'copy the folders "include" and "libs" of an ordinary Python {version} into {folder}')
    if not steps:
        return None
    works = release(setup.torch) >= OLDEST_TORCH
    until = "PyTorch's own operators are used, in CUDA graphs" if works else "it does nothing"
    needs = f"OneDiff is fast on this GPU with torch {torch} and Triton {triton}"
    return f"{needs}: {', then '.join(steps)}. Until then {until}."


def triton_is_usable(version: str | None) -> bool:
    return version is not None and not () < release(version) < OLDEST_TRITON


def oldest_int8_capability(triton: str | None) -> tuple[int, int]:
    """The compute capability from which on this Triton multiplies int8 by tensor cores."""
    version = release(triton)[:2]
    return TURING if () < version <= LAST_TRITON_FOR_TURING else INT8_CAPABILITY


def triton_for(torch: str | None, platform: str = sys.platform) -> str:
    """The Triton that goes with a torch: "3.3"."""
    fitting = TRITON_FOR_TORCH_ON_WINDOWS if platform == "win32" else TRITON_FOR_TORCH
    return fitting.get(release(torch)[:2], fitting[max(fitting)])


def python_header() -> Path:
    """Where Triton's compiler looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own Python installs packages elsewhere, but not its headers.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")


def quoted(path: str) -> str:
    """As one word of a command line."""
    return f'"{path}"' if re.search(r"[^\w./\\:~+-]", path) else path


def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 7, 1) for 2.7.1+cu128, () where there are none."""
    return tuple(int(number) for number in re.findall(r"\d+", (re.match(r"[\d.]*", version or "") or [""])[0]))


def written(numbers: tuple[int, ...]) -> str:
    """(3, 10) as 3.10."""
    return ".".join(map(str, numbers))
