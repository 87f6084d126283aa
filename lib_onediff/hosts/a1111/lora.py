"""AUTOMATIC1111's LoRA: merged into a layer's weights lazily, by the layer's own patched forward.

Our forward does not call the layers' forwards, so the merge is asked for here, as extensions-builtin/Lora's
network_*_forward would: for every layer whose applied networks are not the wanted ones.
"""
from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn

from ...model.offload import restore_before
from .casts import cast_by_hand

log = logging.getLogger("onediff")


def lora_module() -> ModuleType | None:
    """The built-in LoRA extension; None where it is switched off."""
    networks = sys.modules.get("networks")
    return networks if hasattr(networks, "network_apply_weights") else None


def why_functional() -> str | None:
    """One line if a LoRA is chosen, where the WebUI computes it beside every layer instead of merging it; else None."""
    networks = lora_module()
    if networks is not None and networks.loaded_networks:
        return "LoRA is set to the old method (Settings, Compatibility), which runs beside every layer"
    return None


def apply_wanted_networks(layers: Iterable[nn.Module]) -> None:
    """Merge the wanted networks into every layer that does not hold them yet, and take others out."""
    networks = lora_module()
    if networks is None:
        return
    wanted = wanted_names(networks)
    began = time.perf_counter()
    stale = [layer for layer in layers if holds_others(layer, wanted)]
    for layer in stale:
        restore_before(layer)
        with cast_by_hand(layer):
            networks.network_apply_weights(layer)
    if stale:
        names = ", ".join(f"{name[0]} {name[2]}" for name in wanted) or "none"
        log.debug("LoRA: %s, %d layers in %.0f ms", names, len(stale), (time.perf_counter() - began) * 1e3)


def wanted_networks() -> tuple[tuple[Any, ...], ...]:
    """What apply_wanted_networks brings layers up to; empty where LoRA is switched off."""
    networks = lora_module()
    return () if networks is None else wanted_names(networks)


def wanted_names(networks: Any) -> tuple[tuple[Any, ...], ...]:
    """What network_apply_weights compares a layer's network_current_names with."""
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in networks.loaded_networks)


def holds_others(layer: nn.Module, wanted: tuple[tuple[Any, ...], ...]) -> bool:
    state = layer.__dict__
    return "network_layer_name" in state and state.get("network_current_names", ()) != wanted
