"""Calls of diffusers UNets on a GPU, as a pipeline makes them, by OneDiff and by the UNet's own forward."""
from __future__ import annotations

from typing import Any

import torch
from own_forward import own_forward
from torch import Tensor, nn

from lib_onediff.bench.models import inputs
from lib_onediff.public import status
from lib_onediff.runtime.runtime import runtime


def arguments(unet: nn.Module, width: int = 128, height: int = 128, batch: int = 2, tokens: int = 77) -> dict[str, Any]:
    """Random inputs for a UNet, in its dtype. Width and height are in pixels."""
    return inputs(unet, width, height, batch, tokens, next(unet.parameters()).dtype)


def residual_shapes(unet: Any, given: dict[str, Any]) -> list[torch.Size]:
    """The shapes of the residuals that a ControlNet would pass for this call; the last one is for the middle block."""
    shapes: list[torch.Size] = []
    hooks = [unet.conv_in.register_forward_hook(lambda module, args, out: shapes.append(out.shape))]
    for block in unet.down_blocks:
        hooks.append(block.register_forward_hook(lambda module, args, out: shapes.extend(o.shape for o in out[1])))
    hooks.append(unet.mid_block.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
    host(unet, given)
    for hook in hooks:
        hook.remove()
    return shapes


def last_call() -> dict[str, Any]:
    """The status, in which route, reason, backend, lossy and relative_error describe the last call. In the status
    itself they describe the last image, and the calls of these tests belong to no image."""
    last = runtime.call_stats.last_call
    entry = last.entry
    found = {**status(), "route": last.route, "reason": last.reason, "backend": last.backend}
    if entry is not None:
        found.update(lossy=str(entry.key.lossy), relative_error=entry.relative_error)
    return found


@torch.no_grad()
def host(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The output of the UNet's own forward."""
    return own_forward(unet)(**given, return_dict=False)[0]


@torch.no_grad()
def called(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The output of a call of a compiled UNet, by OneDiff if it serves the call."""
    return unet(**given, return_dict=False)[0]
