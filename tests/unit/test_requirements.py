"""The hint: which torch and which Triton make OneDiff fast on this system, and the very command."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import install as installer
from lib_onediff.ops import availability, requirements
from lib_onediff.ops.requirements import OLDEST_TORCH, OLDEST_TRITON, Setup, how_to_be_fast, release
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.status import status_html

LINUX, WINDOWS = "/home/me/venv/bin/python", r"C:\My UI\venv\Scripts\python.exe"
EMBEDDED = r"C:\forge\system\python\python.exe"
UNTIL = "Until then PyTorch's own operators are used, in CUDA graphs."


def linux(torch_version: str | None, triton: str | None, **others: object) -> Setup:
    return Setup(torch_version, triton, **{"platform": "linux", "python": LINUX, "webui": None, **others})


def windows(torch_version: str | None, triton: str | None, **others: object) -> Setup:
    usual = {"platform": "win32", "python": WINDOWS, "python_version": (3, 10), "webui": None}
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
    (windows("2.4.1+cu124", None),
     f'run "{WINDOWS}" -m pip install "triton-windows==3.1.*" in a command prompt. {UNTIL}'),
    (windows("2.7.1+cu128", None, python=EMBEDDED, headers=False),
     f'run {EMBEDDED} -m pip install "triton-windows==3.3.*" in a command prompt, then {COPIED}. {UNTIL}'),
    (windows("2.7.1+cu128", "3.3.1.post21", python=EMBEDDED, headers=False), f"{COPIED}. {UNTIL}"),
], ids=str)
def test_the_command_for_a_python(setup: Setup, said: str | None) -> None:
    hint = how_to_be_fast(setup)
    assert hint is None if said is None else hint is not None and hint.endswith(said), hint


LINUX_STOCK = 'put export TORCH_COMMAND="pip install torch==2.7.1 torchvision==0.22.1" into webui-user.sh, start'
WINDOWS_STOCK = (
    "put set TORCH_COMMAND=pip install torch==2.7.1 torchvision==0.22.1 --index-url URL (URL: PyTorch's index for CUDA "
    "12.6, which its page Start Locally names) into webui-user.bat, start the WebUI once with --reinstall-torch"
)


@pytest.mark.parametrize(("setup", "settings", "said"), [
    (linux("2.1.2+cu121", None), "webui-user.sh", f"{LINUX_STOCK} the WebUI once with --reinstall-torch. {UNTIL}"),
    # The Triton that comes with it is too old.
    (linux("2.3.1+cu121", "2.3.1"), "webui-user.sh", f"{LINUX_STOCK} the WebUI once with --reinstall-torch. {UNTIL}"),
    (linux("2.0.1+cu118", None), "webui-user.sh",
     f"{LINUX_STOCK} the WebUI once with --reinstall-torch. Until then it does nothing."),
    (windows("2.1.2+cu121", None), "webui-user.bat",
     f'{WINDOWS_STOCK}, then run "{WINDOWS}" -m pip install "triton-windows==3.3.*" in a command prompt. {UNTIL}'),
    (windows("2.1.2+cu121", None, xformers=True), "webui-user.bat",
     f"{WINDOWS_STOCK} and without --xformers, which belongs to the old torch, then run"),
], ids=str)
def test_the_torch_of_a_stock_webui(tmp_path: Path, setup: Setup, settings: str, said: str) -> None:
    (tmp_path / settings).touch()
    hint = how_to_be_fast(setup._replace(webui=tmp_path))
    assert hint is not None and hint.startswith(NEW + said), hint


def test_what_is_recommended_fits_together() -> None:
    for platform in ("linux", "win32"):
        assert how_to_be_fast(linux(requirements.NEW_TORCH, None, platform=platform, headers=True)) is not None
        new = requirements.triton_for(requirements.NEW_TORCH, platform)
        assert how_to_be_fast(Setup(requirements.NEW_TORCH, f"{new}.0", platform)) is None
    assert all(release(triton) >= OLDEST_TRITON for triton in requirements.TRITON_FOR_TORCH.values())
    assert (installer.OLDEST_TORCH, installer.OLDEST_TRITON) == (OLDEST_TORCH, OLDEST_TRITON)


def test_the_hint_is_for_gpus_that_our_kernels_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert availability.how_to_be_fast_here() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GeForce")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(availability, "setup_here", lambda version: linux("2.7.1", None))
    for capability, said in (((6, 1), False), ((7, 5), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (availability.how_to_be_fast_here() is not None) == said

    def fails() -> int:
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.cuda, "current_device", fails)
    assert availability.how_to_be_fast_here() is None


def test_the_status_and_the_accordion_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = how_to_be_fast(linux("2.7.1", None))
    assert runtime.status()["hint"] == "" or torch.cuda.is_available()
    monkeypatch.setattr(runtime.devices, "_hint", hint)
    status = runtime.status()
    assert status["hint"] == hint
    assert "-m pip install &quot;triton==3.3.*&quot;" in status_html(status)


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
