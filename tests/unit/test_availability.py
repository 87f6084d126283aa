"""Why our kernels cannot be used, found by real files and folders, and the very command that makes OneDiff fast."""
from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import install as installer
from lib_onediff.devices.cuda import requirements
from lib_onediff.devices.cuda.requirements import (
    OLDEST_TORCH,
    OLDEST_TRITON,
    Setup,
    how_to_be_fast,
    release,
    why_no_compiler,
    why_no_triton,
    why_no_triton_gpu,
    why_no_triton_package,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton builds its launcher so on Linux only")


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others in which a test can install a Triton; importing it would be a fault."""
    kept = [folder for folder in sys.path if not (folder and Path(folder, "triton").is_dir())]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    # Another test may have imported the real one.
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    return tmp_path


def install(folder: Path, version: str, name: str = "triton") -> None:
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text("raise SystemExit('triton was imported')")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def a_sentence(text: str | None) -> bool:
    return text is not None and text[0].isupper() and "\n" not in text and not text.endswith(".") and len(text) < 240


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, and headers that are there."""
    folder, headers = tmp_path / "bin", tmp_path / "include"
    folder.mkdir()
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(headers)})
    return folder


@pytest.mark.parametrize(("capability", "can"), [((6, 1), False), ((7, 0), True), ((9, 0), True)])
def test_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    why = why_no_triton_gpu(GPU)
    assert why is None if can else a_sentence(why) and "NVIDIA GeForce GTX 1080 has 6.1" in why
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD" in (why_no_triton_gpu(GPU) or "")
    assert why_no_triton(CPU) == "OneDiff's kernels need an NVIDIA GPU, and this is the cpu"


@pytest.mark.parametrize(("version", "name", "said"), [
    ("3.3.1", "triton", None), ("3.3.1.post21", "triton-windows", None), ("3.3.1", "pytorch-triton", None),
    ("2.3.1", "triton", "Triton 3.0 or newer, and 2.3.1 is installed"),
])
def test_triton_is_found_and_not_imported(triton: Path, version: str, name: str, said: str | None) -> None:
    assert why_no_triton_package() == "OneDiff's kernels need Triton, which is not installed"
    install(triton, version, name)
    why = why_no_triton_package()
    assert why is None if said is None else a_sentence(why) and said in why


def make_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@on_linux
def test_a_compiler_and_headers(empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = why_no_compiler()
    assert a_sentence(why) and "no gcc or clang" in why
    make_program(empty_path, "cc")
    assert why_no_compiler() == why, "Triton looks for no cc"
    make_program(empty_path, "clang")
    assert why_no_compiler() is None
    monkeypatch.setenv("CC", "icx")
    why = why_no_compiler()
    assert a_sentence(why) and "no icx here" in why, "CC is taken at its word"
    make_program(empty_path, "icx")
    assert why_no_compiler() is None
    header = tmp_path / "include" / "Python.h"
    header.unlink()
    why = why_no_compiler()
    assert why is not None and str(header) in why and why.endswith("-dev") and "\n" not in why
    monkeypatch.setattr(sys, "platform", "win32")
    assert why_no_compiler() == f"Triton needs this Python's {header}, which is not there"
    header.touch()
    monkeypatch.delenv("CC")
    assert why_no_compiler() is None, "Windows needs headers alone"


LINUX, WINDOWS = "/home/me/venv/bin/python", r"C:\My UI\venv\Scripts\python.exe"
EMBEDDED = r"C:\forge\system\python\python.exe"
UNTIL = "Until then PyTorch's own operators are used, in CUDA graphs."


def linux(torch_version: str | None, triton: str | None, **others: object) -> Setup:
    return Setup(torch_version, triton, **{"platform": "linux", "python": LINUX, **others})


def windows(torch_version: str | None, triton: str | None, **others: object) -> Setup:
    usual = {"platform": "win32", "python": WINDOWS, "python_version": (3, 10)}
    return Setup(torch_version, triton, **{**usual, **others})


NEW = "OneDiff is fast on this GPU with torch 2.7.1 and Triton 3.3: "
COPIED = r'copy the folders "include" and "libs" of an ordinary Python 3.10 into C:\forge\system\python'


@pytest.mark.parametrize(("setup", "said"), [
    (linux("2.7.1+cu126", "3.3.1"), None), (linux("2.4.0", "3.0.0"), None), (linux("2.13.0", ""), None),
    (windows("2.7.1+cu128", "3.3.1.post21"), None), (linux("2.7.1", "3.3.1", headers=False), None),
    (linux("2.4.1", None), f'torch 2.4.1 and Triton 3.0: run {LINUX} -m pip install "triton==3.0.*". {UNTIL}'),
    (linux("2.99.0", None), f'torch 2.99.0 and Triton 3.7: run {LINUX} -m pip install "triton==3.7.*". {UNTIL}'),
    (linux("2.6.0", "2.0.0", python="/home/my ui/bin/python"),
     f'run "/home/my ui/bin/python" -m pip install "triton==3.2.*". {UNTIL}'),
    (linux("2.0.1+cu118", "2.0.0"),
     f"{NEW}run {LINUX} -m pip install --upgrade torch==2.7.1 torchvision==0.22.1. Until then it does nothing."),
    # The Triton that comes with it is too old.
    (linux("2.3.1+cu121", "2.3.1", xformers=True), f"{NEW}run {LINUX} -m pip install --upgrade torch==2.7.1 "
     f"torchvision==0.22.1, then start the WebUI without --xformers, which belongs to the old torch. {UNTIL}"),
    (windows("2.1.2+cu121", None), f'{NEW}run "{WINDOWS}" -m pip install --upgrade torch==2.7.1 torchvision==0.22.1 '
     "--index-url URL (URL: PyTorch's index for CUDA 12.6, which its page Start Locally names), then run "
     f'"{WINDOWS}" -m pip install "triton-windows==3.3.*" in a command prompt. {UNTIL}'),
    (windows("2.4.1+cu124", None),
     f'run "{WINDOWS}" -m pip install "triton-windows==3.1.*" in a command prompt. {UNTIL}'),
    (windows("2.7.1+cu128", None, python=EMBEDDED, headers=False),
     f'run {EMBEDDED} -m pip install "triton-windows==3.3.*" in a command prompt, then {COPIED}. {UNTIL}'),
    (windows("2.7.1+cu128", "3.3.1.post21", python=EMBEDDED, headers=False), f"{COPIED}. {UNTIL}"),
], ids=str)
def test_the_command_for_a_python(setup: Setup, said: str | None) -> None:
    hint = how_to_be_fast(setup)
    assert hint is None if said is None else hint is not None and hint.endswith(said), hint


def test_what_is_recommended_fits_together() -> None:
    for platform in ("linux", "win32"):
        assert how_to_be_fast(linux(requirements.NEW_TORCH, None, platform=platform, headers=True)) is not None
        new = requirements.triton_for(requirements.NEW_TORCH, platform)
        assert how_to_be_fast(Setup(requirements.NEW_TORCH, f"{new}.0", platform)) is None
    assert all(release(triton) >= OLDEST_TRITON for triton in requirements.TRITON_FOR_TORCH.values())
    assert (installer.OLDEST_TORCH, installer.OLDEST_TRITON) == (OLDEST_TORCH, OLDEST_TRITON)


def test_the_hint_is_for_gpus_that_our_kernels_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert requirements.how_to_be_fast_here() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(requirements, "setup_here", lambda version: linux("2.7.1", None))
    for capability, said in (((6, 1), False), ((7, 5), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (requirements.how_to_be_fast_here() is not None) == said

    def fails() -> int:
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.cuda, "current_device", fails)
    assert requirements.how_to_be_fast_here() is None


@pytest.mark.parametrize(("cuda", "driver", "capability", "said"), [
    ("12.6", (12, 4), (8, 6), True), ("12.6", None, None, False), (None, (12, 4), (8, 6), False),
    ("12.6", (12, 4), (6, 1), False), ("13.0", (12, 4), (8, 6), False),
])
def test_install_py_says_it_without_torch(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: tuple[int, int] | None,
    capability: tuple[int, int] | None, said: bool,
) -> None:
    monkeypatch.setattr(installer, "find_torch", lambda: ("2.6.0", cuda))
    monkeypatch.setattr(installer, "find_gpu", lambda: ("NVIDIA GeForce", driver, capability))
    monkeypatch.setattr(installer, "installed_version", lambda *names: None)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder or ".", "triton").is_dir()])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    line = installer.describe_machine()
    assert ("OneDiff is fast on this GPU with torch 2.6.0 and Triton 3.2" in line) == said
    assert line.startswith("OneDiff: torch 2.6.0, NVIDIA GeForce, no triton; backends: ") and "\n" not in line
