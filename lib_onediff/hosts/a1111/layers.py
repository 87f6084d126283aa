"""What AUTOMATIC1111's WebUI does to a UNet's layers, each in its own patched forward, and has to be asked for as our
forward calls none of them: LoRAs are merged lazily, and weights that are stored in float8 are cast by torch.autocast,
to float16 on a GPU and to bfloat16 on a CPU.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.precision import autocast_dtype
from ...core.refusal import Refusal
from ...weights.offload import restore_before
from ...weights.weight_functions import Casts

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What network_apply_weights compares a layer's network_current_names with: a tuple for each network.
Networks = tuple[tuple[Any, ...], ...]


def loras() -> Any:
    """The built-in LoRA extension; None where it is switched off."""
    extension = sys.modules.get("networks")
    return extension if hasattr(extension, "network_apply_weights") else None


def wanted_networks() -> Networks:
    """What apply_wanted_networks brings layers up to; empty where LoRA is switched off."""
    loaded = getattr(loras(), "loaded_networks", ())
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in loaded)


def apply_wanted_networks(layers: Iterable[nn.Module]) -> None:
    """Merge the wanted networks into every layer that does not hold them yet, and take others out."""
    extension, wanted = loras(), wanted_networks()
    for layer in () if extension is None else layers:
        if holds_others(layer, wanted):
            restore_before(layer)
            extension.network_apply_weights(layer)


def holds_others(layer: nn.Module, wanted: Networks) -> bool:
    state = layer.__dict__
    return "network_layer_name" in state and state.get("network_current_names", ()) != wanted


def check_layers() -> None:
    """Raise Refusal where the WebUI computes something beside every layer now, and not in its weights."""
    from modules import shared

    if getattr(shared.opts, "lora_functional", False) and wanted_networks():
        raise Refusal(
            "LoRA is set to the old method (Settings, Compatibility), which runs beside every layer"
        )
    # What the WebUI's manual cast leaves on the classes of torch's layers while it is on.
    if hasattr(nn.Linear, "org_forward"):
        raise Refusal(
            "the WebUI casts what every layer computes with itself (this kind of GPU, --precision, fp8 with --no-half)"
        )


def cast_to_computed(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The type in which layers with weights in float8 compute now; to be asked in the host's modes."""
    first: Any = layers[0]
    if not any(layer.weight.dtype in FLOAT8 for layer in layers):
        return None
    return autocast_dtype(first.weight.device.type)


# Norms are stored as the whole UNet was before, and used so, in bfloat16 too.
CASTS = Casts(cast_to_computed, norms=False)
