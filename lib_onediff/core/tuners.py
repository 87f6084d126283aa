"""What peft puts in the place of a layer, around it: its plain LoRAs, as diffusers loads them."""
from __future__ import annotations

from torch import nn

# Of these classes, everything that a layer adds to the one within is in its attributes.
LORAS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.layer", "Conv2d")}
WITHIN = "base_layer"


def is_lora(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) in LORAS


def layer_within(module: nn.Module) -> nn.Module:
    """The layer around which a LoRA is; the module itself where there is none."""
    within = module._modules.get(WITHIN) if is_lora(type(module)) else None
    return module if within is None else within
