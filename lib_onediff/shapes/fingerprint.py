"""On what machine something was measured."""
from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from ..ops.availability import triton_version


@dataclass(frozen=True)
class Fingerprint:
    """What timings and tuned choices depend on besides the shape. gpu: its name, or 'cpu'."""

    gpu: str
    driver: str
    torch: str
    triton: str
    onediff: str

    @classmethod
    def of(cls, device: torch.device | None = None) -> Fingerprint:
        """A device's fingerprint; by default the current GPU's, or the CPU's where torch can use no GPU."""
        from .. import __version__

        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        gpu, driver = device.type, "none"
        if device.type == "cuda":
            driver = f"hip {torch.version.hip}" if torch.version.hip else nvidia_driver()
            try:
                gpu = torch.cuda.get_device_name(device)
            except RuntimeError:
                gpu = "a GPU that does not start"
        return cls(gpu, driver, torch.__version__, triton_version(), __version__)


def nvidia_driver() -> str:
    """The NVIDIA driver's version, such as '580.95.05', or 'unknown'; asks NVML, which takes milliseconds."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return "unknown"
    try:
        answered = nvml.nvmlSystemGetDriverVersion(version, len(version)) == 0
    finally:
        nvml.nvmlShutdown()
    return version.value.decode("ascii", "replace") if answered else "unknown"
