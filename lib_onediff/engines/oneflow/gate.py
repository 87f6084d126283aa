"""Why OneFlow cannot be used here, in a sentence that says what to do. OneFlow is not imported."""
from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...ops.requirements import release, written
from .probe import COMPUTING, DONE, IMPORTING, SHARING

PYTHON = (3, 10)
ONEFLOW = (0, 9)
# OneFlow 0.9.0 has machine code for these, and none that a newer GPU could translate.
OLDEST_CAPABILITY, NEWEST_CAPABILITY = (6, 0), (8, 9)
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float16, torch.float32)}
LIBRARIES = "pip install --no-deps nvidia-cublas-cu11==11.10.3.66 nvidia-cudnn-cu11==8.5.0.96"
PROBE = Path(__file__).with_name("probe.py")
SECONDS = 120.0


class Verdict(NamedTuple):
    """reason: why OneFlow cannot be used, or None. fused_attention: whether its own attention works here."""

    reason: str | None
    fused_attention: bool = False


class OneFlowGate:
    """Knows of every device and dtype whether OneFlow can be used, once it has been tried in another process."""

    def __init__(self, seconds: float = SECONDS, environment: Mapping[str, str] | None = None) -> None:
        """seconds: how long the other process may take. environment: its own; None: ours."""
        self._seconds, self._environment = seconds, environment
        self._verdicts: dict[tuple[torch.device, torch.dtype], Verdict] = {}
        self._looking: set[tuple[torch.device, torch.dtype]] = set()
        self._lock = threading.Lock()

    def verdict(self, device: torch.device, dtype: torch.dtype) -> Verdict:
        """Takes seconds the first time: OneFlow is tried."""
        known = self._verdicts.get((device, dtype))
        if known is None:
            lack = why_not_for(device, dtype) or why_no_package()
            known = Verdict(lack) if lack else self._try(device, dtype)
            self._verdicts[device, dtype] = known
        return known

    def verdict_soon(self, device: torch.device, dtype: torch.dtype) -> Verdict | None:
        """The verdict, or None as long as OneFlow is being tried, in the background."""
        pair = device, dtype
        with self._lock:
            if pair not in self._verdicts and pair not in self._looking:
                self._looking.add(pair)
                threading.Thread(target=self.verdict, args=pair, name="onediff-oneflow", daemon=True).start()
        return self._verdicts.get(pair)

    def _try(self, device: torch.device, dtype: torch.dtype) -> Verdict:
        where = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
        # Not by its path: Python would look for oneflow in its folder.
        command = [sys.executable, "-c", PROBE.read_text(encoding="utf-8"), where, str(dtype).removeprefix("torch.")]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=self._seconds, check=False,
                stdin=subprocess.DEVNULL, cwd=PROBE.parents[3], env=self._environment,
            )
        except subprocess.TimeoutExpired:
            return Verdict(f"OneFlow was tried in a process of its own, which did not end within {self._seconds:.0f} s")
        except OSError as error:
            return Verdict(f"OneFlow could not be tried, because no other Python can be started ({error})")
        return read(said(ended.stdout), ended.returncode)


def why_not_for(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why OneFlow is not for this device or this dtype."""
    if device.type not in DTYPES:
        return f"OneFlow runs on NVIDIA GPUs and on the CPU, and this is the {device.type}"
    if dtype not in DTYPES[device.type]:
        kind, known = str(dtype).removeprefix("torch."), "float32" if device.type == "cpu" else "float16 and float32"
        return f"OneFlow computes {known} on the {device.type}, and this model is in {kind}"
    if device.type == "cpu":
        return None
    if torch.version.hip:
        return "OneFlow needs an NVIDIA GPU, and this is one of AMD's"
    capability = torch.cuda.get_device_capability(device)
    if OLDEST_CAPABILITY <= capability <= NEWEST_CAPABILITY:
        return None
    return (
        f"OneFlow {written(ONEFLOW)} knows GPUs of compute capability {written(OLDEST_CAPABILITY)} to "
        f"{written(NEWEST_CAPABILITY)} (GTX 10 to RTX 40), and the {torch.cuda.get_device_name(device)} has "
        f"{written(capability)}"
    )


def why_no_package() -> str | None:
    """Why this Python has no OneFlow that can be tried."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"OneFlow exists for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if sys.version_info[:2] != PYTHON:
        return f"OneFlow needs Python {written(PYTHON)}, and the WebUI runs on {written(sys.version_info[:2])}"
    if find_spec("oneflow") is None:
        return "OneFlow is not installed, and never is by itself: OneDiff's README says how"
    version = installed("oneflow") or "of an unknown version"
    if release(version)[:2] != ONEFLOW:
        return f"OneDiff can use OneFlow {written(ONEFLOW)}, and the one here is {version}: pip install oneflow==0.9.0"
    return None


def read(words: dict[str, Any], code: int) -> Verdict:
    """What the probe has found. words: all that it said. code: how it ended."""
    stage, error = words.get("at", IMPORTING), words.get("error")
    if stage == DONE and error is None:
        return Verdict(None, bool(words.get("fused_attention")))
    if error is None:
        doing = {IMPORTING: "was imported", SHARING: "was handed torch's tensors", COMPUTING: "computed"}
        return Verdict(f"OneFlow ended its process when it {doing.get(stage, 'was tried')} (code {code})")
    if stage == IMPORTING:
        return Verdict(why_no_import(error, words.get("numpy", "none"), words.get("protobuf", "none")))
    if stage == SHARING:
        return Verdict(f"OneFlow cannot share memory with torch {torch.__version__}: {brief(error)}")
    return Verdict(f"OneFlow was tried on a small graph, and failed: {brief(error)}")


def why_no_import(error: str, numpy: str, protobuf: str) -> str:
    """Why OneFlow cannot be imported beside these versions."""
    library = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open", error)
    if library is not None:
        if (installed("nvidia-cudnn-cu12") or "").startswith("8."):
            # Both would be libcudnn.so.8, in the same folder.
            return f"OneFlow needs {library[1]}, which cannot lie beside this torch's cuDNN 8: use torch 2.4 or newer"
        return f"OneFlow needs {library[1]}, which is not there: {LIBRARIES}"
    if "numpy" in error.lower():
        return f'OneFlow needs NumPy 1, and {numpy} is installed: pip install "numpy<2"'
    if "Descriptors cannot" in error or re.search(r"No module named 'google['.]", error):
        return f'OneFlow needs protobuf 3, and {protobuf} is installed: pip install "protobuf<4"'
    return f"OneFlow cannot be imported: {brief(error)}"


def said(output: str) -> dict[str, Any]:
    """All that the probe has said; OneFlow may have written between its lines."""
    words: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            words |= found
    return words


def brief(message: str) -> str:
    """One line of a message of OneFlow's, which have many and are coloured."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", message).strip().splitlines() if line.strip()]
    return lines[0][:160].rstrip(".: ") if lines else "no reason given"


def installed(name: str) -> str | None:
    """A distribution's version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
