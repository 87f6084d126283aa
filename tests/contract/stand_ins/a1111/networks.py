"""Stands for A1111's extensions-builtin/Lora/networks.py. A layer's patched forward merges the loaded networks into its
weight, in place and with a backup, or adds them to its output (option lora_functional)."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from modules import shared
from torch import nn

loaded_networks: list[Any] = []


def network(name: str, strength: float, differences: dict[str, torch.Tensor]) -> Any:
    """A network of loaded_networks. differences: by a layer's name, what it adds to the layer's weight; by
    "<name>.bias", what it adds to its bias. A matrix becomes a LoRA, any other tensor a full difference."""
    net = SimpleNamespace(
        name=name, te_multiplier=1.0, unet_multiplier=strength, dyn_dim=None, differences=differences, modules={}
    )
    for layer, difference in differences.items():
        net.modules[layer] = (NetworkModuleLora if difference.dim() == 2 else NetworkModuleFull)(net, difference)
    return net


class NetworkModuleFull:
    """The part of a network for one layer: here a full difference of a convolution's weight."""

    def __init__(self, net: Any, difference: torch.Tensor) -> None:
        self.network = net
        self.difference = difference

    def multiplier(self) -> float:
        return float(self.network.unet_multiplier)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + nn.functional.conv2d(x, self.multiplier() * self.difference, padding="same")


class NetworkModuleLora(NetworkModuleFull):
    """The part of a plain LoRA for one linear layer. Its rank is the layer's input width: the down matrix is the
    identity, the up matrix 4 times the difference, and alpha / rank 1/4."""

    def __init__(self, net: Any, difference: torch.Tensor) -> None:
        super().__init__(net, difference)
        self.up_model, self.down_model = (nn.Linear(*reversed(difference.shape), bias=False) for _ in range(2))
        self.up_model.weight.data = 4 * difference
        self.down_model.weight.data = torch.eye(difference.shape[1])

    def calc_scale(self) -> float:
        return 0.25

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + self.up_model(self.down_model(x)) * self.multiplier() * self.calc_scale()


def network_apply_weights(layer: Any) -> None:
    name = layer.__dict__.get("network_layer_name")
    wanted = tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in loaded_networks)
    if name is None or layer.__dict__.get("network_current_names", ()) == wanted:
        return
    if layer.__dict__.get("network_weights_backup") is None:
        layer.network_weights_backup = {key: value.clone() for key, value in layer.named_parameters()}
    network_restore_weights_from_backup(layer)
    with torch.no_grad():
        for key in layer.network_weights_backup:
            parameter = layer.get_parameter(key)
            for net in loaded_networks:
                difference = net.differences.get(name if key == "weight" else f"{name}.{key}")
                if difference is not None:
                    # A layer in float8 may have its original weight in an attribute.
                    base = getattr(layer, f"fp16_{key}", parameter).to(difference.dtype)
                    parameter.copy_((base + net.unet_multiplier * difference).to(parameter.dtype))
    layer.network_current_names = wanted


def network_restore_weights_from_backup(layer: Any) -> None:
    with torch.no_grad():
        for key, backup in (layer.__dict__.get("network_weights_backup") or {}).items():
            layer.get_parameter(key).copy_(backup)


def network_forward(layer: Any, x: torch.Tensor, original: Any) -> torch.Tensor:
    """The output of a layer with the loaded networks computed beside it, after merged ones were removed from its
    weight. If none is loaded, merged ones stay in the weight, as in A1111."""
    if not loaded_networks:
        return original(layer, x)
    network_restore_weights_from_backup(layer)
    layer.network_current_names = ()
    layer.network_weights_backup = None
    y = original(layer, x)
    for net in loaded_networks:
        module = net.modules.get(layer.__dict__.get("network_layer_name"))
        if module is not None:
            y = module.forward(x, y)
    return y


def patched(original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if shared.opts.lora_functional:
            return network_forward(self, x, original)
        network_apply_weights(self)
        return original(self, x)

    return forward
