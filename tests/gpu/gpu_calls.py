"""Calls of a UNet on a GPU, as a pipeline makes them, and what its own forward answers."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lib_onediff.bench.models import inputs


def arguments(unet: nn.Module, width: int = 128, height: int = 128, batch: int = 2, tokens: int = 77) -> dict[str, Any]:
    """Random inputs for a UNet, in its type; sizes in pixels."""
    return inputs(unet, width, height, batch, tokens, next(unet.parameters()).dtype)


@torch.no_grad()
def host(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return type(unet).forward(unet, **given, return_dict=False)[0]
