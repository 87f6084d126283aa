"""Reads the unmerged LoRAs of diffusers' networks, which peft puts around the networks' layers.

Such a layer (peft.tuners.lora.layer) has lora_A and lora_B, the factors by the adapter's name, and scaling, a number
for each adapter. Its forward adds the updates of the adapters in active_adapters. It adds no update while its adapters
are disabled, or while any adapter is merged into the weight.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.origins import is_lora, layer_within
from ...core.refusal import Refusal, unsupported_lora
from ...weights.scan import LowRankUpdate, Parts, WeightFunctions

# Attributes that must be equal for a convolution and the first factor of its LoRA.
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups")


class Factors(NamedTuple):
    """One LoRA's update of one layer: scaling * up(down(input)), before the pipeline's own scale.

    name: the adapter's, as peft calls a LoRA.
    down, up: the factors, which are layers themselves.
    scaling: a number, or a tensor if the pipeline has prepared its adapters for hot-swapping.
    """

    name: str
    down: Any
    up: Any
    scaling: float | Tensor


class LoraReader:
    """Reads the unmerged LoRAs of one network, so that our forward adds them; a weights.scan.FunctionReader.

    scale: the pipeline's factor for all LoRAs in the present call, cross_attention_kwargs["scale"]; see use_scale. 1
        before the first call. diffusers would write the factor to the layers during the call; OneDiff leaves the layers
        unchanged.
    """

    def __init__(self) -> None:
        self.scale = 1.0

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether LoRA layers are among these. Otherwise, a LoRA can only come with a change of the module tree, and
        calls need not look for one. See FunctionReader."""
        return bool(lora_indices(layers))

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """Everything that the active LoRAs of these layers compute with now: the indices of the layers, factors and
        scales. Every call compares its parts with the last call's, to find changes. Raises Refusal for a disabled LoRA
        that is fused into the weights."""
        parts = Parts(facts=[self.scale])
        for index in lora_indices(layers):
            layer: Any = layers[index]
            if layer._disable_adapters and layer.merged_adapters:
                raise Refusal(
                    "a LoRA is merged into the weights (fuse_lora) but switched off, so peft takes it out during this "
                    "call: call pipe.unfuse_lora() first"
                )
            factors = active_factors(layer)
            if factors:
                parts.indices.append(index)
            for name, down, up, scaling in factors:
                weights = up._parameters
                swapped = isinstance(scaling, Tensor)
                parts.objects += (down, up)
                parts.facts += (name, 0.0 if swapped else scaling, casts_inputs(layer))
                tensors: tuple[Any, ...] = (
                    down._parameters["weight"], weights["weight"], weights["bias"], scaling if swapped else None,
                )
                parts.tensors += [tensor for tensor in tensors if tensor is not None]
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What the active LoRAs add to this LoRA layer's weight and bias, with the pipeline's scale; nothing if no LoRA
        is active. Raises Refusal for an active LoRA that our forward cannot add, such as DoRA (refuse_unsupported)."""
        refuse_unsupported(layer)
        within: Any = layer_within(layer)
        updates: list[LowRankUpdate] = []
        biases: list[tuple[Tensor, float]] = []
        for _, down, up, scaling in active_factors(layer):
            scale = self.scale * float(scaling)
            updates.append(
                LowRankUpdate(up.weight.detach().flatten(1), down.weight.detach(), scale, in_own_type=True)
            )
            if up.bias is not None:
                biases.append((up.bias.detach(), scale))
        has_bias = bool(biases) and within.bias is not None
        return WeightFunctions(tuple(updates), bias=partial(with_biases, biases) if has_bias else None)

    def use_scale(self, unet: Any, scale: Any, are_attentions_ours: bool) -> None:
        """Set `scale` for the present call. If it is refused, the scale stays what it was.

        scale: the pipeline's. Raises Refusal for 0, infinity, NaN and anything but numbers. 1 is always accepted.
            Any other number is refused if only diffusers can apply it: if the UNet has a LoRA in a layer that some
            releases compute before they set the scale, or any LoRA while are_attentions_ours is False.
        are_attentions_ours: whether our forward computes all attentions. If not, attention modules of the host run too,
            and would not apply the scale.
        """
        if not isinstance(scale, Real) or not math.isfinite(scale) or scale == 0:
            # After a scale of 0, diffusers cannot restore the adapters' weights.
            raise Refusal(
                "the pipeline's LoRA scale is 0 or not a finite number: set another scale, or call "
                "pipe.disable_lora() to use no LoRA"
            )
        if scale != 1:
            # Some releases of diffusers set the scale only after they have computed these layers.
            early = [unet.conv_in, *unet.time_embedding.children()]
            if unet.config.addition_embed_type is not None:
                early += unet.add_embedding.children()
            if any(is_lora(type(layer)) for layer in (early if are_attentions_ours else unet.modules())):
                raise Refusal(
                    "the pipeline sets a LoRA scale, which only diffusers can apply to some of these LoRAs: set the "
                    "scale by pipe.set_adapters() instead"
                )
        self.scale = float(scale)


def with_biases(biases: Sequence[tuple[Tensor, float]], bias: Tensor) -> Tensor:
    """A layer's bias plus the biases of its LoRAs, as a new tensor. biases: (a LoRA's bias, the factor by which it is
    multiplied), at least one pair."""
    return sum((scale * part.to(bias) for part, scale in biases), start=bias)


def lora_indices(layers: Sequence[nn.Module]) -> list[int]:
    """The indices of the LoRA layers among these layers. Every call runs this: for an SDXL UNet without LoRA layers, it
    takes 20 microseconds."""
    kinds = {kind for kind in set(map(type, layers)) if is_lora(kind)}
    return [index for index, layer in enumerate(layers) if type(layer) in kinds] if kinds else []


def active_factors(layer: Any) -> list[Factors]:
    """The updates that a LoRA layer's forward would add now, in the order in which it adds them; [] if no LoRA is
    active, if its LoRAs are disabled, or if one of them is merged."""
    # Reads the attributes behind the properties disable_adapters and active_adapters, because this runs for every layer
    # at every call.
    if layer._disable_adapters or layer.merged_adapters:
        return []
    active = layer._active_adapter
    parts = layer._modules
    scaling = layer.scaling
    downs = parts["lora_A"]._modules
    ups = parts["lora_B"]._modules
    names = (active,) if isinstance(active, str) else active
    return [Factors(name, downs[name], ups[name], scaling[name]) for name in names if name in downs]


def refuse_unsupported(layer: Any) -> None:
    """Raise Refusal if our forward cannot add an active LoRA of this LoRA layer: it is of another kind, such as DoRA,
    or its shapes, dtype, bias or convolution do not fit the layer."""
    within: Any = layer_within(layer)
    for name, down, up, _ in active_factors(layer):
        # Older releases of peft have use_dora instead of lora_variant.
        variant = getattr(layer, "lora_variant", {}).get(name)
        if variant is not None or getattr(layer, "use_dora", {}).get(name):
            kind = "DoRA" if variant is None else type(variant).__name__
            raise Refusal(
                f"the LoRA {name} is of a kind that OneDiff does not support ({kind}): merge it (pipe.fuse_lora())"
            )
        one = down.weight
        other = up.weight
        fits = one.shape[1:] == within.weight.shape[1:] and other.flatten(1).shape == (len(within.weight), len(one))
        if isinstance(within, nn.Conv2d):
            names = GEOMETRY if within.padding == (0, 0) else (*GEOMETRY, "padding_mode")
            fits = fits and all(getattr(down, name) == getattr(within, name) for name in names)
        if one.dtype != within.weight.dtype and not casts_inputs(layer):
            raise unsupported_lora(
                f"peft may not convert the input of {name} to its dtype (disable_input_dtype_casting)"
            )
        # Our forward cannot add a LoRA's bias to a layer without one; and peft adds a bias in a narrower dtype to the
        # product in that dtype, which rounds both.
        is_narrow = torch.finfo(one.dtype).eps > torch.finfo(within.weight.dtype).eps
        is_odd = up.bias is not None and (within.bias is None or is_narrow)
        if not fits or down.bias is not None or is_odd:
            raise Refusal(
                f"OneDiff cannot add the LoRA {name}, because its shapes or biases are unusual: merge it "
                "(pipe.fuse_lora())"
            )


def casts_inputs(layer: Any) -> bool:
    """Whether peft casts the input of a LoRA layer to the LoRA's dtype. Where it does not, peft fails for an input of
    another dtype. True for releases of peft without this option."""
    return bool(getattr(layer, "cast_input_dtype_enabled", True))
