"""The modes of torch under which our forward runs, and those that a host may have set."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .precision import Flags, applied

# Older torch raises when asked for autocast on another kind of device, such as mps.
AUTOCAST_DEVICES = ("cuda", "cpu")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What torch.autocast casts to on this kind of device now; None where it is off."""
    if device_type not in AUTOCAST_DEVICES:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


@contextlib.contextmanager
def our_modes(device: torch.device, flags: Flags = ()) -> Iterator[None]:
    """Ordinary tensors, no gradients, no autocast: what our forward and its captures are written for.

    flags: torch's switches of precision, as the shape's key has them.
    """
    autocasts = autocast_dtype(device.type) is not None
    no_autocast = torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), no_autocast, applied(flags):
        yield
