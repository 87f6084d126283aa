"""Why our kernels cannot be used: found by real files and folders, said in one sentence."""
from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import lib_onediff
from lib_onediff.devices.cuda import availability
from lib_onediff.devices.cuda.availability import (
    why_no_compiler,
    why_no_triton,
    why_no_triton_gpu,
    why_no_triton_package,
)
from lib_onediff.devices.cuda.requirements import release

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


def test_a_cpu_is_no_gpu() -> None:
    assert why_no_triton(CPU) == "OneDiff's kernels need an NVIDIA GPU, and this is the cpu"


@pytest.mark.parametrize(("capability", "can"), [((5, 2), False), ((6, 1), False), ((7, 0), True), ((9, 0), True)])
def test_old_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    why = why_no_triton_gpu(GPU)
    assert (why is None) == can
    if why is not None:
        assert a_sentence(why) and "NVIDIA GeForce GTX 1080 has {}.{}".format(*capability) in why


def test_amd_is_said_to_be_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    why = why_no_triton_gpu(GPU)
    assert a_sentence(why) and "AMD" in why


def test_no_triton(triton: Path) -> None:
    assert why_no_triton_package() == "OneDiff's kernels need Triton, which is not installed"


@pytest.mark.parametrize("name", ["triton", "triton-windows", "pytorch-triton"])
def test_triton_is_there_and_is_not_imported(triton: Path, name: str) -> None:
    install(triton, "3.3.1.post21", name)
    assert why_no_triton_package() is None


def test_a_triton_whose_version_nobody_knows_is_believed(triton: Path) -> None:
    (triton / "triton").mkdir()
    (triton / "triton" / "__init__.py").touch()
    assert why_no_triton_package() is None


def test_an_old_triton(triton: Path) -> None:
    install(triton, "2.3.1")
    why = why_no_triton_package()
    assert a_sentence(why) and "Triton 3.0 or newer, and 2.3.1 is installed" in why


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


def make_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@on_linux
def test_no_compiler(empty_path: Path) -> None:
    why = why_no_compiler()
    assert a_sentence(why) and "no gcc or clang" in why
    make_program(empty_path, "cc")
    assert why_no_compiler() == why, "Triton looks for no cc"


@on_linux
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_is_found(empty_path: Path, name: str) -> None:
    make_program(empty_path, name)
    assert why_no_compiler() is None


@on_linux
def test_cc_is_taken_at_its_word(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(empty_path, "gcc")
    monkeypatch.setenv("CC", "icx")
    why = why_no_compiler()
    assert a_sentence(why) and "'icx'" in why
    make_program(empty_path, "icx")
    assert why_no_compiler() is None


@on_linux
def test_no_headers(empty_path: Path, tmp_path: Path) -> None:
    make_program(empty_path, "gcc")
    (tmp_path / "include" / "Python.h").unlink()
    why = why_no_compiler()
    assert why is not None and "\n" not in why
    assert str(tmp_path / "include" / "Python.h") in why and why.endswith("-dev")


def test_windows_needs_headers_alone(empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert why_no_compiler() is None
    (tmp_path / "include" / "Python.h").unlink()
    why = why_no_compiler()
    assert why == f"Triton needs this Python's {tmp_path / 'include' / 'Python.h'}, which is not there"


@on_linux
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_where_nothing_is_missing_a_python_module_can_be_built(tmp_path: Path) -> None:
    if why_no_compiler() is not None:
        pytest.skip("the headers are missing")
    source = tmp_path / "module.c"
    source.write_text("#include <Python.h>\nint answer(void) { return PY_MAJOR_VERSION; }\n")
    header = availability.python_header()
    subprocess.run(["gcc", source, "-shared", "-fPIC", f"-I{header.parent}", "-o", tmp_path / "module.so"], check=True)


@pytest.mark.parametrize(("version", "numbers"), [
    ("3.3.1", (3, 3, 1)), ("2.7.1+cu128", (2, 7, 1)), ("3.2.0.post21", (3, 2, 0)), ("3.0.0a1", (3, 0, 0)), ("none", ()),
    ("", ()),
])
def test_releases(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_asking_imports_no_triton() -> None:
    script = (
        "import sys, torch\nfrom lib_onediff.devices.cuda.availability import why_no_compiler, why_no_triton_package\n"
        "why_no_triton_package(); why_no_compiler()\nassert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(lib_onediff.__file__).parents[1], check=True)
