"""The reasons why OneFlow cannot be used: those that are found without OneFlow, and those from the process that tries
it."""
from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_onediff.devices.oneflow import gate as oneflow_gate
from lib_onediff.devices.oneflow.gate import (
    TRYING,
    OneFlowGate,
    brief,
    verdict_of,
    why_no_package,
    why_not_for,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def a_sentence(text: str | None) -> bool:
    """Whether a reason can be shown to users as one short sentence: capitalised, on one line, without a full stop."""
    return text is not None and text[0].isupper() and "\n" not in text and not text.endswith(".") and len(text) < 300


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder into which a test can install a package oneflow, on a machine that OneFlow supports."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(oneflow_gate, "PYTHON", sys.version_info[:2])
    monkeypatch.syspath_prepend(tmp_path)
    # Another test may have imported the real one.
    monkeypatch.delitem(sys.modules, "oneflow", raising=False)
    return tmp_path


def install(folder: Path, version: str = "0.9.0", source: str = "raise SystemExit('it was imported')") -> None:
    """Write a package oneflow of this version into a folder. source: its code."""
    (folder / "oneflow").mkdir()
    (folder / "oneflow" / "__init__.py").write_text(source)
    info = folder / f"oneflow-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oneflow\nVersion: {version}\n")


def tried(folder: Path, seconds: float = 120.0) -> str | None:
    """The reason that a gate finds whose other process imports packages from this folder first. None: OneFlow can be
    used."""
    gate = OneFlowGate(seconds, {**os.environ, "PYTHONPATH": str(folder)})
    return gate.why_not(CPU, torch.float32)


@pytest.mark.parametrize(("python", "system", "processor", "said"), [
    ((3, 13), "linux", "x86_64", ["Python 3.10", "3.13"]), (None, "win32", "AMD64", ["Linux", "AMD64"]),
    (None, "linux", "aarch64", ["Linux", "aarch64"]), (None, "linux", "x86_64", ["not installed", ".readme/hosts.md"]),
])
def test_the_reason_names_what_the_machine_lacks_for_oneflow(
    monkeypatch: pytest.MonkeyPatch, machine: Path, python: tuple[int, int] | None, system: str, processor: str,
    said: list[str],
) -> None:
    """The machine has another Python, system or processor than OneFlow needs, or lacks OneFlow's package. python: None
    for a version that OneFlow supports. said: parts of the reason."""
    if python is not None:
        monkeypatch.setattr(oneflow_gate, "PYTHON", (3, 10))
        monkeypatch.setattr(sys, "version_info", (*python, 1))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "oneflow").is_dir()])
    why = why_no_package()
    assert a_sentence(why) and all(part in why for part in said), why


@pytest.mark.parametrize(("version", "can"), [("0.9.0", True), ("0.9.1.dev20240515", True), ("0.7.0", False),
                                              ("1.0.0", False)])
def test_only_oneflow_0_9_is_supported(machine: Path, version: str, can: bool) -> None:
    """can: whether this version can be used. It is read from the package's metadata; importing this package would end
    the process."""
    install(machine, version)
    why = why_no_package()
    assert (why is None) == can
    assert can or (a_sentence(why) and version in why and "pip install oneflow==0.9.0" in why)
    assert "oneflow" not in sys.modules


def test_a_folder_named_oneflow_does_not_count_as_the_installed_package(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has no metadata. The reason says how to install the package."""
    (machine / "oneflow").mkdir()
    monkeypatch.setattr(sys, "path", [str(machine)])
    why = why_no_package()
    assert a_sentence(why) and "pip install oneflow==0.9.0" in why


@pytest.mark.parametrize(("device", "dtype", "part"), [
    (CPU, torch.float16, "float16"), (CPU, torch.bfloat16, "bfloat16"), (GPU, torch.bfloat16, "bfloat16"),
    (torch.device("mps"), torch.float16, "mps"), (CPU, torch.float32, None),
])
def test_devices_and_dtypes_that_oneflow_does_not_support_have_a_reason(
    device: torch.device, dtype: torch.dtype, part: str | None
) -> None:
    """part: a part of the reason why OneFlow cannot be used; None: it can be used."""
    why = why_not_for(device, dtype)
    assert why is None if part is None else a_sentence(why) and part in why


def test_a_oneflow_that_crashes_or_hangs_when_it_is_tried_gives_a_reason(machine: Path) -> None:
    """OneFlow is tried in another process, for at most `seconds`."""
    install(machine, source="import os; os.abort()")
    why = tried(machine)
    assert a_sentence(why) and "crashed in a test" in why and "oneflow" not in sys.modules
    (machine / "oneflow" / "__init__.py").write_text("import time; time.sleep(1000)")
    began = time.monotonic()
    why = tried(machine, seconds=1)
    assert a_sentence(why) and "within 1 s" in why
    assert time.monotonic() - began < 60


def test_oneflow_is_tried_once_in_the_background(machine: Path) -> None:
    """why_not(waits=False) returns at once: TRYING, or the reason if it is known. The package of this test counts its
    imports in a file."""
    install(machine, source="open(__file__ + '.tried', 'a').write('x'); raise ImportError('no such symbol')")
    gate = OneFlowGate(environment={**os.environ, "PYTHONPATH": str(machine)})
    assert gate.why_not(CPU, torch.float32, waits=False) == TRYING
    found = gate.why_not(CPU, torch.float32)
    assert a_sentence(found) and "ImportError: no such symbol" in found
    assert gate.why_not(CPU, torch.float32, waits=False) == found
    assert (machine / "oneflow" / "__init__.py.tried").read_text() == "x"


def test_the_reason_is_read_from_the_output_of_the_process_that_tries_oneflow() -> None:
    """verdict_of(output, exit code) is the reason; None: OneFlow can be used. brief() shortens an error to its first
    line that has text."""
    said = json.dumps({"error": ""})
    # Its output counts, and not its exit code: OneFlow may crash when the process ends.
    assert verdict_of("\n".join(["W2026 cuda", "[1, 2]", said, "{not there}"]), -6) is None
    failed = verdict_of(json.dumps({"error": "RuntimeError: it is too hot."}), 0)
    for verdict, part in ((failed, "it is too hot"), (verdict_of("", 1), "code 1")):
        assert a_sentence(verdict) and part in verdict
    assert brief("\x1b[1m\n\n first: \n second") == "first"


def test_concurrent_threads_share_one_trial_of_oneflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an earlier version, a second thread started another trial before the first one's thread was registered.
    SlowThread makes that interval long."""
    made: list[threading.Thread] = []

    class SlowThread(threading.Thread):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)
            time.sleep(0.05)

    gate = OneFlowGate()
    monkeypatch.setattr(gate, "_try", lambda device, dtype: gate._verdicts.update({(device, dtype): "tried"}))
    # In the gate's module only: the pool and other tests' workers start threads too.
    monkeypatch.setattr(oneflow_gate, "threading", SimpleNamespace(Thread=SlowThread))
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(gate.why_not, CPU, torch.float32) for _ in range(8)]
        assert {done.result() for done in asked} == {"tried"}
    assert len(made) == 1
