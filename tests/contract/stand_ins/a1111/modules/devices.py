"""A CPU that computes in float32. With weights in float8, it casts to bfloat16 by autocast; or, if by_hand is set, by
the WebUI's own casts, as a GPU with --no-half does."""
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
    """A context in which these layers cast inputs and parameters themselves. Each call leaves the parameters in
    other memory."""
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
