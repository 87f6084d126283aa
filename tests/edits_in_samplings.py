"""Random edits of networks between the steps of samplings with DeepCache. Each answer is compared with that of a twin,
which the host's own code runs.

    python tests/edits_in_samplings.py --edits 400 --seed 0 [--networks sdxl,cosmos,anima] [--kinds weights,code]

The rule: an edit of what a cached step reads counts at that step, any other one at the next whole step. The twin
computes a cached step by its whole forward, in which the activation at the cut is replaced by what it was at the last
whole step.
"""
from __future__ import annotations

import argparse
import contextlib
import random
import sys
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import all_folders  # noqa: F401
import edits_of_calls
import edits_of_code
import edits_of_modules
import pytest
import torch
from builders import SMALL_XL
from contract_hosts import running
from edited_networks import AnimaHost, AnimaPair, DiffusersPair, Given, Pair, with_pretended_graphs
from edits_of_modules import Inapplicable, Undo, scaled, some
from ladder_builders import NATIVE
from random_edits import (
    CLOSE,
    Edit,
    EditFailed,
    attempt,
    distance,
    edits,
    exact_products,
    forget_everything,
    limit_of,
    of_both,
    of_both_with_sites,
    on_pair,
    on_theirs,
    with_sites,
)
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.sampling import Sampling
from lib_onediff.core.settings import Settings
from lib_onediff.runtime import verify
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps import schedules

INTERVAL = 3
STEPS = 16
# How often a step is preceded by an edit or its undoing, and how often the edit is of a layer that cached steps read.
OFTEN = 0.3
OF_THE_PART = 0.5
MOST_STANDING = 2
# The smallest change of a cached step's output that tells that it reads what was edited.
SEEN = 1e-6
# Edits of values that torch does not count. The step computes with the new ones, around the old activation.
UNCOUNTED = frozenset({"add_to_data", "edit_one_row", "other_numbers"})
# Not what makes a call one of another shape, or a host refuse every call.
DEFAULTS = (
    edits_of_calls.default_dtype, edits_of_calls.autocast_off, edits_of_calls.other_kernels,
    edits_of_calls.training_mode,
)
Caller = Callable[..., Any]


# --- edits of modules besides those of edits_of_modules -----------------------------------------------------------

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
    """As some extensions set hooks: by writing into the module's own dictionary."""
    hooks = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm))._forward_hooks
    key = 10**6 + chance.randrange(10**6)
    hooks[key] = lambda module, inputs, output: scaled(output, 1.1)
    return lambda: hooks.pop(key)


def hook_before_everywhere(network: Any, chance: random.Random) -> Undo:
    def louder(module: nn.Module, inputs: Any) -> Any:
        return scaled(inputs, 1.05) if isinstance(module, nn.SiLU) else None

    return nn.modules.module.register_module_forward_pre_hook(louder).remove


def call_on_an_instance(network: Any, chance: random.Random) -> Undo:
    """torch's __call__ runs it in the place of the class's."""
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
    """A module without parameters is replaced by one of another class."""
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
    """The layer computes with a buffer in the place of its parameter."""
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
    """The layer computes with an attribute that is no parameter."""
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: one._parameters.get("weight") is not None)
    if "weight" in vars(layer):
        raise Inapplicable
    vars(layer)["weight"] = layer.weight.detach() * 1.1
    # A parameter that is set by its name removes the attribute.
    return lambda: vars(layer).pop("weight", None)


@torch.no_grad()
def resize_memory(network: Any, chance: random.Random) -> None:
    """The parameter object stays, over another memory of another layout."""
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: one._parameters.get("weight") is not None)
    weight = layer.weight
    room = torch.zeros(2, *weight.shape, dtype=weight.dtype)
    room[1] = weight * 1.1
    weight.data = room[1]


def share_layer(network: Any, chance: random.Random) -> Undo:
    """One layer takes the place of another of its class and size, and stays at its own."""
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
    """A function set on an instance has a default, which is changed later: here at once, through its function."""
    module = some(network, chance, (nn.Conv2d, nn.Linear, nn.GroupNorm), lambda one: "forward" not in vars(one))
    below = type(module).forward

    def forward(self: Any, x: Tensor, factor: float = 1.0) -> Any:
        return below(self, x) * factor

    module.forward = types.MethodType(forward, module)
    forward.__defaults__ = (1.1,)
    return lambda: delattr(module, "forward")


def apply_function(network: Any, chance: random.Random) -> Undo:
    """Of Forge Neo's layers: a function that the host applies to the weight at each call."""
    factor = chance.uniform(0.8, 1.2)
    layer = some(network, chance, (nn.Conv2d, nn.Linear), lambda one: hasattr(one, "weight_function"))
    return applied(layer, lambda weight: weight * factor)


def apply_lora(network: Any, chance: random.Random) -> Undo:
    layer = some(network, chance, nn.Linear, lambda one: hasattr(one, "weight_function"))
    return applied(layer, HostsPatch(layer.weight, chance.randrange(10**6)))


def other_strength(network: Any, chance: random.Random) -> Undo:
    """Of a LoRA that is applied: the number is written into the host's list."""
    layer = some(network, chance, nn.Linear, lambda one: any(map(is_patch, vars(one).get("weight_function", ()))))
    patch = next(filter(is_patch, layer.weight_function)).patches["key"][0]
    before = patch[0]
    patch[0] = 0.5 * before
    return lambda: patch.__setitem__(0, before)


@torch.no_grad()
def other_numbers(network: Any, chance: random.Random) -> None:
    """Of a LoRA that is applied: by an edit that torch does not count."""
    layer = some(network, chance, nn.Linear, lambda one: any(map(is_patch, vars(one).get("weight_function", ()))))
    next(filter(is_patch, layer.weight_function)).patches["key"][0][1][1][0].data.mul_(1.2)


class HostsPatch:
    """ComfyUI's function for a list of patches: here one LoRA of rank 4."""

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
# Of Forge Neo's layers.
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


# --- networks with a cut ------------------------------------------------------------------------------------------

class Cut(ABC):
    """The host's forward of a network, whole, or as a cached step. kept: the activation at the cut at the last whole
    step."""

    kept: Tensor | None = None

    def __init__(self, network: Any) -> None:
        self.network = network
        self.found: Tensor | None = None

    @abstractmethod
    def part(self, network: Any) -> list[nn.Module]:
        """The modules that a cached step reads."""

    @abstractmethod
    def hooks(self, kept: Tensor | None) -> list[Any]:
        """Hooks that note the activation in found, or put kept in its place."""

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(None, *args, **kwargs)

    def cached(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.kept, *args, **kwargs)

    def _run(self, kept: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        hooks = self.hooks(kept)
        try:
            return self.network(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


class UNetCut(Cut):
    """At depth 1: the last resnet gets the inner part's result, and beside it the first convolution's."""

    def part(self, network: Any) -> list[nn.Module]:
        return [
            network.conv_in, network.time_embedding, network.up_blocks[-1].resnets[-1], network.conv_norm_out,
            network.conv_out, network.add_embedding,
        ]

    def hooks(self, kept: Tensor | None) -> list[Any]:
        beside = self.network.conv_in.out_channels

        def cut(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            hidden_states, *others = inputs
            inner = hidden_states.shape[1] - beside
            if kept is None:
                self.found = hidden_states[:, :inner].detach().clone()
                return None
            return torch.cat([kept, hidden_states[:, inner:]], dim=1), *others

        return [self.network.up_blocks[-1].resnets[-1].register_forward_pre_hook(cut)]


class TransformerCut(Cut):
    """At depth 1: the first block, and what the others have added. blocks: the name of their list."""

    def __init__(self, network: Any, blocks: str) -> None:
        super().__init__(network)
        self.blocks = blocks

    def part(self, network: Any) -> list[nn.Module]:
        blocks = getattr(network, self.blocks)
        return [*(child for child in network.children() if child is not blocks), blocks[0]]

    def hooks(self, kept: Tensor | None) -> list[Any]:
        blocks = getattr(self.network, self.blocks)
        first: list[Tensor] = []

        def at_last(block: nn.Module, inputs: Any, output: Tensor) -> Any:
            if kept is None:
                self.found = (output - first[0]).detach()
                return None
            return first[0] + kept

        return [
            blocks[0].register_forward_hook(lambda block, inputs, output: first.append(output)),
            blocks[-1].register_forward_hook(at_last),
        ]


class CosmosPair(DiffusersPair):
    names = ("hidden_states", "timestep", "encoder_hidden_states")

    def __init__(self) -> None:
        from test_cosmos import network

        Pair.__init__(self)
        self.ours = network(num_layers=4)
        self.theirs = network(num_layers=4)
        lib_onediff.compile_unet(self.ours, backend=NATIVE, deepcache_interval=INTERVAL)

    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        from test_cosmos import CONTEXT_WIDTH

        height, width = size
        return {
            "hidden_states": random(batch, 4, 1, height, width), "timestep": torch.full((batch,), 0.5),
            "encoder_hidden_states": random(batch, tokens, CONTEXT_WIDTH),
            "padding_mask": torch.zeros(1, 1, 8 * height, 8 * width),
        }


@contextlib.contextmanager
def sdxl() -> Iterator[tuple[Pair, Cut]]:
    options = {"backend": NATIVE, "deepcache_interval": INTERVAL}
    with with_pretended_graphs():
        pair = DiffusersPair(SMALL_XL, "cpu", torch.float32, **options)
        yield pair, UNetCut(pair.theirs)
        lib_onediff.uncompile_unet(pair.ours)


@contextlib.contextmanager
def cosmos() -> Iterator[tuple[Pair, Cut]]:
    with with_pretended_graphs():
        pair = CosmosPair()
        yield pair, TransformerCut(pair.theirs, "transformer_blocks")
        lib_onediff.uncompile_unet(pair.ours)


@contextlib.contextmanager
def anima() -> Iterator[tuple[Pair, Cut]]:
    """Of Forge Neo, which applies functions to weights at each call."""
    with with_pretended_graphs(), running("neo", AnimaHost) as host:
        pair = AnimaPair(host, "cpu")
        runtime.configure(Settings(backend=NATIVE, deepcache_interval=INTERVAL))
        yield pair, TransformerCut(pair.theirs, "blocks")


NETWORKS: dict[str, Callable[[], Any]] = {"sdxl": sdxl, "cosmos": cosmos, "anima": anima}


# --- running ------------------------------------------------------------------------------------------------------

@dataclass
class Report:
    """edits: by kind, made and undone. steps: by (half, route). wrong: what was, a line each. unknown: the cached steps
    that the twin cannot compute, because an edit makes its inner part raise. worst: the largest relative error."""

    edits: Counter[str] = field(default_factory=Counter)
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unknown: int = 0
    worst: float = 0.0


class Run:
    def __init__(self, pair: Pair, cut: Cut, chance: random.Random, kinds: Sequence[str]) -> None:
        self.pair = pair
        self.cut = cut
        self.chance = chance
        self.kinds = kinds
        self.report = Report()
        self.history: list[str] = []
        self._standing: list[tuple[str, Undo | None]] = []
        self._cached_in_a_row = 0

    def given(self, index: int) -> Given:
        """The inputs of a step."""
        pair = self.pair
        given = pair.inputs_of((8, 8), 2, 77, pair.random(0))
        latent = given[pair.names[0]]
        given[pair.names[0]] = pair.random(index + 1)(*latent.shape).to(latent)
        timestep = torch.as_tensor(given[pair.names[1]])
        is_share = float(timestep.flatten()[0]) <= 1
        time = self.times(is_share)[index]
        return {**given, pair.names[1]: torch.full_like(timestep, time, dtype=torch.float32)}

    def times(self, is_share: bool) -> list[float]:
        times = [1 - index / STEPS for index in range(STEPS)]
        return times if is_share else [1000 * time for time in times]

    def sampling(self, is_edited: bool) -> None:
        """A sampling, with edits between its steps or without."""
        pair = self.pair
        is_share = float(torch.as_tensor(pair.inputs(0)[pair.names[1]]).flatten()[0]) <= 1
        self.cut.kept = None
        with pair.image(True):
            runtime.begin_sampling(pair.ours, Sampling(times=lambda: self.times(is_share)), of_all=False)
            for index in range(STEPS):
                is_read = is_edited and self.chance.random() < OFTEN and self.edit(index)
                self.step(index, is_read)
            runtime.end_sampling(pair.ours)

    def edit(self, index: int) -> bool:
        """Make an edit, or undo one. Returns whether it changes the output of a cached step, and torch counts it."""
        before = self.cached_output(index)
        is_counted = True
        if self._standing and (len(self._standing) >= MOST_STANDING or self.chance.random() < 0.5):
            self.undo_last()
        else:
            is_counted = self.make() not in UNCOUNTED
        after = self.cached_output(index)
        if before is None or after is None or not is_counted:
            return False
        return after.shape != before.shape or distance(after, before) > SEEN

    def cached_output(self, index: int) -> Tensor | None:
        if self.cut.kept is None:
            return None
        output, _ = attempt(self.pair, self.cut.cached, self.given(index))
        return output if isinstance(output, Tensor) else None

    def make(self) -> str:
        """Make an edit. Returns its name."""
        kind = self.chance.choice(self.kinds)
        of_modules = kind in OF_MODULES
        edit = self.chance.choice((OF_MODULES if of_modules else OF_EVERYTHING)[kind])
        seed = self.chance.randrange(10**6)
        target: Any = self.pair
        where = "anywhere"
        if of_modules and self.chance.random() < OF_THE_PART:
            place = self.chance.randrange(len(self.cut.part(self.pair.theirs)))
            target = SimpleNamespace(networks=[self.cut.part(one)[place] for one in self.pair.networks])
            where = f"part {place}"
        try:
            undo = edit.make(target, seed)
        except Inapplicable:
            return edit.name
        except EditFailed as failed:
            self.report.wrong.append(str(failed))
            return edit.name
        self.history.append(f"{edit.name}:{seed} {where}")
        self.report.edits[kind] += 1
        if undo is not None:
            self._standing.append((kind, undo))
        return edit.name

    def undo_last(self) -> None:
        kind, undo = self._standing.pop()
        if undo is not None:
            undo()
            self.history.append("undo")
            self.report.edits[kind] += 1

    def undo_all(self) -> None:
        while self._standing:
            self.undo_last()

    def step(self, index: int, is_read: bool) -> None:
        report = self.report
        pair = self.pair
        given = self.given(index)
        passes = runtime.status()["deepcache"]["cached"]
        ours, _ = attempt(pair, pair.ours, given)
        is_cached = runtime.status()["deepcache"]["cached"] > passes
        theirs_by = self.cut.cached if is_cached else self.cut.whole
        theirs, _ = attempt(pair, theirs_by, given)
        if not is_cached:
            self.cut.kept = self.cut.found
        half = "cached" if is_cached else "whole"
        route = str(runtime.status()["route"])
        report.steps[half, route] += 1
        self.history.append(f"{index}:{half}:{route}")
        where = f"step {index}, {half} by {route} ({runtime.status()['reason']})"
        self._cached_in_a_row = self._cached_in_a_row + 1 if is_cached else 0
        if is_cached and is_read:
            self.wrong(f"{where}: the edit before it did not count")
        if self._cached_in_a_row >= INTERVAL:
            self.wrong(f"{where}: it is to be a whole one")
        if isinstance(theirs, Exception) and is_cached:
            report.unknown += 1
            return
        if isinstance(ours, Exception) or isinstance(theirs, Exception):
            if type(ours) is not type(theirs):
                self.wrong(f"{where}: {ours!r:.150} where the host's is {theirs!r:.150}")
            return
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            self.wrong(f"{where}: {ours.shape} {ours.dtype}, the host's is {theirs.shape} {theirs.dtype}")
            return
        apart = distance(ours, theirs)
        if apart > CLOSE[torch.float32] and apart > limit_of(pair, theirs_by, given, theirs):
            self.wrong(f"{where}: {apart:.1e} away")
            return
        report.worst = max(report.worst, apart)

    def wrong(self, what: str) -> None:
        self.report.wrong.append(f"{what}; {'; '.join(self.history[-24:])}")


def run(
    network: str, count: int, seed: int, kinds: Sequence[str] = KINDS, most_wrong: int = 5,
) -> Report:
    """Samplings with so many edits, and at the end two without any, of which the second is to be served as ever."""
    forget_everything()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, exact_products():
        # The host is not timed.
        patch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", -1.0)
        # Whole steps are INTERVAL steps apart.
        patch.setattr(schedules, "TABLES", {})
        patch.setattr(schedules, "early", lambda total, interval: frozenset(range(0, total, interval)))
        schedules.schedule_for.cache_clear()
        try:
            with NETWORKS[network]() as (pair, cut):
                found = Run(pair, cut, random.Random(seed), kinds)
                for _ in range(2):
                    found.sampling(is_edited=False)
                while found.report.edits.total() < count and len(found.report.wrong) < most_wrong:
                    found.sampling(is_edited=True)
                    if found.chance.random() < 0.5:
                        found.undo_all()
                        for _ in range(2):
                            found.sampling(is_edited=False)
                found.undo_all()
                for _ in range(2):
                    before = found.report.steps.copy()
                    found.sampling(is_edited=False)
                last = found.report.steps - before
                if last != Counter({("whole", "graph"): 6, ("cached", "graph"): 10}):
                    reason = runtime.status()["reason"]
                    found.report.wrong.append(f"after all edits were undone, a sampling has {dict(last)} ({reason})")
        finally:
            forget_everything()
            schedules.schedule_for.cache_clear()
    return found.report


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--edits", type=int, default=400, help="edits made or undone, of each network")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--networks", default=",".join(NETWORKS))
    made.add_argument("--kinds", default=",".join(KINDS))
    options = made.parse_args(arguments)
    torch.set_num_threads(1)
    is_right = True
    for network in options.networks.split(","):
        report = run(network, options.edits, options.seed, options.kinds.split(","))
        print(network, dict(report.edits), {"/".join(name): count for name, count in report.steps.items()},
              f"unknown {report.unknown}, worst {report.worst:.1e}")
        print(*report.wrong, sep="\n")
        is_right = is_right and not report.wrong
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
