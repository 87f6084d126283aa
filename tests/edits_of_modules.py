"""Random edits of a network's modules, such as users, LoRAs, tiling extensions and training scripts make.

An edit is a function of the network and a random generator. It returns a function that undoes it, or None if the edit
is permanent. It raises Inapplicable if the network has nothing to edit.
"""
from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TORCHS_CONVOLUTION = nn.Conv2d._conv_forward
Undo = Callable[[], object]
Edit = Callable[[Any, random.Random], "Undo | None"]


class Inapplicable(Exception):
    """The network has nothing that this edit could change."""


def some(unet: nn.Module, chance: random.Random, kinds: Any, fits: Callable[[Any], bool] = lambda module: True) -> Any:
    """A random module of these classes for which fits(module) is true. LoRA layers are excluded."""
    found = [
        module for name, module in unet.named_modules()
        if isinstance(module, kinds) and "lora_" not in name and fits(module)
    ]
    if not found:
        raise Inapplicable
    return chance.choice(found)


def named(unet: nn.Module, chance: random.Random, *names: str) -> Any:
    """A random module whose class has one of these names."""
    return some(unet, chance, nn.Module, lambda module: type(module).__name__ in names)


def inner(unet: nn.Module, chance: random.Random) -> Any:
    """A random module inside the network, of a class whose forward is called."""
    idle = (nn.ModuleList, nn.ModuleDict, nn.Dropout)
    return some(unet, chance, nn.Module, lambda module: module is not unet and not isinstance(module, idle))


def weighted(unet: nn.Module, chance: random.Random) -> Any:
    """A random linear layer, convolution or norm."""
    return some(unet, chance, (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm))


def scaled(value: Any, factor: float) -> Any:
    """The output of a forward with its floating-point tensors multiplied by a factor, also those in a tuple or list;
    other values as they are."""
    if isinstance(value, Tensor):
        return value * factor if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(scaled(one, factor) for one in value)
    return value


def set_attribute(module: Any, name: str, value: Any) -> Undo:
    """Set an attribute. Returns the function that restores it."""
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)


def hide(module: Any, name: str, value: Any) -> Undo:
    """Set an attribute that overrides an inherited one. Returns the function that deletes it."""
    setattr(module, name, value)
    return lambda: delattr(module, name)


def hide_or_set(kind: type, name: str, value: Any) -> Undo:
    """Set an attribute on a class that defines or inherits it. Returns the function that restores it."""
    return set_attribute(kind, name, value) if name in vars(kind) else hide(kind, name, value)


# --- weights ------------------------------------------------------------------------------------------------------

@torch.no_grad()
def multiply(unet: Any, chance: random.Random) -> None:
    weighted(unet, chance).weight.mul_(chance.uniform(0.5, 1.5))


def add_to_data(unet: Any, chance: random.Random) -> None:
    weight = weighted(unet, chance).weight
    weight.data += chance.uniform(0.01, 0.1)


def edit_one_row(unet: Any, chance: random.Random) -> None:
    weight = weighted(unet, chance).weight
    weight.data[chance.randrange(len(weight))] *= 1.5


def point_elsewhere(unet: Any, chance: random.Random) -> None:
    weight = weighted(unet, chance).weight
    weight.data = weight.data.clone() * 1.1


def point_to_transposed(unet: Any, chance: random.Random) -> None:
    weight = some(unet, chance, nn.Linear, lambda layer: layer.in_features == layer.out_features).weight
    weight.data = weight.data.t()


def exchange(unet: Any, chance: random.Random) -> Undo:
    """Replace a parameter. The undo function keeps the old one alive and puts it back."""
    layer = weighted(unet, chance)
    old = layer.weight
    layer.weight = nn.Parameter(old.detach() * 0.9, requires_grad=False)
    return lambda: setattr(layer, "weight", old)


def exchange_for_good(unet: Any, chance: random.Random) -> None:
    layer = weighted(unet, chance)
    layer.weight = nn.Parameter(layer.weight.detach() * 1.1, requires_grad=False)


def drop_bias(unet: Any, chance: random.Random) -> Undo:
    layer = some(unet, chance, (nn.Linear, nn.Conv2d), lambda layer: layer.bias is not None)
    return set_attribute(layer, "bias", None)


def load(unet: Any, chance: random.Random) -> None:
    state = {name: one.clone() * 1.02 for name, one in unet.state_dict().items() if "lora_" not in name}
    unet.load_state_dict(state, assign=chance.random() < 0.5, strict=False)


def parametrise(unet: Any, chance: random.Random) -> Undo:
    class Louder(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 1.2

    layer = some(unet, chance, nn.Linear, lambda layer: "weight" in layer._parameters)
    nn.utils.parametrize.register_parametrization(layer, "weight", Louder())
    return lambda: nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


# --- attributes ---------------------------------------------------------------------------------------------------

def pad_circular(unet: Any, chance: random.Random) -> Undo:
    return set_attribute(some(unet, chance, nn.Conv2d, lambda one: one.padding == (1, 1)), "padding_mode", "circular")


def dilate(unet: Any, chance: random.Random) -> Undo:
    layer = some(unet, chance, nn.Conv2d, lambda one: one.kernel_size == (3, 3) and one.stride == (1, 1))
    undos = [set_attribute(layer, "padding", (2, 2)), set_attribute(layer, "dilation", (2, 2))]
    return lambda: [undo() for undo in undos]


def other_eps(unet: Any, chance: random.Random) -> Undo:
    return set_attribute(some(unet, chance, (nn.GroupNorm, nn.LayerNorm)), "eps", chance.choice([0.5, 0.01]))


def other_groups(unet: Any, chance: random.Random) -> Undo:
    norm = some(unet, chance, nn.GroupNorm, lambda one: one.num_groups > 2)
    return set_attribute(norm, "num_groups", norm.num_groups // 2)


def other_heads(unet: Any, chance: random.Random) -> Undo:
    attention = named(unet, chance, "Attention", "CrossAttention")
    return set_attribute(attention, "heads" if hasattr(attention, "heads") else "n_heads", 1)


def scale_output(unet: Any, chance: random.Random) -> Undo:
    name = chance.choice(["ResnetBlock2D", "Attention"])
    which = {"ResnetBlock2D": "output_scale_factor", "Attention": "rescale_output_factor"}[name]
    module = some(unet, chance, nn.Module, lambda one: type(one).__name__ == name and hasattr(one, which))
    return set_attribute(module, which, 2.0)


def flip_sinusoids(unet: Any, chance: random.Random) -> Undo:
    if not hasattr(unet, "time_proj"):
        raise Inapplicable
    return set_attribute(unet.time_proj, "flip_sin_to_cos", not unet.time_proj.flip_sin_to_cos)


# --- code ---------------------------------------------------------------------------------------------------------

def hook(unet: Any, chance: random.Random) -> Undo:
    return inner(unet, chance).register_forward_hook(lambda module, inputs, output: scaled(output, 1.1)).remove


def hook_before(unet: Any, chance: random.Random) -> Undo:
    return some(unet, chance, (nn.Conv2d, nn.Linear)).register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 1.1, *inputs[1:])
    ).remove


def hook_everywhere(unet: Any, chance: random.Random) -> Undo:
    def louder(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 1.05 if isinstance(module, nn.SiLU) else None

    return nn.modules.module.register_module_forward_hook(louder).remove


def own_forward(unet: Any, chance: random.Random) -> Undo:
    module = some(unet, chance, nn.Module, lambda one: one is not unet and "forward" not in vars(one))
    below = type(module).forward
    return hide(module, "forward", types.MethodType(lambda self, *a, **k: scaled(below(self, *a, **k), 0.9), module))


def tile_along_x(self: Any, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    across = self.padding[1]
    padded = F.pad(F.pad(image, (across, across, 0, 0), mode="circular"), (0, 0, self.padding[0], self.padding[0]))
    return F.conv2d(padded, weight, bias, self.stride, 0, self.dilation, self.groups)


def tile_instances(unet: Any, chance: random.Random) -> Undo:
    layers = [one for one in unet.modules() if isinstance(one, nn.Conv2d) and one.padding == (1, 1)]
    if not layers:
        raise Inapplicable
    for layer in layers:
        layer._conv_forward = types.MethodType(tile_along_x, layer)
    leaves_a_method = chance.random() < 0.5

    def undo() -> None:
        for layer in layers:
            if not leaves_a_method:
                del layer._conv_forward
            else:
                layer._conv_forward = types.MethodType(TORCHS_CONVOLUTION, layer)

    return undo


def tile_class(unet: Any, chance: random.Random) -> Undo:
    return set_attribute(nn.Conv2d, "_conv_forward", tile_along_x)


def class_forward(unet: Any, chance: random.Random) -> Undo:
    kind = type(inner(unet, chance))
    below = kind.forward
    return hide_or_set(kind, "forward", lambda self, *a, **k: scaled(below(self, *a, **k), 0.9))


def another_class(unet: Any, chance: random.Random) -> Undo:
    module = inner(unet, chance)
    kind = type(module)
    place = {"__module__": kind.__module__} if chance.random() < 0.5 else {}
    body = {"forward": lambda self, *a, **k: scaled(kind.forward(self, *a, **k), 1.1), **place}
    module.__class__ = type(kind.__name__, (kind,), body)
    return lambda: setattr(module, "__class__", kind)


def replace_function(unet: Any, chance: random.Random) -> Undo:
    below = F.scaled_dot_product_attention
    return set_attribute(F, "scaled_dot_product_attention", lambda *a, **k: below(*a, **k) * 1.1)


def exchange_layer(unet: Any, chance: random.Random) -> Undo:
    """Replace a layer by one of the same class and size, with other weights."""
    layer = some(unet, chance, (nn.Linear, nn.Conv2d), lambda one: not one._forward_hooks)
    parent, name = next(
        (parent, name) for parent in unet.modules() for name, child in parent.named_children() if child is layer
    )
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.9)
    return set_attribute(parent, name, other)


def swap_layers(unet: Any, chance: random.Random) -> Undo:
    """Swap the projections of keys and values of an attention."""
    pairs = (("to_k", "to_v"), ("k_proj", "v_proj"))
    attention = some(unet, chance, nn.Module, lambda one: any(hasattr(one, name) for name, _ in pairs))
    first, second = next(pair for pair in pairs if hasattr(attention, pair[0]))

    def swap() -> None:
        one = getattr(attention, first)
        other = getattr(attention, second)
        setattr(attention, first, other)
        setattr(attention, second, one)

    swap()
    return swap


# --- adapters -----------------------------------------------------------------------------------------------------

def add_lora(unet: Any, chance: random.Random) -> Undo:
    from peft import LoraConfig

    if not hasattr(unet, "add_adapter"):
        raise Inapplicable
    name = f"lora{chance.randrange(10**6)}"
    targets = chance.choice([["to_q", "to_k"], ["to_v", "to_out.0"], ["conv1"], ["proj_in", "ff.net.0.proj"]])
    unet.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False), adapter_name=name)
    unet.to(next(unet.parameters()).device)
    for parameter in unet.parameters():
        parameter.requires_grad_(False)
    doing = chance.choice(["plain", "scaled", "disabled", "fused", "edited"])
    if doing == "scaled":
        unet.set_adapters([name], [chance.uniform(0.2, 0.8)])
    elif doing == "disabled":
        unet.disable_adapters()
    elif doing == "fused":
        unet.fuse_lora(adapter_names=[name])
    elif doing == "edited":
        for one, parameter in unet.named_parameters():
            if "lora_A" in one:
                parameter.data *= 1.3

    def undo() -> None:
        if doing == "fused":
            unet.unfuse_lora()
        unet.unload_lora() if hasattr(unet, "unload_lora") else unet.delete_adapters([name])

    return undo


WEIGHTS: tuple[Edit, ...] = (
    multiply, add_to_data, edit_one_row, point_elsewhere, point_to_transposed, exchange, exchange_for_good, drop_bias,
    load, parametrise,
)
ATTRIBUTES: tuple[Edit, ...] = (
    pad_circular, dilate, other_eps, other_groups, other_heads, scale_output, flip_sinusoids,
)
CODE: tuple[Edit, ...] = (hook, hook_before, own_forward, tile_instances, another_class, exchange_layer, swap_layers)
# Edits of torch's classes and functions, which change all networks of the process.
EVERYWHERE: tuple[Edit, ...] = (hook_everywhere, tile_class, class_forward, replace_function)
ADAPTERS: tuple[Edit, ...] = (add_lora,)
EDITS = (*WEIGHTS, *ATTRIBUTES, *CODE, *EVERYWHERE, *ADAPTERS)


def edited(unet: Any, chance: random.Random, count: int) -> Iterator[str]:
    """Make `count` edits: first each of EDITS in order, then random ones. Inapplicable ones are skipped.

    At most two are in effect at once, besides permanent ones. Yields an edit's name after it was made, and "NAME
    undone" after it was undone; those in effect at the end are undone without a yield.
    """
    standing: list[tuple[str, Undo]] = []
    for number in range(count):
        edit = EDITS[number % len(EDITS)] if number < len(EDITS) else chance.choice(EDITS)
        try:
            undo = edit(unet, chance)
        except Inapplicable:
            continue
        yield edit.__name__
        if undo is not None:
            standing.append((edit.__name__, undo))
        while standing and (len(standing) > 1 or chance.random() < 0.7):
            name, undo = standing.pop()
            undo()
            yield f"{name} undone"
    while standing:
        standing.pop()[1]()
