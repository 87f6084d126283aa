"""Random edits of the surroundings of a network's calls: torch's defaults and modes, the inputs, and copies of the
network that are called too.

An edit is a function of a Pair and a random generator. It returns a function that undoes it.
"""
from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from edited_networks import Given, Pair
from edits_of_modules import Inapplicable, Undo, scaled
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

HALVES = (torch.float16, torch.bfloat16)
PairEdit = Callable[[Pair, random.Random], "Undo | None"]


def entered(context: Any) -> Undo:
    """Enter a context. Returns the function that leaves it."""
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


# --- defaults -----------------------------------------------------------------------------------------------------

def default_dtype(pair: Pair, chance: random.Random) -> Undo:
    before = torch.get_default_dtype()
    torch.set_default_dtype(chance.choice([*HALVES, torch.float64]))
    return lambda: torch.set_default_dtype(before)


def default_device(pair: Pair, chance: random.Random) -> Undo:
    return entered(torch.device(chance.choice(["meta", "cpu"])))


def autocast(pair: Pair, chance: random.Random) -> Undo:
    dtype = chance.choice([torch.bfloat16, torch.float16] if pair.device.type == "cuda" else [torch.bfloat16])
    return entered(torch.autocast(pair.device.type, dtype=dtype, cache_enabled=chance.random() < 0.5))


def autocast_off(pair: Pair, chance: random.Random) -> Undo:
    return entered(torch.autocast(pair.device.type, enabled=False))


def gradients(pair: Pair, chance: random.Random) -> Undo:
    """Make the calls in another gradient mode, with or without a parameter that requires gradients."""
    before = pair.grad
    wants = chance.random() < 0.5
    pair.grad = chance.choice([torch.enable_grad, torch.no_grad, torch.inference_mode])
    if wants:
        for network in pair.networks:
            next(network.parameters()).requires_grad_(True)

    def undo() -> None:
        pair.grad = before
        if wants:
            for network in pair.networks:
                next(network.parameters()).requires_grad_(False)

    return undo


def training_mode(pair: Pair, chance: random.Random) -> Undo:
    for network in pair.networks:
        network.train()
    return lambda: [network.eval() for network in pair.networks]


def deterministic(pair: Pair, chance: random.Random) -> Undo:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(False)


def other_kernels(pair: Pair, chance: random.Random) -> Undo:
    return entered(torch.backends.mkldnn.flags(enabled=False))


class LouderFunctions(TorchFunctionMode):
    """A mode that multiplies the results of functional.silu by 1.1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return scaled(made, 1.1) if func is nn.functional.silu else made


class LouderOperators(TorchDispatchMode):
    """A mode that multiplies the results of the SiLU operators by 1.1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.1 if func in (torch.ops.aten.silu.default, torch.ops.aten.silu_.default) else made


def function_mode(pair: Pair, chance: random.Random) -> Undo:
    return entered(LouderFunctions())


def dispatch_mode(pair: Pair, chance: random.Random) -> Undo:
    return entered(LouderOperators())


# --- copies -------------------------------------------------------------------------------------------------------

def called_too(pair: Pair, name: str, ours: Any, theirs: Any) -> Undo:
    """Call `ours` and `theirs` too in every step; see Pair.callers."""
    entry = (name, ours, theirs)
    pair.callers.append(entry)
    return lambda: pair.callers.remove(entry)


def replica_of(network: nn.Module) -> nn.Module:
    """A copy of the network as nn.DataParallel makes one for another card: its parameters are plain tensors."""
    replicas: dict[nn.Module, Any] = {}
    for module in network.modules():
        replicas[module] = replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach().clone())
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = child if child is None else replicas[child]
    return replicas[network]


def twin_by_dict(network: Any) -> Any:
    """A copy that shares all attributes with the network, and so its layers."""
    twin = object.__new__(type(network))
    twin.__dict__.update(network.__dict__)
    return twin


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy, "a replica": replica_of, "a twin by __dict__": twin_by_dict,
}


def with_layers_of_its_own(network: Any) -> None:
    """Replace a child that a copy shares with its original, as a trainer's EMA copy may."""
    network._modules = dict(network._modules)
    name, child = next((name, one) for name, one in network._modules.items() if one is not None and list(one.modules()))
    network._modules[name] = other = copy.deepcopy(child)
    with torch.no_grad():
        for module in other.modules():
            # In a replica, the weights are not parameters.
            for tensor in (*module._parameters.values(), vars(module).get("weight")):
                if isinstance(tensor, Tensor):
                    tensor.data = tensor.data * 1.2


def copied(pair: Pair, chance: random.Random) -> Undo:
    name = chance.choice(list(WAYS))
    alters = chance.random() < 0.5
    ours, theirs = map(WAYS[name], pair.networks)
    pair.as_hosts(theirs)
    if alters:
        for network in (ours, theirs):
            with_layers_of_its_own(network)
    return called_too(pair, f"{name}{' with layers of its own' if alters else ''}", ours, theirs)


def kept_forward(pair: Pair, chance: random.Random) -> Undo:
    return called_too(pair, "a kept forward", pair.ours.forward, pair.theirs.forward)


def functional_call(pair: Pair, chance: random.Random) -> Undo:
    """Call the network with other parameters by torch.func.functional_call, which replaces them during the call."""
    factor = chance.uniform(0.8, 1.2)
    part = chance.choice(["weight", "bias", "conv", "attn"])

    def caller(network: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            others = {name: one.detach() * factor for name, one in network.named_parameters() if part in name}
            return torch.func.functional_call(network, others, args, kwargs)

        return call

    return called_too(pair, "functional_call", *map(caller, pair.networks))


def wrapped(pair: Pair, chance: random.Random) -> Undo:
    """Call the network inside of another module, as with accelerate, or with DataParallel on one card."""
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return called_too(pair, "a wrapper", *map(Wrapper, pair.networks))


# --- inputs: both networks must raise, or their outputs must agree ------------------------------------------------

Names = tuple[str, str, str]


def changed_inputs(pair: Pair, change: Callable[[Given, Names], Given]) -> Undo:
    """Change the arguments of all calls; see Pair.changes."""
    pair.changes.append(change)
    return lambda: pair.changes.remove(change)


def of_one(name_of: Callable[[Names], str], change: Callable[[Any], Any]) -> Callable[[Given, Names], Given]:
    """A change of the arguments that changes one of them. name_of: returns its name, given Pair.names."""
    return lambda given, names: {**given, name_of(names): change(given[name_of(names)])}


def input_dtype(pair: Pair, chance: random.Random) -> Undo:
    place = chance.randrange(3)
    dtype = chance.choice([*HALVES, torch.float64, torch.int64])
    return changed_inputs(pair, of_one(lambda names: names[place], lambda one: one.to(dtype)))


def all_in_a_dtype(pair: Pair, chance: random.Random) -> Undo:
    dtype = chance.choice([*HALVES, torch.float64])
    return changed_inputs(pair, lambda given, names: {
        name: value.to(dtype) if name in names else value for name, value in given.items()
    })


def timestep_form(pair: Pair, chance: random.Random) -> Undo:
    forms: tuple[Callable[[Tensor, int], Any], ...] = (
        lambda t, batch: t.flatten()[:1], lambda t, batch: t.flatten()[0], lambda t, batch: float(t.flatten()[0]),
        lambda t, batch: int(t.flatten()[0]), lambda t, batch: t.flatten()[:1].expand(batch),
        lambda t, batch: t.flatten()[:1].expand(batch)[:, None], lambda t, batch: t.flatten()[:1].repeat(batch + 1),
        lambda t, batch: t.flatten()[:1].repeat(1, batch), lambda t, batch: t.flatten()[0].long(),
        lambda t, batch: t.flatten()[0].double(), lambda t, batch: None, lambda t, batch: t.cpu(),
    )
    form = chance.choice(forms)
    return changed_inputs(pair, lambda given, names: {
        **given, names[1]: form(torch.as_tensor(given[names[1]]), len(given[names[0]])),
    })


def context_form(pair: Pair, chance: random.Random) -> Undo:
    forms: tuple[Callable[[Tensor], Any], ...] = (
        lambda c: c[:1], lambda c: c[..., :-8], lambda c: c[..., :1, :], lambda c: c[..., :0, :],
        lambda c: torch.cat([c, c]), lambda c: c.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda c: c[:1].expand_as(c), lambda c: c[0], lambda c: None, lambda c: c * 30,
    )
    return changed_inputs(pair, of_one(lambda names: names[2], chance.choice(forms)))


def latent_form(pair: Pair, chance: random.Random) -> Undo:
    forms: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), lambda x: x[:1].expand_as(x), lambda x: x[:, :-1],
        lambda x: torch.cat([x, x], 1), lambda x: x[:0], lambda x: x[0], lambda x: x[..., :1, :1], lambda x: x[..., :4],
        lambda x: torch.cat([x, x], -1)[..., ::2], lambda x: x.clone().requires_grad_(True), lambda x: x * 1e3,
        lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x, lambda x: nn.Parameter(x.clone()),
    )
    return changed_inputs(pair, of_one(lambda names: names[0], chance.choice(forms)))


def way_of_passing(pair: Pair, chance: random.Random) -> Undo:
    others: list[Given] = [{"by position": True}, {"unknown": 1}, {names_of_context(pair): None}]
    if pair.names[0] == "sample":
        others += [
            {"return_dict": False}, {"cross_attention_kwargs": {}}, {"cross_attention_kwargs": {"scale": 1.0}},
            {"class_labels": None}, {"attention_mask": None}, {"timestep_cond": None}, {"added_cond_kwargs": None},
            {"added_cond_kwargs": {}}, {"encoder_attention_mask": torch.ones(1, 77, device=pair.device)},
            {"cross_attention_kwargs": {"scale": 0.5}},
        ]
    more = chance.choice(others)
    return changed_inputs(pair, lambda given, names: {**given, **more})


def names_of_context(pair: Pair) -> str:
    return pair.names[2]


def label_form(pair: Pair, chance: random.Random) -> Undo:
    """Change SDXL's pooled text embeddings or time ids."""
    name = chance.choice(["text_embeds", "time_ids"])
    forms: tuple[Callable[[Tensor], Any], ...] = (
        Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.long, lambda one: one[:1], lambda one: one[:, :-1],
        lambda one: one[:1].expand_as(one), lambda one: None,
    )
    form = chance.choice(forms)
    if "added_cond_kwargs" not in pair.inputs(0):
        raise Inapplicable

    def change(given: Given, names: Names) -> Given:
        label = dict(given.get("added_cond_kwargs") or {})
        if name in label:
            label[name] = form(label[name])
        return {**given, "added_cond_kwargs": label}

    return changed_inputs(pair, change)


DEFAULTS = (
    default_dtype, default_device, autocast, autocast_off, gradients, training_mode, deterministic, other_kernels,
)
MODES = (function_mode, dispatch_mode)
COPIES = (copied, copied, copied, kept_forward, functional_call, wrapped)
INPUTS = (
    input_dtype, all_in_a_dtype, timestep_form, timestep_form, context_form, context_form, latent_form, latent_form,
    way_of_passing, label_form,
)
