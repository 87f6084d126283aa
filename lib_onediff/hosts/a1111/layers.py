"""What AUTOMATIC1111's WebUI does to a UNet's layers, each in its own patched forward, and has to be asked for as our
forward calls none of them: LoRAs are merged lazily, or computed beside each layer (lora_functional, "the old method"),
and weights that are stored in float8 are cast by torch.autocast, to float16 on a GPU and to bfloat16 on a CPU.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...core.precision import autocast_dtype
from ...core.refusal import Refusal
from ...weights.scan import Casts, LowRankUpdate, Parts, WeightFunctions

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN_LORA = "NetworkModuleLora"
# The networks that the patched forwards of layers merge into weights. apply_wanted_networks merges them before each
# call, so they count as weights; each LoRA that is loaded puts new objects there.
SYNCED = frozenset({"networks.loaded_networks"})
# What the WebUI notes on a layer of the LoRAs that are merged into it.
NOTED = frozenset({"network_current_names", "network_weights_backup", "network_bias_backup"})
# What token merging notes on the UNet at each call: size, hooks and a random generator.
WRITTEN = frozenset({"_tome_info"})
# The module by which a1111-sd-webui-lycoris patches the classes of torch's layers.
LYCORIS = "lyco_patches"
# What network_apply_weights compares a layer's network_current_names with: a tuple for each network.
Networks = tuple[tuple[Any, ...], ...]


def loras() -> Any:
    """The built-in LoRA extension; None where it is switched off."""
    extension = sys.modules.get("networks")
    return extension if hasattr(extension, "network_apply_weights") else None


def networks(on_the_fly: bool) -> Sequence[Any]:
    """The loaded LoRAs, where the WebUI applies them in this way now; none where it applies them in the other."""
    from modules import shared

    is_now = bool(getattr(shared.opts, "lora_functional", False))
    return getattr(loras(), "loaded_networks", ()) if is_now is on_the_fly else ()


def wanted_networks() -> Networks:
    """What apply_wanted_networks brings layers up to; empty where nothing is merged."""
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in networks(on_the_fly=False))


def apply_wanted_networks(layers: Iterable[nn.Module]) -> None:
    """Merge the wanted networks into every layer that does not hold them yet, and take others out."""
    extension, wanted = loras(), wanted_networks()
    for layer in () if extension is None else layers:
        state = layer.__dict__
        if "network_layer_name" in state and state.get("network_current_names", ()) != wanted:
            if wanted:
                extension.network_apply_weights(layer)
            else:
                # What network_apply_weights asks for may be loaded, and applied on the fly.
                extension.network_restore_weights_from_backup(layer)
                state["network_current_names"] = ()


def check_layers() -> None:
    """Raise Refusal where the WebUI computes something beside every layer now, and not in its weights."""
    # What the WebUI's manual cast leaves on the classes of torch's layers while it is on.
    if hasattr(nn.Linear, "org_forward"):
        raise Refusal(
            "the WebUI casts what every layer computes with itself (this kind of GPU, --precision, fp8 with --no-half)"
        )
    patched = getattr(sys.modules.get("modules.patches"), "originals", {})
    if patched.get(LYCORIS):
        raise Refusal(
            "a1111-sd-webui-lycoris computes every layer itself: uninstall it, the WebUI has LyCORIS built in since 1.5"
        )


class LorasOnTheFly:
    """weights.scan.FunctionReader of the LoRAs that the WebUI computes beside each layer."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Of the option and of the list of loaded LoRAs nobody tells."""
        return loras() is not None

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        parts, wanted = Parts(), networks(on_the_fly=True)
        for index, layer in enumerate(layers) if wanted else ():
            modules = modules_of(layer, wanted)
            if modules:
                parts.indices.append(index)
                parts.objects += modules
                parts.facts += [module.multiplier() for module in modules]
                factors = (vars(module).get(name) for module in modules for name in ("up_model", "down_model"))
                parts.tensors += [factor.weight for factor in factors if factor is not None]
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        wanted = networks(on_the_fly=True)
        return WeightFunctions(tuple(low_rank_update(layer, module) for module in modules_of(layer, wanted)))


def modules_of(layer: nn.Module, wanted: Iterable[Any]) -> list[Any]:
    """What these LoRAs have for a layer."""
    name = layer.__dict__.get("network_layer_name")
    return [net.modules[name] for net in wanted if name in net.modules]


def low_rank_update(layer: Any, module: Any) -> LowRankUpdate:
    """As its forward computes it: whatever else its file holds for the layer does not count in this way. Raises Refusal
    where it is no plain LoRA."""
    weight = layer.weight
    if type(module).__name__ == PLAIN_LORA and weight.dim() > 1:
        up, down = module.up_model.weight, module.down_model.weight
        # The way down pads with zeros.
        fits = down[0].numel() == weight[0].numel() and up.flatten(1).shape == (len(weight), len(down))
        if fits and (down[0, 0].numel() == 1 or layer.padding_mode == "zeros"):
            scale = module.multiplier() * module.calc_scale()
            return LowRankUpdate(up.flatten(1), down.view(len(down), *weight.shape[1:]), scale)
    raise Refusal(
        f"the LoRA {module.network.name} is applied by the old method (Settings, Compatibility), and is no plain one"
    )


def cast_to_computed(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The type in which layers with weights in float8 compute now; to be asked in the host's modes."""
    first: Any = layers[0]
    if not any(layer.weight.dtype in FLOAT8 for layer in layers):
        return None
    return autocast_dtype(first.weight.device.type)


# Norms are stored as the whole UNet was before, and used so, in bfloat16 too.
CASTS = Casts(cast_to_computed, norms=False)
