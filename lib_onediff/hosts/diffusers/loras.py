"""The LoRAs that diffusers puts around a UNet's layers by peft, while they are not merged.

Such a layer (peft.tuners.lora.layer) has lora_A and lora_B, the factors by adapter, and scaling, a number for each. It
adds what active_adapters names of those, and nothing while it is disabled, or while any adapter is merged.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.origins import is_lora, layer_within
from ...core.refusal import Refusal
from ...weights.scan import Change, LowRankUpdate, Parts, WeightFunctions

# What of a convolution and of a LoRA's first factor has to be the same.
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups")


class Factors(NamedTuple):
    """What one adapter adds to one layer. scaling: a number; a tensor once adapters are to be swapped."""

    name: str
    down: Any
    up: Any
    scaling: float | Tensor


class LoraReader:
    """weights.scan.FunctionReader of one UNet.

    scale: what the pipeline multiplies all LoRAs by, cross_attention_kwargs["scale"]. The host writes that into its
    layers for the time of a call; we leave them as they are.
    """

    def __init__(self) -> None:
        self.scale = 1.0

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        return bool(around(layers))

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        parts = Parts(facts=[self.scale])
        for index in around(layers):
            layer: Any = layers[index]
            if layer._disable_adapters and layer.merged_adapters:
                raise Refusal("peft takes a merged LoRA that was disabled out of the weights in this call")
            factors = at_work(layer)
            if factors:
                parts.indices.append(index)
            for name, down, up, scaling in factors:
                weights, swapped = up._parameters, isinstance(scaling, Tensor)
                parts.objects += (down, up)
                parts.facts += (name, 0.0 if swapped else scaling, casts_inputs(layer))
                tensors: tuple[Any, ...] = (
                    down._parameters["weight"], weights["weight"], weights["bias"], scaling if swapped else None,
                )
                parts.tensors += [tensor for tensor in tensors if tensor is not None]
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        refuse_others(layer)
        within: Any = layer_within(layer)
        updates: list[LowRankUpdate] = []
        biases: list[tuple[Tensor, float]] = []
        for _, down, up, scaling in at_work(layer):
            scale = self.scale * float(scaling)
            one, other = down.weight.detach(), up.weight.detach()
            updates.append(LowRankUpdate(other.flatten(1), one, scale, in_own_type=True))
            if up.bias is not None:
                biases.append((up.bias.detach(), scale))
        added: Change = lambda bias: sum((scale * part.to(bias) for part, scale in biases), start=bias)  # noqa: E731
        return WeightFunctions(tuple(updates), bias=added if biases and within.bias is not None else None)

    def use_scale(self, unet: Any, scale: Any, whole: bool) -> None:
        """Have all LoRAs of the UNet computed times the scale of this call. Raises Refusal where the host has to.
        whole: whether no attention is computed by the host's modules, which do not know the scale."""
        if not isinstance(scale, Real) or not math.isfinite(scale) or scale == 0:
            # diffusers forgets the weights of adapters after a scale of 0.
            raise Refusal("the pipeline's LoRA scale is 0 or not a number")
        if scale != 1:
            # Some releases of diffusers begin to scale after these.
            early = [unet.conv_in, *unet.time_embedding.children()]
            if unet.config.addition_embed_type is not None:
                early += unet.add_embedding.children()
            if any(is_lora(type(layer)) for layer in (early if whole else unet.modules())):
                raise Refusal("the pipeline scales LoRAs, and diffusers computes some of them")
        self.scale = float(scale)


def around(layers: Sequence[nn.Module]) -> list[int]:
    """The indices of LoRAs among these; most often there are none: 20 microseconds for SDXL."""
    kinds = {kind for kind in set(map(type, layers)) if is_lora(kind)}
    return [index for index, layer in enumerate(layers) if type(layer) in kinds] if kinds else []


def at_work(layer: Any) -> list[Factors]:
    """What a LoRA's forward adds now, in its order."""
    # As disable_adapters and active_adapters, without their properties: this is asked of every layer at every call.
    if layer._disable_adapters or layer.merged_adapters:
        return []
    active, parts, scaling = layer._active_adapter, layer._modules, layer.scaling
    downs, ups = parts["lora_A"]._modules, parts["lora_B"]._modules
    names = (active,) if isinstance(active, str) else active
    return [Factors(name, downs[name], ups[name], scaling[name]) for name in names if name in downs]


def refuse_others(layer: Any) -> None:
    """Raise Refusal where a LoRA layer does something else now than to add plain LoRAs."""
    within: Any = layer_within(layer)
    for name, down, up, _ in at_work(layer):
        # Releases of peft before lora_variant have the other.
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None or getattr(layer, "use_dora", {}).get(name):
            kind = "DoRA" if variant is None else type(variant).__name__
            raise Refusal(f"the LoRA {name} is not a plain one ({kind})")
        one, other = down.weight, up.weight
        fits = one.shape[1:] == within.weight.shape[1:] and other.flatten(1).shape == (len(within.weight), len(one))
        if isinstance(within, nn.Conv2d):
            names = GEOMETRY if within.padding == (0, 0) else (*GEOMETRY, "padding_mode")
            fits = fits and all(getattr(down, name) == getattr(within, name) for name in names)
        if one.dtype != within.weight.dtype and not casts_inputs(layer):
            raise Refusal(f"peft does not cast what the LoRA {name} takes to its type (disable_input_dtype_casting)")
        # Where a layer has no bias, ours has no place for a LoRA's; one of a narrower type is rounded with the product.
        is_narrow = torch.finfo(one.dtype).eps > torch.finfo(within.weight.dtype).eps
        is_odd = up.bias is not None and (within.bias is None or is_narrow)
        if not fits or down.bias is not None or is_odd:
            raise Refusal(f"the LoRA {name} is built in a way that OneDiff does not know")


def casts_inputs(layer: Any) -> bool:
    """Whether peft casts what a LoRA takes to the LoRA's own type, and does not leave a mismatch to fail."""
    return bool(getattr(layer, "cast_input_dtype_enabled", True))
