"""Reads the functions that WebUIs of the Forge family apply to a layer's weights at each use: LoRAs that are not
merged, which are in attributes of the layer.

Forge has lists of patches, by parameter (forge_online_loras). Forge Neo and ldm_patched, like ComfyUI, have lists of
functions (weight_function, bias_function). The WebUI's own functions apply a list of patches: the one that the model
patcher has for the function's key, or (Neo 2.29 and later) one of the function's own.

A patch is (strength, value, strength of the model, offset, function, ...). For a plain LoRA, value is
("lora", (up, down, alpha, mid, dora scale, ...)), or an object with name = "lora" and weights = (up, down, ...).
"""
from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...weights.scan import APPLIED_AT_CALL, Change, LowRankUpdate, Parts, WeightFunctions
from .stored_weights import ALWAYS_CAST

# The attributes of a layer with functions and patches; see the module's docstring.
WEIGHT_FUNCTION, BIAS_FUNCTION, ONLINE_LORAS = APPLIED_AT_CALL
# The name of a plain LoRA in a patch's value.
LORA = "lora"
# Strength, value, strength of the model, offset, function; some WebUIs append others.
PARTS_OF_A_PATCH = 5
# The types of values that are equal only if they mean the same, so that parts() compares them by value.
VALUE_TYPES = frozenset({type(None), bool, int, float, str})
# Attributes of a layer: if one is True, the layer casts its parameters at each use.
CASTS = ("parameters_manual_cast", "ldm_patched_cast_weights")
# See HostTraits.placed. The attributes in CASTS are placed too, because the WebUI also sets them on layers whose
# weights stay in main memory: it brings such a weight to the GPU by a cast to the weight's own dtype.
PLACED = frozenset({*CASTS, *(f"prev_{name}" for name in CASTS), "forge_patched_weights", "forge_force_cast_weights"})


class LayerFunctions:
    """Reads the functions that WebUIs of the Forge family apply to the weights of layers, as a
    weights.scan.FunctionReader."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """True: each call must look for functions, because the WebUI may set the attributes of any layer at any time.
        See FunctionReader."""
        return True

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """Everything that the functions of these layers compute with now, such as the tensors and strengths of LoRAs,
        and the indices of the layers with functions. Every call compares its parts with the last call's. See
        FunctionReader."""
        parts = Parts(applied_to(layers))
        for index in parts.indices:
            for name in APPLIED_AT_CALL:
                add_parts(layers[index].__dict__.get(name), parts)
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        """The functions that the host applies to this layer's weight and bias. The weight's are LoRA updates if all of
        them are plain LoRAs; otherwise one function, which applies the LoRAs too. Never raises Refusal: a function of
        an extension is called as it is, and its result is not kept for the next call (lasting). See FunctionReader."""
        own: Any = layer.__dict__
        on_weight: list[Any] = list(own.get(WEIGHT_FUNCTION) or ())
        on_bias: list[Any] = list(own.get(BIAS_FUNCTION) or ())
        loras = own.get(ONLINE_LORAS) or {}
        known = list(map(patches_of, on_weight))
        # A function of an extension may return another result at every call.
        lasting = None not in (*known, *map(patches_of, on_bias))
        patches = [*chain.from_iterable(filter(None, known)), *(loras.get("weight") or ())]
        updates = [update for patch in patches if (update := low_rank_update(patch, layer.weight)) is not None]
        are_all = None not in known and len(updates) == len(patches)
        for functions, name in ((on_weight, "weight"), (on_bias, "bias")):
            if loras.get(name):
                functions.append(merging(loras[name]))
        return WeightFunctions(
            tuple(updates) if are_all else (), None if are_all else composed(on_weight), composed(on_bias), lasting
        )


def patches_of(function: Any) -> list[Any] | None:
    """The list of patches that one of the WebUI's own functions applies now. Such a function has the attributes patches
    and key, or the attribute patch. None for any other function, such as an extension's, and if the list is empty."""
    by_key = getattr(function, "patches", None)
    key = getattr(function, "key", None)
    found = by_key.get(key) if isinstance(by_key, Mapping) else getattr(function, "patch", None)
    return found if isinstance(found, list) and found and all(map(is_patch, found)) else None


def is_patch(value: Any) -> bool:
    """Whether a value has the form of one of the WebUI's patches: a list or tuple of PARTS_OF_A_PATCH or more parts."""
    return isinstance(value, (list, tuple)) and len(value) >= PARTS_OF_A_PATCH


def cast_to_input(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which the host casts the parameters of these layers for inputs of this dtype: `dtype` itself if all
    of them cast; None if any does not. See Casts.to.

    In a network with weights in few bits, the norms' parameters may be in float32, and are not cast: the host
    multiplies by them in float32 and rounds the product once. Such norms do not count here. Casting their parameters to
    16 bits does not change them if they come from a 16-bit file.
    """
    is_in_few_bits = any(type(layer).__qualname__ in ALWAYS_CAST for layer in layers)
    return dtype if all(casts(layer) or (is_in_few_bits and has_only_vectors(layer)) for layer in layers) else None


def has_only_vectors(layer: nn.Module) -> bool:
    """Whether all parameters of a layer are vectors (one dimension), as a norm's are; True without parameters."""
    return all(one is None or one.dim() == 1 for one in layer._parameters.values())


def casts(layer: nn.Module) -> bool:
    """Whether the host casts a layer's parameters to the dtype of its input at each use, by the flags in CASTS or the
    layer's class."""
    return any(getattr(layer, name, False) for name in CASTS) or type(layer).__qualname__ in ALWAYS_CAST


def applied_to(layers: Sequence[nn.Module]) -> list[int]:
    """The indices of the layers whose attributes have functions or patches. Every call runs this: for an SDXL UNet
    without functions, it takes a tenth of a millisecond."""
    states = [layer.__dict__ for layer in layers]
    return [
        index for index, state in enumerate(states)
        if state.get(WEIGHT_FUNCTION) or state.get(BIAS_FUNCTION) or state.get(ONLINE_LORAS)
    ]


def add_parts(value: Any, parts: Parts) -> None:
    """Add everything that a value in a layer's attribute consists of to `parts`, in place: numbers, names and lengths
    to parts.facts, tensors to parts.tensors, functions and other objects to parts.objects. In place of one of the
    WebUI's own functions, the patches that it applies (patches_of)."""
    kind = type(value)
    if kind in VALUE_TYPES:
        parts.facts.append(value)
    elif kind in (tuple, list):
        parts.facts.append(len(value))
        for part in value:
            add_parts(part, parts)
    elif isinstance(value, Tensor):
        parts.tensors.append(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            parts.facts.append(name)
            add_parts(part, parts)
    elif (patches := patches_of(value)) is not None:
        add_parts(patches, parts)
    else:
        parts.objects.append(value)
        add_parts(getattr(value, "weights", None), parts)


def low_rank_update(patch: Sequence[Any], weight: Any) -> LowRankUpdate | None:
    """The plain LoRA that a patch adds to a weight. None for any other patch, such as DoRA or LoHa, for a patch that
    also scales the weight itself or has a function, and for a LoRA whose shapes do not fit.

    patch: see the module's docstring. weight: the layer's; only its shape is read. A weight in few bits has the decoded
    weight's shape.
    """
    strength, value, strength_of_model, offset, function = patch[:PARTS_OF_A_PATCH]
    if strength_of_model != 1.0 or function is not None:
        return None
    parts = None
    if isinstance(value, tuple) and len(value) == 2 and value[0] == LORA:
        parts = value[1]
    elif getattr(value, "name", None) == LORA:
        parts = value.weights
    if parts is None:
        return None
    # others: a middle matrix, the scale of DoRA, a size to pad to.
    up, down, alpha, *others = parts
    rows, *row = weight.shape
    if any(other is not None for other in others) or not row:
        return None
    axis, first, count = (0, 0, rows) if offset is None else offset
    if axis != 0 or up.flatten(1).shape != (count, down.shape[0]) or down[0].numel() != math.prod(row):
        return None
    scale = strength * (1.0 if alpha is None else float(alpha) / down.shape[0])
    # The LoRA may be for some rows of the weight, such as the keys' in a joint projection. The other rows get zeros.
    of_all_rows = functional.pad(up.flatten(1), (0, 0, first, rows - first - count))
    return LowRankUpdate(of_all_rows, down.reshape(down.shape[0], *row), scale)


def merging(patches: Sequence[Any]) -> Change:
    """A function that returns a given parameter with these patches applied, by Forge's own code, as Forge does at each
    use. May write to its argument."""
    merge: Any = importlib.import_module("backend.patcher.lora").merge_lora_to_weight
    return lambda weight: merge(
        patches=patches, weight=weight, key="a LoRA on the fly", computation_dtype=weight.dtype
    )


def composed(functions: Sequence[Callable[[Tensor], Tensor]]) -> Change | None:
    """A function of a parameter that applies these functions, each to the previous function's result; None if there are
    no functions."""
    return (lambda parameter: reduce(lambda value, change: change(value), functions, parameter)) if functions else None
