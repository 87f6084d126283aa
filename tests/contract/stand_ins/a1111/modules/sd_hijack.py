"""The attributes of torch, ldm and sgm that A1111 replaces when it starts."""
from __future__ import annotations

import importlib

import networks
import torch
from modules import sd_hijack_unet, sd_unet

UNETS = ("ldm.modules.diffusionmodules.openaimodel", "sgm.modules.diffusionmodules.openaimodel")


def changes() -> list[tuple[object, str, object]]:
    """The replaced attributes, each as (owner, name of the attribute, new value)."""
    found: list[tuple[object, str, object]] = [
        (torch.nn.Linear, "forward", networks.patched(torch.nn.Linear.forward)),
        (torch.nn.Conv2d, "forward", networks.patched(torch.nn.Conv2d.forward)),
    ]
    for module in map(importlib.import_module, UNETS):
        found.append((module, "th", sd_hijack_unet.th))
        found.append((module.UNetModel, "forward", sd_unet.create_unet_forward(module.UNetModel.forward)))
    return found
