"""A1111's modules.devices for a CPU that computes in float32. With weights in float8, autocast() casts to bfloat16. If
by_hand is set, autocast() makes each layer cast its inputs and parameters to `dtype` instead, as A1111 does on a GPU
with --no-half."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

device = torch.device("cpu")
dtype = dtype_vae = dtype_unet = dtype_inference = torch.float32
unet_needs_upcast = fp8 = by_hand = False
CAST = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)


def autocast(disable: bool = False) -> Any:
    if by_hand:
        return manual_cast(dtype)
    return torch.autocast("cpu", dtype=torch.bfloat16) if fp8 else contextlib.nullcontext()


def without_autocast(disable: bool = False) -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def manual_cast(target: torch.dtype) -> Iterator[None]:
    """A context in which the layers of the classes in CAST cast their inputs and parameters to this dtype. Each call
    leaves the parameters at a new address."""
    originals = [kind.forward for kind in CAST]
    for kind, forward in zip(CAST, originals, strict=True):
        kind.forward = casting(forward, target)
        kind.org_forward = forward
    try:
        yield
    finally:
        for kind, forward in zip(CAST, originals, strict=True):
            kind.forward = forward
            del kind.org_forward


def casting(forward: Callable[..., Tensor], target: torch.dtype) -> Callable[..., Tensor]:
    def cast(layer: Any, x: Tensor) -> Tensor:
        stored = {parameter.dtype for parameter in layer.parameters()} - {target}
        layer.to(target)
        result = forward(layer, x.to(target))
        for other in stored:
            layer.to(other)
        return result.to(dtype_inference)

    return cast
