"""Notice that somebody else has changed how a network computes, and what a host adapter knows of its host's ways.

What a host applies to a layer's weights at each use, a LoRA that is not merged above all, comes in a form of ours: a
plain LoRA is computed beside the layer, by two small products. Anything else is applied to a copy of the weight, once
for every change of it.
"""
from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.edits import edit_counts
from ..core.origins import (
    OURS,
    TORCH,
    author,
    beneath_ours,
    extension_of,
    globals_of,
    is_installed,
    origin,
    package,
    parts_of,
)
from ..core.refusal import Refusal
from .code import NOT_READ, Code, Named, names_in
from .module_tree import FORWARDS, layout_of
from .reached import Reached
from .stored import StoredReader
from .values import FUNCTIONS, Digests, Tokens

Change = Callable[[Tensor], Tensor]
# Where the Forge family keeps what it adds to a layer's weights at every call: a LoRA that is not merged. Its adapter
# reads these at every call.
APPLIED_AT_CALL = ("weight_function", "bias_function", "forge_online_loras")
# Modules of the standard library whose functions depend on their arguments alone.
PURE = frozenset({"builtins", "math", "operator", "functools", "itertools", "typing", "collections", "inspect"})
# What torch runs of a layer's class besides forward; the last where somebody else's forward calls torch's.
CALLED_BY_TORCH = ("_conv_forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


@dataclass(frozen=True)
class LowRankUpdate:
    """What a LoRA adds to a weight: scale * up @ down. up: (out, rank). down: (rank, in), or (rank, in, height, width)
    of a convolution. in_own_type: whether the host computes it in the type of up and down, and casts its input to that;
    otherwise it casts up and down to the layer's."""

    up: Tensor
    down: Tensor
    scale: float
    in_own_type: bool = False


@dataclass(frozen=True)
class WeightFunctions:
    """What a host applies to the parameters of one layer, in the type that is computed in.

    updates: LoRAs of its weight, where that is all. weight, bias: functions of a tensor that they may write to; None
    where nothing is applied, or updates say it. lasting: whether the functions do the same until their parts change.
    """

    updates: tuple[LowRankUpdate, ...] = ()
    weight: Change | None = None
    bias: Change | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Casts:
    """How a host casts what its layers hold, at each use.

    to: the type to which it casts the parameters of these layers, for inputs of a type; None where it computes with
    them as they are stored. norms: whether it casts those of norms too.
    """

    to: Callable[[Sequence[nn.Module], torch.dtype], torch.dtype | None]
    norms: bool = True


@dataclass
class Parts:
    """What a host's functions consist of, as one look finds them. It keeps them alive: drop it after the call.

    indices: of the layers to which anything is applied, in the list of layers. facts: plain data, such as a LoRA's
    strength. objects: what is the same as long as it is the same object. tensors: what is computed with.
    """

    indices: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def mark(self) -> list[object]:
        """A list that is equal for the same parts, as long as those that it was made of are alive: else another object
        may have the id of one. Of tensors it covers addresses, layouts and counted edits, not the contents."""
        tensors = self.tensors
        where = [list(map(look, tensors)) for look in (Tensor.data_ptr, layout_of, Tensor.stride)]
        return [self.indices, self.facts, list(map(id, self.objects)), where, edit_counts(tensors)]


class FunctionReader(Protocol):
    """Reads what one host's layers have."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether anything could come to be applied to these layers without a change of the module tree."""

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """Of what is applied to these layers now: asked at every call, about 5 microseconds a layer with a LoRA. Raises
        Refusal where the host has to compute them."""

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What is applied to a layer, at one of those indices. Raises Refusal where the host has to compute it."""


@dataclass(frozen=True)
class HostTraits:
    """What a host adapter knows of its host's ways with a UNet.

    trusted: Python modules whose class-level patches change nothing that the adapter does not see to.
    inert: inert(unet, module) returns whether the forward set on this module's instance computes now what its class's
        does.
    sync_lora: brings the parameters of these layers up to date, where the host does that lazily in each one's forward.
    wanted_lora: what sync_lora brings them up to; equal as long as nothing has to be done.
    synced: names that the host's forward looks up for what sync_lora does, each with its Python module
    ("networks.loaded_networks"). They count as weights, not as code.
    brought: brought(unet, path) returns whether the adapter knows the forward set on the instance of the module at this
        path, and hands its functions over with each call, as Call.patches.
    yardstick: the host's forward, with what it only approximates (8-bit attention) computed exactly, to compare with.
    functions: reads what the host applies to its layers' weights at each use; without it, that is the host's.
    casts: how the host casts its layers' weights at each use; None where it never does.
    stored: reads the weights that the host keeps in few bits; None where it has none.
    written: attributes that the host's forwards write on their modules, and that nothing computes with.
    placed: attributes that say where a host keeps a module's weights; they change nothing that is computed.
    movers: Python modules whose hooks on a network's modules move weights, and change nothing that is computed.
    make_room: has the host take so many bytes of a UNet's weights off the GPU, or more; how many it has taken.
    """

    trusted: Collection[str] = ()
    inert: Callable[[nn.Module, nn.Module], bool] = lambda unet, module: False
    sync_lora: Callable[[Iterable[nn.Module]], None] | None = None
    wanted_lora: Callable[[], Hashable] | None = None
    brought: Callable[[nn.Module, str], bool] = lambda unet, path: False
    yardstick: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = lambda host: host
    functions: FunctionReader | None = None
    casts: Casts | None = None
    stored: StoredReader | None = None
    written: frozenset[str] = frozenset()
    placed: frozenset[str] = frozenset()
    movers: Collection[str] = ()
    make_room: Callable[[nn.Module, int], int] = lambda unet, size: 0
    synced: frozenset[str] = frozenset()


def refuse_foreign_code(network: nn.Module, host_traits: HostTraits) -> None:
    """Raise Refusal for the first thing that makes a module below a network compute something other than its class
    says. Takes some milliseconds.

    That is: a method or a function set on an instance, a hook, a LoRA that is not merged, dropout at work, or a class
    one of whose methods was replaced by code from a Python module that is neither the class's own nor in
    host_traits.trusted. The network itself is the caller's to judge: its hooks run around any forward.
    """
    run: dict[type, tuple[str, ...]] = {}
    names: dict[type, frozenset[str]] = {}
    processors: dict[type, tuple[str, ...]] = {}
    for name, module in network.named_modules():
        state = module.__dict__
        kind = type(module)
        if "processor" in state:
            processors[type(state["processor"])] = ("__call__",)
        if module is network:
            continue
        if kind not in run:
            run[kind], names[kind] = called_by(kind)
        for attribute in names[kind] & state.keys():
            if isinstance(state[attribute], FUNCTIONS) and attribute not in run[kind]:
                foreign = foreign_parts(Named(state, kind.__module__, attribute), host_traits.trusted)
                if foreign:
                    raise Refusal(f"{name} has a {attribute} of its own, set by {author(foreign[0])}")
        for method in run[kind]:
            own = own_method(module, method) if method in state else None
            if own is not None and not (
                method in FORWARDS and (host_traits.inert(network, module) or host_traits.brought(network, name))
            ):
                raise Refusal(f"{name} has a {method} of its own, set by {author(own)}")
        for hook in (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()):
            if origin(hook) not in host_traits.movers:
                raise Refusal(f"{name} has a forward hook, set by {author(hook)}")
        if host_traits.functions is None and any(state.get(name) for name in APPLIED_AT_CALL):
            raise Refusal(
                "a LoRA is applied at every call, not merged (fp16 LoRA in Diffusion in Low Bits, or low VRAM)"
            )
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise Refusal(f"{name} drops values (the UNet is in training mode)")
    for kind, methods in (processors | run).items():
        for method in methods:
            refuse_replaced(kind, method, host_traits.trusted)
    refuse_global_hooks()


def stand_ins(
    reached: Reached, hosts: Collection[str], before: Mapping[str, str], trusted: Collection[str]
) -> list[Named]:
    """The names in a network's code whose values somebody has replaced.

    hosts: the packages of the network's classes. before: Reached.facts of the code when the network was first seen.

    What has changed since was replaced, whoever did it. Of what stood there already, these are found: functions in
    torch that are not torch's, and functions of extensions in the host's files.
    """
    found = {named.label: named for named in reached.changed(before)}
    for named in reached.named():
        if named.label not in found:
            authors = foreign_parts(named, {*trusted, *hosts})
            files = [str(globals_of(one).get("__file__")) for one in authors]
            # What a file of the host's imports is of other packages too, and torch is decorated by some.
            is_in_torch = package(named.owner) in NOT_READ
            if any(not is_installed(file) if is_in_torch else extension_of(file) for file in files):
                found[named.label] = named
    return list(found.values())


def foreign_parts(named: Named, known: Collection[str]) -> list[Any]:
    """The functions in what a name stands for that are of nobody known: not of the namespace's own package either."""
    if not may_compute(named.value):
        return []
    return [one for one in parts_of(named.value) if not is_of(one, {*known, package(named.owner)})]


def may_compute(value: Any) -> bool:
    return (callable(value) and not isinstance(value, type)) or isinstance(value, (property, staticmethod, classmethod))


def has_unseen_state(stand_in: Named, hosts: Collection[str]) -> bool:
    """Whether a function in the place of another one may depend on more than its arguments and what can be watched
    (plain values in its closure, its globals and its objects). A check would hold for one call of it alone, so the
    caller refuses such a network."""
    digests = Digests(Tokens())
    known = {*NOT_READ, *hosts, OURS}
    digests.of(stand_in.value)
    is_pure = True
    for named in Code([stand_in.value]).named.values():
        if package(named.owner) in known:
            continue
        if isinstance(named.value, types.ModuleType):
            is_pure &= package(named.value.__name__) in {*PURE, TORCH, *hosts}
        else:
            digests.of(named.value)
    return not is_pure or bool(digests.unseen)


def told(stand_in: Named) -> str:
    """Who has replaced what, for users."""
    if not may_compute(stand_in.value):
        return f"{stand_in.label} was changed"
    return f"{stand_in.label} was replaced by {author(stand_in.value)}"


def refuse_replaced(
    kind: type, method: str = "forward", trusted: Collection[str] = (), below: object = None
) -> None:
    """Raise Refusal if somebody who is not trusted has replaced a class's own method. below: the function to judge, by
    default the class's, beneath our own patch; a hook of ours gives the one that it calls as the host's."""
    owner = next((base for base in kind.__mro__ if method in base.__dict__), None)
    if owner is None:
        return
    function = below or beneath_ours(owner.__dict__[method])
    # A class's own package may decorate it: diffusers.utils around a method of diffusers.models.
    known = {*trusted, package(owner.__module__)}
    outermost, *within = parts_of(function) if callable(function) or may_compute(function) else [None]
    # Who is trusted may hold functions of his own package.
    known_within = {*known, *map(package, trusted)}
    foreign = [outermost] if outermost is not None and not is_of(outermost, known) else [
        one for one in within if not is_of(one, known_within)
    ]
    if foreign:
        raise Refusal(f"{kind.__name__}.{method} was replaced by {author(foreign[0])}")


def refuse_global_hooks() -> None:
    """Raise Refusal where a hook runs around every module's forward. Microseconds."""
    everywhere = nn.modules.module
    for hook in (*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()):
        raise Refusal(f"a forward hook is set on all modules, by {author(hook)}")


def is_of(function: object, authors: Collection[str]) -> bool:
    """Whether a function is torch's, ours, or of one of these Python modules or packages."""
    module = str(globals_of(function).get("__name__"))
    return module in authors or package(module) in authors or package(module) in (OURS, *NOT_READ)


def called_by(kind: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """What is run of a class when a module of it is called: the forwards, the methods that they call by name, and so
    on; and all names in the code of these."""
    called = dict.fromkeys(FORWARDS)
    names: set[str] = set()
    waiting = [*FORWARDS]
    while waiting:
        for function in parts_of(beneath_ours(inspect.getattr_static(kind, waiting.pop(), None))):
            found = names_in(function.__code__) if isinstance(function, types.FunctionType) else frozenset[str]()
            for other in sorted(found - names):
                member = inspect.getattr_static(kind, other, None)
                # What every module has, tensors have by the same names.
                if may_compute(member) and other not in called and other not in vars(nn.Module):
                    called[other] = None
                    waiting.append(other)
            names |= found
    return (*called, *(name for name in CALLED_BY_TORCH if name not in called)), frozenset(names)


def own_method(module: nn.Module, name: str) -> object | None:
    """What is set on the instance in place of a method of its class; None where that is nothing else than the class's
    method, bound (who undoes a patch may leave that behind), or what that was before we wrapped it."""
    own = module.__dict__.get(name)
    if getattr(own, "__self__", module) is not module:
        return own
    # Who decorates a function copies its __wrapped__ from anywhere; ours tells the truth.
    standing = beneath_ours(getattr(type(module), name, None))
    is_the_classs = standing is not None and beneath_ours(getattr(own, "__func__", None)) is standing
    return None if is_the_classs else own
