"""Self attention by the package sageattention (SageAttention, Zhang et al. 2024), where the user has installed it."""
from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from ...core.version import written
from .attention import FEW_KEYS

PACKAGE = "sageattention"
DTYPES = (torch.float16, torch.bfloat16)
OLDEST_CAPABILITY = (8, 0)
WIDEST_HEAD = 128


def why_no_sage(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why SageAttention cannot serve a model of this dtype on a device, in one sentence; None if it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"SageAttention needs the package {PACKAGE}, which is not installed"
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"SageAttention is for models in float16 or bfloat16, and this one is in {name}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return f"SageAttention needs a GPU of compute capability {written(OLDEST_CAPABILITY)} or higher"
    return None


class SageAttention:
    """As attention.Attention, lossy. Cross attention, wide heads and what is computed in float32 stay exact."""

    def __init__(self, exact: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> None:
        self._exact = exact

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False) -> Tensor:
        narrow = query.shape[3] <= WIDEST_HEAD and query.dtype in DTYPES
        if upcast or not narrow or key.shape[2] <= FEW_KEYS or key.shape[2] != query.shape[2]:
            return self._exact(query, key, value, upcast)
        from sageattention import sageattn

        output: Tensor = sageattn(query, key, value, tensor_layout="HND", is_causal=False)
        return output
