"""What the Forge family applies to a layer's weights at each use: LoRAs that are not merged, in its layers' attributes.

Forge keeps a list of patches by parameter (forge_online_loras); Forge Neo and ldm_patched, as ComfyUI, lists of
functions (weight_function, bias_function), of which the host's own apply a list of patches: their patcher's for a key,
or one of their own (Neo from 2.29 on). A patch is strength, what it is, strength of the model, offset, function, ...;
a plain LoRA is ("lora", (up, down, alpha, mid, dora scale, ...)), or an object of that name with that as its weights.
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

WEIGHT_FUNCTION, BIAS_FUNCTION, ONLINE_LORAS = APPLIED_AT_CALL
LORA = "lora"
# Strength, what, strength of the model, offset, function; hosts add others.
PARTS_OF_A_PATCH = 5
VALUE_TYPES = frozenset({type(None), bool, int, float, str})
CASTS = ("parameters_manual_cast", "ldm_patched_cast_weights")
# A layer whose weights the host leaves in main memory casts them as they come: to the type that they have.
PLACED = frozenset({*CASTS, *(f"prev_{name}" for name in CASTS), "forge_patched_weights", "forge_force_cast_weights"})


class LayerFunctions:
    """weights.scan.FunctionReader for hosts of the Forge family."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """The host writes into attributes that nobody else looks at."""
        return True

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        parts = Parts(applied_to(layers))
        for index in parts.indices:
            for name in APPLIED_AT_CALL:
                take_apart(layers[index].__dict__.get(name), parts)
        return parts

    def of(self, layer: nn.Module) -> WeightFunctions:
        own: Any = layer.__dict__
        on_weight, on_bias = (list[Any](own.get(name) or ()) for name in (WEIGHT_FUNCTION, BIAS_FUNCTION))
        loras = own.get(ONLINE_LORAS) or {}
        known = list(map(patches_of, on_weight))
        lasting = None not in (*known, *map(patches_of, on_bias))
        patches = [*chain.from_iterable(filter(None, known)), *(loras.get("weight") or ())]
        updates = [update for patch in patches if (update := low_rank_update(patch, layer.weight)) is not None]
        are_all = None not in known and len(updates) == len(patches)
        for functions, name in ((on_weight, "weight"), (on_bias, "bias")):
            if loras.get(name):
                functions.append(merging(loras[name]))
        return WeightFunctions(
            tuple(updates) if are_all else (), None if are_all else in_turn(on_weight), in_turn(on_bias), lasting
        )


def patches_of(function: Any) -> list[Any] | None:
    """What one of the host's own functions applies now, known by what it holds; None for any other function."""
    by_key, key = getattr(function, "patches", None), getattr(function, "key", None)
    found = by_key.get(key) if isinstance(by_key, Mapping) else getattr(function, "patch", None)
    is_patch = lambda one: isinstance(one, (list, tuple)) and len(one) >= PARTS_OF_A_PATCH  # noqa: E731
    return found if isinstance(found, list) and found and all(map(is_patch, found)) else None


def cast_to_input(layers: Sequence[nn.Module], dtype: torch.dtype) -> torch.dtype | None:
    """The type to which these layers cast their parameters: that of their inputs, where all of them cast.

    Of a file in few bits, norms may be in float32 and not cast: the host multiplies by them as they are, and rounds the
    product once. A 16-bit type has the same numbers if they come from a 16-bit file.
    """
    is_in_few_bits = any(type(layer).__qualname__ in ALWAYS_CAST for layer in layers)
    return dtype if all(casts(layer) or (is_in_few_bits and has_vectors_alone(layer)) for layer in layers) else None


def has_vectors_alone(layer: nn.Module) -> bool:
    """Whether a layer has no matrix: a norm."""
    return all(one is None or one.dim() == 1 for one in layer._parameters.values())


def casts(layer: nn.Module) -> bool:
    """Whether a layer casts its parameters at each use."""
    return any(getattr(layer, name, False) for name in CASTS) or type(layer).__qualname__ in ALWAYS_CAST


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
    if kind in VALUE_TYPES:
        parts.facts.append(given)
    elif kind in (tuple, list):
        parts.facts.append(len(given))
        for part in given:
            take_apart(part, parts)
    elif isinstance(given, Tensor):
        parts.tensors.append(given)
    elif isinstance(given, Mapping):
        for name, part in given.items():
            parts.facts.append(name)
            take_apart(part, parts)
    elif (patches := patches_of(given)) is not None:
        take_apart(patches, parts)
    else:
        parts.objects.append(given)
        take_apart(getattr(given, "weights", None), parts)


def low_rank_update(patch: Sequence[Any], weight: Any) -> LowRankUpdate | None:
    """A patch as a plain LoRA; None for whatever is none, or changes more than it adds."""
    strength, what, strength_of_model, offset, function = patch[:PARTS_OF_A_PATCH]
    if strength_of_model != 1.0 or function is not None:
        return None
    is_pair = isinstance(what, tuple) and len(what) == 2 and what[0] == LORA
    parts = what[1] if is_pair else what.weights if getattr(what, "name", None) == LORA else None
    if parts is None:
        return None
    up, down, alpha, *others = parts
    # A middle matrix, the scale of DoRA, a size to pad to.
    # Of a weight in few bits, the shape alone is that of the layer.
    rows, *row = weight.shape
    if any(other is not None for other in others) or not row:
        return None
    axis, first, count = (0, 0, rows) if offset is None else offset
    if axis != 0 or up.flatten(1).shape != (count, down.shape[0]) or down[0].numel() != math.prod(row):
        return None
    scale = strength * (1.0 if alpha is None else float(alpha) / down.shape[0])
    # Some rows of the weight alone, such as the keys' of a joint projection: nothing is added to the others.
    of_all = functional.pad(up.flatten(1), (0, 0, first, rows - first - count))
    return LowRankUpdate(of_all, down.reshape(down.shape[0], *row), scale)


def merging(patches: Sequence[Any]) -> Change:
    """The function by which Forge applies patches at each use."""
    merge: Any = importlib.import_module("backend.patcher.lora").merge_lora_to_weight
    return lambda weight: merge(
        patches=patches, weight=weight, key="a LoRA on the fly", computation_dtype=weight.dtype
    )


def in_turn(functions: Sequence[Callable[[Tensor], Tensor]]) -> Change | None:
    """All of these, one after the other; None for none."""
    return (lambda parameter: reduce(lambda value, change: change(value), functions, parameter)) if functions else None
