"""A CPU, in float32."""
from __future__ import annotations

import contextlib
from typing import Any

import torch

device = torch.device("cpu")
dtype = dtype_vae = dtype_unet = torch.float32
unet_needs_upcast = False


def autocast(disable: bool = False) -> Any:
    return contextlib.nullcontext()


without_autocast = autocast
