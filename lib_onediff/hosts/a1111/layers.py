"""LoRAs and casts of AUTOMATIC1111's WebUI. The WebUI applies LoRAs and casts in its patched forward of each layer,
which our forward does not call, so this file does the same.

LoRAs are merged lazily, or computed beside each layer (option lora_functional, "the old method"). Weights stored in
float8 are cast by torch.autocast, to float16 on a GPU and to bfloat16 on a CPU.
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
# The name of the WebUI's class for plain LoRAs, which have an up and a down matrix for a layer.
PLAIN_LORA = "NetworkModuleLora"
# See HostTraits.synced: the list of LoRAs that the patched forwards merge. merge_wanted_loras does that before each
# call. Every loaded LoRA adds new objects to the list.
SYNCED = frozenset({"networks.loaded_networks"})
# Attributes of a layer in which the WebUI keeps the names of merged LoRAs, and backups of the weights.
NOTED = frozenset({"network_current_names", "network_weights_backup", "network_bias_backup"})
# The attribute of the UNet to which token merging writes size, hooks and a random generator at each call.
WRITTEN = frozenset({"_tome_info"})
# The module of a1111-sd-webui-lycoris that patches the classes of torch's layers.
LYCORIS = "lyco_patches"
# A layer's network_current_names: a tuple for each merged LoRA.
MergedLoras = tuple[tuple[Any, ...], ...]


def lora_extension() -> Any:
    """The Python module of the WebUI's built-in LoRA extension; None if it is disabled."""
    extension = sys.modules.get("networks")
    return extension if hasattr(extension, "network_apply_weights") else None


def loaded_loras(on_the_fly: bool) -> Sequence[Any]:
    """The WebUI's loaded LoRAs (its Network objects), if it now applies them in this way; otherwise, or without the
    LoRA extension, an empty sequence. on_the_fly: True for computing them beside each layer (option lora_functional),
    False for merging them."""
    from modules import shared

    is_now = bool(getattr(shared.opts, "lora_functional", False))
    return getattr(lora_extension(), "loaded_networks", ()) if is_now is on_the_fly else ()


def wanted_loras() -> MergedLoras:
    """The LoRAs that should be merged now, as the WebUI would note them at a layer (network_current_names): name and
    strengths of each. () if none is loaded, or if LoRAs are computed on the fly. Used as HostTraits.wanted_lora."""
    merged = loaded_loras(on_the_fly=False)
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in merged)


def merge_wanted_loras(layers: Iterable[nn.Module]) -> None:
    """Make wanted_loras() the merged LoRAs of these layers, in place, as the WebUI's forward of each layer would: merge
    them where they are missing, and remove LoRAs that are merged and no longer wanted. Layers that have these already,
    or that the LoRA extension does not know, stay as they are. Used as HostTraits.sync_lora, before each call."""
    extension = lora_extension()
    wanted = wanted_loras()
    for layer in () if extension is None else layers:
        state = layer.__dict__
        if "network_layer_name" in state and state.get("network_current_names", ()) != wanted:
            if wanted:
                extension.network_apply_weights(layer)
            else:
                # Not by network_apply_weights, which would merge loaded LoRAs that are computed on the fly.
                extension.network_restore_weights_from_backup(layer)
                state["network_current_names"] = ()


def check_layers() -> None:
    """Raise Refusal, with the reason for users, if the WebUI or an extension now computes every layer in another way.
    """
    # The WebUI's manual cast sets this attribute on the classes of torch's layers while it is on.
    if hasattr(nn.Linear, "org_forward"):
        raise Refusal(
            "the WebUI converts the types of every layer itself (--precision half, fp8 with --no-half, or this kind "
            "of GPU)"
        )
    patched = getattr(sys.modules.get("modules.patches"), "originals", {})
    if patched.get(LYCORIS):
        raise Refusal(
            "a1111-sd-webui-lycoris computes every layer itself: uninstall it, the WebUI has LyCORIS built in since 1.5"
        )


class LorasOnTheFly:
    """The weights.scan.FunctionReader for LoRAs that the WebUI computes beside each layer."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether each call must look for LoRAs: whenever the WebUI's LoRA extension is enabled, because it does not
        announce a change of its option or list of LoRAs."""
        return lora_extension() is not None

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """The parts of which the LoRAs of these layers consist now (objects, strengths, tensors), with the indices of
        the layers that have LoRAs. Each call compares them with the last call's parts. Empty if no LoRA is computed on
        the fly."""
        parts = Parts()
        wanted = loaded_loras(on_the_fly=True)
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
        """The LoRAs of one of the layers that parts() found, as low-rank updates. Raises Refusal, with the reason for
        users, for a LoRA that is not a plain one."""
        wanted = loaded_loras(on_the_fly=True)
        return WeightFunctions(tuple(low_rank_update(layer, module) for module in modules_of(layer, wanted)))


def modules_of(layer: nn.Module, wanted: Iterable[Any]) -> list[Any]:
    """The modules of these LoRAs (wanted: from loaded_loras) for one layer of the UNet, one for each LoRA that changes
    the layer; [] if none does."""
    name = layer.__dict__.get("network_layer_name")
    return [net.modules[name] for net in wanted if name in net.modules]


def low_rank_update(layer: Any, module: Any) -> LowRankUpdate:
    """The product that a LoRA adds to a layer's weight, as two factors and a scale.

    module: the LoRA's module for this layer (modules_of). The forward of this module ignores other entries of the
        LoRA's file, and so do we. Raises Refusal, with the reason for users, if the module is not a plain LoRA, or if
        its matrices or padding do not fit the layer.
    """
    weight = layer.weight
    if type(module).__name__ == PLAIN_LORA and weight.dim() > 1:
        up = module.up_model.weight
        down = module.down_model.weight
        # The down convolution pads with zeros, so the layer must too, unless the kernel has one pixel.
        fits = down[0].numel() == weight[0].numel() and up.flatten(1).shape == (len(weight), len(down))
        if fits and (down[0, 0].numel() == 1 or layer.padding_mode == "zeros"):
            scale = module.multiplier() * module.calc_scale()
            return LowRankUpdate(up.flatten(1), down.view(len(down), *weight.shape[1:]), scale)
    raise Refusal(
        f"{module.network.name} is not a plain LoRA, and with the WebUI's old LoRA method OneDiff supports only plain "
        "ones: switch off 'Lora/Networks: use old method ...' (Settings, Compatibility)"
    )


def cast_to_computed(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which the WebUI casts these layers' weights for computing: autocast's if any of the layers has a
    float8 weight. None if none has: then nothing is cast. Used as weights.scan.Casts.to.

    layers: at least one. dtype: not used. Call it inside the host's autocast.
    """
    first: Any = layers[0]
    if not any(layer.weight.dtype in FLOAT8 for layer in layers):
        return None
    return autocast_dtype(first.weight.device.type)


# The WebUI does not store norms in float8, and does not cast them.
CASTS = Casts(cast_to_computed, norms=False)
