"""The host's own outputs in float32, against which every error is measured."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .options import Size
from .variants import BASELINE, VARIANTS, Arguments


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """float32 means float32 inside."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def exact_outputs(unet: nn.Module, calls: Mapping[Size, Arguments]) -> dict[Size, Tensor]:
    """The host's own outputs in float32 without TF32, on the CPU, from the weights and inputs as they are rounded.

    The UNet comes and leaves in one dtype.
    """
    dtype = next(unet.parameters()).dtype
    with without_tf32():
        run = VARIANTS[BASELINE].make(unet.float())
        outputs = {size: run(widen(arguments)).cpu() for size, arguments in calls.items()}
    unet.to(dtype)
    return outputs


def widen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: widen(item) for name, item in value.items()}
    return value.float()
