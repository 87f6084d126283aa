"""What the Forge family applies to a layer's weights at each use: LoRAs that are not merged, in its layers' attributes.

Forge keeps a list of patches by parameter (forge_online_loras); Forge Neo and ldm_patched, as ComfyUI, lists of
functions (weight_function, bias_function), of which the host's own apply a list of patches. A patch is strength, what
it is, strength of the model, offset, function, ...; a plain LoRA is ("lora", (up, down, alpha, mid, dora scale, ...)),
or an object with that as its weights.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ...weights.scan import APPLIED_AT_CALL
from ...weights.weight_functions import Change, LowRankUpdate, Parts, WeightFunctions

WEIGHT_FUNCTION, BIAS_FUNCTION, ONLINE_LORAS = APPLIED_AT_CALL
PATCH_FUNCTION = "LowVramPatch"
PLAIN = frozenset({type(None), bool, int, float, str})
CASTS = ("parameters_manual_cast", "ldm_patched_cast_weights")


class LayerFunctions:
    """weights.weight_functions.FunctionReader for hosts of the Forge family."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """The host writes into attributes that nobody else looks at."""
        return True

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        parts = Parts(applied_to(layers))
        for place in parts.places:
            for name in APPLIED_AT_CALL:
                take_apart(layers[place].__dict__.get(name), parts)
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        own: Any = layer.__dict__
        weight: Any = layer.weight
        on_weight, on_bias = (list[Any](own.get(name) or ()) for name in (WEIGHT_FUNCTION, BIAS_FUNCTION))
        loras = own.get(ONLINE_LORAS) or {}
        updates = None
        if all(map(has_patches, on_weight)):
            patches = [patch for function in on_weight for patch in function.patches[function.key]]
            updates = low_rank_updates([*patches, *(loras.get("weight") or ())], weight)
        lasting = all(map(has_patches, (*on_weight, *on_bias)))
        for functions, name in ((on_weight, "weight"), (on_bias, "bias")):
            if loras.get(name):
                functions.append(merging(loras[name]))
        return WeightFunctions(
            updates or (), None if updates is not None else in_turn(on_weight), in_turn(on_bias), lasting
        )


def has_patches(function: Any) -> bool:
    """Whether a function is the host's own, which applies the patches that its patcher has for a key."""
    return type(function).__name__ == PATCH_FUNCTION


def cast_to_input(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The type to which these layers cast their parameters: all of them to their inputs', or the UNet is the host's."""
    return dtype if all(any(getattr(layer, name, False) for name in CASTS) for layer in layers) else None


def applied_to(layers: Sequence[nn.Module]) -> list[int]:
    """The places of the layers to which something is applied; most often none: a tenth of a millisecond for SDXL."""
    states = [layer.__dict__ for layer in layers]
    return [
        place for place, state in enumerate(states)
        if state.get(WEIGHT_FUNCTION) or state.get(BIAS_FUNCTION) or state.get(ONLINE_LORAS)
    ]


def take_apart(given: Any, parts: Parts) -> None:
    """Add what something consists of."""
    kind = type(given)
    if kind in PLAIN:
        parts.facts.append(given)
    elif kind in (tuple, list):
        parts.facts.append(len(given))
        for part in given:
            take_apart(part, parts)
    elif isinstance(given, Tensor):
        parts.tensors.append(given)
    elif has_patches(given):
        take_apart(given.patches.get(given.key), parts)
    elif isinstance(given, Mapping):
        for name, part in given.items():
            parts.facts.append(name)
            take_apart(part, parts)
    else:
        parts.objects.append(given)
        take_apart(getattr(given, "weights", None), parts)


def low_rank_updates(patches: Sequence[Any], weight: Tensor) -> tuple[LowRankUpdate, ...] | None:
    """The patches of a weight as plain LoRAs; None where one is something else."""
    updates = [low_rank_update(patch, weight) for patch in patches]
    found = tuple(update for update in updates if update is not None)
    return found if len(found) == len(updates) else None


def low_rank_update(patch: Sequence[Any], weight: Tensor) -> LowRankUpdate | None:
    """A patch as a plain LoRA; None for whatever is none, or changes more than it adds."""
    strength, what, strength_of_model, offset, function = patch[:5]
    if strength_of_model != 1.0 or offset is not None or function is not None:
        return None
    if isinstance(what, tuple) and len(what) == 2 and what[0] == "lora":
        parts = what[1]
    elif getattr(what, "name", None) == "lora" and type(what).__name__ == "LoRAAdapter":
        parts = what.weights
    else:
        return None
    up, down, alpha, *others = parts
    # A middle matrix, the scale of DoRA, a size to pad to.
    if any(other is not None for other in others) or weight.dim() < 2:
        return None
    if up.flatten(1).shape != (weight.shape[0], down.shape[0]) or down[0].numel() != weight[0].numel():
        return None
    scale = strength * (1.0 if alpha is None else float(alpha) / down.shape[0])
    return LowRankUpdate(up.flatten(1), down.reshape(down.shape[0], *weight.shape[1:]), scale)


def merging(patches: Sequence[Any]) -> Change:
    """The function by which Forge applies patches at each use."""
    merge: Any = importlib.import_module("backend.patcher.lora").merge_lora_to_weight
    return lambda weight: merge(
        patches=patches, weight=weight, key="a LoRA on the fly", computation_dtype=weight.dtype
    )


def in_turn(functions: Sequence[Callable[[Tensor], Tensor]]) -> Change | None:
    """All of these, one after the other; None for none."""
    return (lambda parameter: reduce(lambda value, change: change(value), functions, parameter)) if functions else None
