"""A1111's LoRA: merged in place, from a backup, by each layer's own patched forward."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

loaded_networks: list[Any] = []


def network(name: str, strength: float, differences: dict[str, torch.Tensor]) -> Any:
    """differences: what it adds, by the layer's name for the weight, and by that and ".bias"."""
    return SimpleNamespace(
        name=name, te_multiplier=1.0, unet_multiplier=strength, dyn_dim=None, differences=differences
    )


def network_apply_weights(layer: Any) -> None:
    name = layer.__dict__.get("network_layer_name")
    wanted = tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in loaded_networks)
    if name is None or layer.__dict__.get("network_current_names", ()) == wanted:
        return
    if layer.__dict__.get("network_weights_backup") is None:
        layer.network_weights_backup = {key: value.clone() for key, value in layer.named_parameters()}
    with torch.no_grad():
        for key, backup in layer.network_weights_backup.items():
            parameter = layer.get_parameter(key)
            parameter.copy_(backup)
            for net in loaded_networks:
                difference = net.differences.get(name if key == "weight" else f"{name}.{key}")
                if difference is not None:
                    # Of a layer in float8, the weight as it was may be kept beside it.
                    base = getattr(layer, f"fp16_{key}", parameter).to(difference.dtype)
                    parameter.copy_((base + net.unet_multiplier * difference).to(parameter.dtype))
    layer.network_current_names = wanted


def patched(original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        network_apply_weights(self)
        return original(self, x)

    return forward
