"""A1111's LoRA: merged in place, from a backup, by each layer's own patched forward."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

loaded_networks: list[Any] = []


def network(name: str, strength: float, differences: dict[str, torch.Tensor]) -> Any:
    return SimpleNamespace(
        name=name, te_multiplier=1.0, unet_multiplier=strength, dyn_dim=None, differences=differences
    )


def network_apply_weights(layer: Any) -> None:
    name = layer.__dict__.get("network_layer_name")
    wanted = tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in loaded_networks)
    if name is None or layer.__dict__.get("network_current_names", ()) == wanted:
        return
    if "network_weights_backup" not in layer.__dict__:
        layer.network_weights_backup = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.copy_(layer.network_weights_backup)
        for net in loaded_networks:
            if name in net.differences:
                layer.weight += net.unet_multiplier * net.differences[name]
    layer.network_current_names = wanted


def patched(original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        network_apply_weights(self)
        return original(self, x)

    return forward
