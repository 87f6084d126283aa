"""How a bound forward is run for one shape."""
from __future__ import annotations

import torch


def choose(wanted: str, device: torch.device) -> tuple[str, str]:
    """The backend that serves wanted ("auto", "cudagraph", "eager") on a device, and why it is not another one."""
    if wanted == "eager":
        return "eager", ""
    if device.type == "cuda":
        return "cudagraph", ""
    return "eager", f"CUDA graphs need a GPU, and this UNet is on the {device.type}"
