"""The edits that edits_in_samplings.py makes, by kind: the suitable ones of edits_of_*.py, and more edits of modules.

An edit is a function of a network and a random generator. It changes the network at a random place, and returns a
function that undoes the change, or None if it cannot be undone.
"""
from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import edits_of_calls
import edits_of_code
import edits_of_modules
import torch
from edits_of_modules import Inapplicable, Undo, scaled, some
from random_edits import (
    Edit,
    edits,
    of_both,
    of_both_with_sites,
    on_pair,
    on_theirs,
    with_sites,
)
from torch import Tensor, nn

# Without those that change a call's shape, or make the host refuse every call.
DEFAULTS = (
    edits_of_calls.default_dtype, edits_of_calls.autocast_off, edits_of_calls.other_kernels,
    edits_of_calls.training_mode,
)


def hook_with_keywords(network: Any, chance: random.Random) -> Undo:
    def louder(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return scaled(output, 1.1)

    module = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.SiLU))
    return module.register_forward_hook(louder, with_kwargs=True, always_call=chance.random() < 0.5).remove


def hook_before_with_keywords(network: Any, chance: random.Random) -> Undo:
    def louder(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return scaled(args, 1.1), kwargs

    module = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.SiLU))
    return module.register_forward_pre_hook(louder, with_kwargs=True).remove


def hook_in_the_dictionary(network: Any, chance: random.Random) -> Undo:
    """Write a forward hook into a module's _forward_hooks, as some extensions do."""
    hooks = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm))._forward_hooks
    key = 10**6 + chance.randrange(10**6)
    hooks[key] = lambda module, inputs, output: scaled(output, 1.1)
    return lambda: hooks.pop(key)


def hook_before_everywhere(network: Any, chance: random.Random) -> Undo:
    def louder(module: nn.Module, inputs: Any) -> Any:
        return scaled(inputs, 1.05) if isinstance(module, nn.SiLU) else None

    return nn.modules.module.register_module_forward_pre_hook(louder).remove


def call_on_an_instance(network: Any, chance: random.Random) -> Undo:
    """Set _call_impl or _wrapped_call_impl on a module: torch's __call__ then runs it in place of the class's."""
    module = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm))
    name = chance.choice(["_call_impl", "_wrapped_call_impl"])
    if not hasattr(module, name) or name in vars(module):
        raise Inapplicable
    below = getattr(type(module), name)
    setattr(module, name, types.MethodType(lambda self, *a, **k: scaled(below(self, *a, **k), 1.1), module))
    return lambda: delattr(module, name)


class Louder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.inner(*args, **kwargs), 1.1)


def other_activation(network: Any, chance: random.Random) -> Undo:
    """Replace a module without parameters by one of another class."""
    places = [
        (parent, name) for parent in network.modules() for name, child in parent.named_children()
        if isinstance(child, (nn.SiLU, nn.Identity, nn.Dropout, nn.GELU))
    ]
    if not places:
        raise Inapplicable
    parent, name = chance.choice(places)
    return replace_child(parent, name, chance.choice([nn.Tanh(), Louder(parent._modules[name])]))


def wrap_layer(network: Any, chance: random.Random) -> Undo:
    places = [
        (parent, name) for parent in network.modules() for name, child in parent.named_children()
        if isinstance(child, (nn.Conv2d, nn.Linear, nn.GroupNorm))
    ]
    if not places:
        raise Inapplicable
    parent, name = chance.choice(places)
    return replace_child(parent, name, Louder(parent._modules[name]))


def replace_child(parent: nn.Module, name: str, child: nn.Module) -> Undo:
    before = parent._modules[name]
    parent._modules[name] = child
    return lambda: parent._modules.update({name: before})


def add_buffer(network: Any, chance: random.Random) -> Undo:
    module = some(network, chance, (nn.Conv2d, nn.Linear))
    module.register_buffer("onediff_test", torch.ones(1), persistent=False)
    return lambda: delattr(module, "onediff_test")


def buffer_for_a_weight(network: Any, chance: random.Random) -> Undo:
    """Replace a layer's weight parameter by a buffer of the same name."""
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: one._parameters.get("weight") is not None)
    if "weight" in vars(layer):
        raise Inapplicable
    weight = layer.weight
    del layer.weight
    layer.register_buffer("weight", weight.detach() * 1.1)

    def undo() -> None:
        del layer.weight
        layer.weight = weight

    return undo


def tensor_in_the_dictionary(network: Any, chance: random.Random) -> Undo:
    """Write a tensor "weight" into a layer's __dict__: attribute access finds it before the parameter."""
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: one._parameters.get("weight") is not None)
    if "weight" in vars(layer):
        raise Inapplicable
    vars(layer)["weight"] = layer.weight.detach() * 1.1
    # A parameter that is set by its name removes the attribute.
    return lambda: vars(layer).pop("weight", None)


@torch.no_grad()
def resize_memory(network: Any, chance: random.Random) -> None:
    """Give a parameter object other values in new memory, a part of a larger storage."""
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: one._parameters.get("weight") is not None)
    weight = layer.weight
    memory = torch.zeros(2, *weight.shape, dtype=weight.dtype)
    memory[1] = weight * 1.1
    weight.data = memory[1]


def share_layer(network: Any, chance: random.Random) -> Undo:
    """Replace a layer by another layer of the network with the same class and size, which is then used twice."""
    layers = [
        (parent, name, child) for parent in network.modules() for name, child in parent.named_children()
        if isinstance(child, (nn.Linear, nn.Conv2d, nn.GroupNorm))
    ]
    alike = [
        (one, other) for one in layers for other in layers
        if one[2] is not other[2] and repr(one[2]) == repr(other[2])
        and [*map(id, map(type, one[2]._parameters.values()))] == [*map(id, map(type, other[2]._parameters.values()))]
    ]
    if not alike:
        raise Inapplicable
    (parent, name, _), (_, _, other) = chance.choice(alike)
    return replace_child(parent, name, other)


def default_of_a_forward(network: Any, chance: random.Random) -> Undo:
    """Set a forward with a default argument on a module, and change that default through the function's
    __defaults__."""
    module = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm), lambda one: "forward" not in vars(one))
    below = type(module).forward

    def forward(self: Any, x: Tensor, factor: float = 1.0) -> Any:
        return below(self, x) * factor

    module.forward = types.MethodType(forward, module)
    forward.__defaults__ = (1.1,)
    return lambda: delattr(module, "forward")


def apply_function(network: Any, chance: random.Random) -> Undo:
    """Add a function to a Forge Neo layer's weight_function, which the host applies to the weight at each call."""
    factor = chance.uniform(0.8, 1.2)
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: hasattr(one, "weight_function"))
    return applied(layer, lambda weight: weight * factor)


def apply_lora(network: Any, chance: random.Random) -> Undo:
    layer = some(network, chance, nn.Linear, lambda one: hasattr(one, "weight_function"))
    return applied(layer, HostsPatch(layer.weight, chance.randrange(10**6)))


def other_strength(network: Any, chance: random.Random) -> Undo:
    """Change the strength of an applied LoRA in the host's list of patches."""
    layer = some(network, chance, nn.Linear, lambda one: any(map(is_patch, vars(one).get("weight_function", ()))))
    patch = next(filter(is_patch, layer.weight_function)).patches["key"][0]
    before = patch[0]
    patch[0] = 0.5 * before
    return lambda: patch.__setitem__(0, before)


@torch.no_grad()
def other_numbers(network: Any, chance: random.Random) -> None:
    """Change an applied LoRA's up matrix through .data, which torch's version counter does not count."""
    layer = some(network, chance, nn.Linear, lambda one: any(map(is_patch, vars(one).get("weight_function", ()))))
    next(filter(is_patch, layer.weight_function)).patches["key"][0][1][1][0].data.mul_(1.2)


class HostsPatch:
    """ComfyUI's weight function for a list of patches: here one LoRA of rank 4."""

    def __init__(self, weight: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        up = 0.2 * torch.randn(len(weight), 4, generator=generator)
        down = 0.2 * torch.randn(4, weight.shape[1], generator=generator)
        self.key = "key"
        self.patches = {self.key: [[1.0, ("lora", (up, down, 4.0, None, None)), 1.0, None, None]]}

    def __call__(self, weight: Tensor) -> Tensor:
        for strength, (_, (up, down, *_)), *_ in self.patches[self.key]:
            weight = weight + strength * up @ down
        return weight


def is_patch(function: Any) -> bool:
    return isinstance(function, HostsPatch)


def applied(layer: Any, function: Callable[[Tensor], Tensor]) -> Undo:
    before = layer.weight_function
    layer.weight_function = [*before, function]
    return lambda: setattr(layer, "weight_function", before)


ON_MODULES = (
    hook_with_keywords, hook_before_with_keywords, hook_in_the_dictionary, call_on_an_instance, other_activation,
    wrap_layer, add_buffer, buffer_for_a_weight, tensor_in_the_dictionary, resize_memory, share_layer,
    default_of_a_forward,
)
# Edits of the functions that Forge Neo applies to weights.
FUNCTIONS = (apply_function, apply_lora, apply_lora, other_strength, other_numbers)
OF_MODULES: dict[str, list[Edit]] = {
    "weights": edits("weights", edits_of_modules.WEIGHTS, of_both),
    "attributes": edits("attributes", edits_of_modules.ATTRIBUTES, of_both),
    "code": edits("code", edits_of_modules.CODE, of_both),
    "modules": edits("modules", ON_MODULES, of_both),
    "functions": edits("functions", FUNCTIONS, of_both),
}
OF_EVERYTHING: dict[str, list[Edit]] = {
    "everywhere": edits("everywhere", (*edits_of_modules.EVERYWHERE, hook_before_everywhere), on_theirs),
    "adapters": edits("adapters", edits_of_modules.ADAPTERS, of_both),
    "globals": edits("globals", edits_of_code.GLOBALS, with_sites),
    "globals of torch": edits("globals of torch", edits_of_code.IN_TORCH, with_sites),
    "classes": edits("classes", edits_of_code.CLASSES, with_sites),
    "classes of a network": edits("classes of a network", edits_of_code.OF_A_NETWORK, of_both_with_sites),
    "bodies": edits("bodies", edits_of_code.BODIES, with_sites),
    "defaults": edits("defaults", DEFAULTS, on_pair),
}
KINDS = (*OF_MODULES, *OF_EVERYTHING)
