"""A1111's option "FP8 weight": linear layers and convolutions are stored in float8, and cast at every use.

Who casts them is torch.autocast, to float16 on a GPU and to bfloat16 on a CPU, or, where that cannot be used (--no-half
on a GPU), the WebUI's own manual cast, which stands for the forward of torch's layers while it is on.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...model.weight_functions import Casts
from ...ops.precision import autocast_dtype

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast_to_computed(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The type in which layers with weights in float8 compute now; to be asked in the host's modes."""
    first: Any = layers[0]
    if not any(layer.weight.dtype in FLOAT8 for layer in layers):
        return None
    return autocast_dtype(first.weight.device.type) or manual_cast_dtype(dtype)


# Norms are stored as the whole UNet was before, and used so, in bfloat16 too.
CASTS = Casts(cast_to_computed, norms=False)


def casts_by_hand() -> bool:
    """Whether the WebUI's manual cast is on."""
    return hasattr(nn.Linear, "org_forward")


def manual_cast_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The type to which the manual cast that is on takes weights and inputs of this type; None where there is none, or
    where layers give another type back (--precision full without --no-half)."""
    from modules import devices

    one_type = dtype == devices.dtype == getattr(devices, "dtype_inference", dtype)
    return dtype if casts_by_hand() and one_type else None


@contextlib.contextmanager
def cast_by_hand(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer holds what it would in its own forward, where the manual cast is on: what is merged there is
    rounded once, however many LoRAs there are."""
    stored = next((parameter.dtype for parameter in layer.parameters() if parameter.dtype in FLOAT8), None)
    if stored is None or not casts_by_hand():
        yield
        return
    from modules import devices

    layer.to(devices.dtype)
    try:
        yield
    finally:
        layer.to(stored)


def why_cast_by_hand() -> str | None:
    """One line where the manual cast is on and the weights are not in float8; else None."""
    from modules import devices

    if casts_by_hand() and not getattr(devices, "fp8", False):
        return "the WebUI casts what every layer computes with itself (this kind of GPU, or --precision)"
    return None
