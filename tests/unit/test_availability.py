"""Why our kernels cannot be used, found by real files and folders."""
from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from lib_onediff.devices.cuda.requirements import (
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
