"""On what machine, and by which of our sources, something was measured."""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
# What no UNet's output passes through. Everything else counts, what is added later too.
COMPUTES_NOTHING = {"api", "bench", "ui"}


@dataclass(frozen=True)
class Fingerprint:
    """What verdicts, timings and tuned choices depend on besides the shape. gpu: its name, or 'cpu'. onediff: our
    version and the digest of our sources."""

    gpu: str
    driver: str
    torch: str
    onediff: str

    @property
    def digest(self) -> str:
        """By which the store tells machines apart."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]

    @classmethod
    def of(cls) -> Fingerprint:
        """The current GPU's, or the CPU's where torch can use no GPU."""
        gpu, driver = "cpu", "none"
        if torch.cuda.is_available():
            driver = f"hip {torch.version.hip}" if torch.version.hip else nvidia_driver()
            try:
                gpu = torch.cuda.get_device_name(torch.device("cuda"))
            except RuntimeError:
                gpu = "a GPU that does not start"
        return cls(gpu, driver, torch.__version__, f"{__version__} {source_digest()}")


@functools.cache
def source_digest(package: Path = PACKAGE) -> str:
    """A digest of the sources that compute, as they are at the first call: milliseconds, and nothing is imported."""
    digest = hashlib.sha256()
    for folder, inside, names in os.walk(package):
        inside[:] = sorted(name for name in inside if name != "__pycache__" and name not in COMPUTES_NOTHING)
        for name in sorted(name for name in names if name.endswith((".py", ".zip"))):
            source = Path(folder, name)
            digest.update(f"{source.relative_to(package).as_posix()}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def nvidia_driver() -> str:
    """The NVIDIA driver's version, such as '580.95.05', or 'unknown'; asks NVML once, which takes milliseconds."""
    version = ctypes.create_string_buffer(96)
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetDriverVersion(version, len(version))
            nvml.nvmlShutdown()
    return version.value.decode("ascii", "replace") or "unknown"
