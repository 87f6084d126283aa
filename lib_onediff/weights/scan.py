"""Finds code of other extensions in a network. Defines HostTraits, a host's properties that its adapter knows.

Also defines the types that describe the functions that a host applies to a layer's weights at each use, such as a LoRA
that is not merged. We compute a plain LoRA beside the layer, by two small products. We apply any other function to a
copy of the weight, again whenever one of them changes.
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
    functions_within,
    globals_of,
    is_installed,
    origin,
    package,
)
from ..core.refusal import Refusal
from .code import NOT_READ, Code, Named, names_in
from .layouts import shape_and_dtype
from .module_tree import FORWARDS
from .reached import Reached
from .stored import StoredReader
from .values import FUNCTIONS, Digests, Tokens

# (a parameter, in the dtype computed in) -> the changed parameter; may write to its argument and return it.
Change = Callable[[Tensor], Tensor]
# Attributes of layers in which the Forge family keeps the functions that it applies to weights at each call, such as
# LoRAs that are not merged. Its adapter reads them at each call.
APPLIED_AT_CALL = ("weight_function", "bias_function", "forge_online_loras")
# Modules of the standard library whose functions depend only on their arguments.
PURE = frozenset({"builtins", "math", "operator", "functools", "itertools", "typing", "collections", "inspect"})
# Methods of a layer's class that torch runs besides forward. _conv_forward runs if another extension's forward calls
# torch's.
CALLED_BY_TORCH = ("_conv_forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


@dataclass(frozen=True)
class LowRankUpdate:
    """What a LoRA adds to a layer's weight: scale * up @ down.

    up: (out, rank).
    down: (rank, in), or (rank, in, height, width) of a convolution.
    in_own_type: whether the host computes it in the dtype of up and down, and casts its input to that; otherwise it
        casts up and down to the layer's.
    """

    up: Tensor
    down: Tensor
    scale: float
    in_own_type: bool = False


@dataclass(frozen=True)
class WeightFunctions:
    """The functions that a host applies to the parameters of one layer at each use.

    updates: the LoRAs of the weight, if it only applies LoRAs to the weight; otherwise ().
    weight, bias: the function that it applies to this parameter, LoRAs included; None if it applies none, or if
        `updates` has all.
    lasting: whether the functions return the same result until their Parts change. If not, they are applied anew at
        each call.
    """

    updates: tuple[LowRankUpdate, ...] = ()
    weight: Change | None = None
    bias: Change | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Casts:
    """How a host casts the parameters of its layers at each use.

    to: to(layers, dtype) returns the dtype to which the host casts the parameters of these layers, which are all of a
        network's, if the input has this dtype; None if it uses them as they are stored.
    norms: whether it casts the parameters of norms too.
    """

    to: Callable[[Sequence[nn.Module], torch.dtype], torch.dtype | None]
    norms: bool = True


@dataclass
class Parts:
    """Everything that a host's functions for some layers compute with now, to find out later whether they still apply
    the same. Drop it after the call, because it keeps all of it alive.

    indices: of the layers with functions, in the list of layers that FunctionReader.parts was given.
    facts: plain data, such as a LoRA's strength.
    objects: objects that are compared by identity, such as the functions.
    tensors: tensors that are compared by their numbers, such as a LoRA's matrices.
    """

    indices: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def mark(self) -> list[object]:
        """A list to keep in place of the parts: it equals the mark of equal later parts. Of tensors it
        contains addresses, layouts and counts of edits, not the numbers. Valid as long as the objects and tensors are
        alive, because an id may be reused later."""
        tensors = self.tensors
        where = [list(map(look, tensors)) for look in (Tensor.data_ptr, shape_and_dtype, Tensor.stride)]
        return [self.indices, self.facts, list(map(id, self.objects)), where, edit_counts(tensors)]


class FunctionReader(Protocol):
    """Reads the functions that one host applies to the parameters of its layers at each use. Each host that does so has
    one."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the host can add functions for these layers without changing a module that Baseline compares, so that
        parts() must be called at each call of the network, even while there are no functions."""

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """The Parts of all functions of these layers now; empty Parts if there are none. Every call of a network reads
        them; that takes about 5 microseconds for a layer with a LoRA. Raises Refusal if only the host can compute one.
        """

    def of(self, layer: nn.Module) -> WeightFunctions:
        """The functions of one of the layers for which parts() found some. Raises Refusal if only the host can compute
        them."""


# See HostTraits.
Yardstick = Callable[[Callable[[], Tensor], nn.Module, Sequence[nn.Module]], Callable[[], Tensor]]


@dataclass(frozen=True)
class HostTraits:
    """Properties of a host's networks that its adapter knows. The defaults are those of a host without any of them.

    trusted: names of Python modules whose patches of classes the adapter knows, and takes into account if they matter.
    inert: inert(network, module) returns whether a forward that was set on this module's instance computes the same now
        as its class's forward, so that it can be ignored.
    sync_lora: merges the wanted LoRAs into the parameters of these layers, in place. For hosts that do it late, in each
        layer's forward, which our forward does not call. None: the host has merged them before it calls the network.
    wanted_lora: returns a key of the LoRAs that sync_lora would merge now. While it equals the key after the last
        merge, there is nothing to merge.
    synced: names in the host's forward that tell which LoRAs to merge, each with its Python module
        ("networks.loaded_networks"). They are not followed as code, because sync_lora puts their effect in the weights.
    brought: brought(network, path) returns whether the adapter knows the forward that was set on the instance of the
        module at this path, and passes its functions with each call, as Call.patches.
    yardstick: yardstick(host, network, layers) returns the host's forward to compare our output with. host: the host's
        forward of a call. layers: those that the host multiplies in eight bits and our forward does not. The result is
        that forward with this approximation, and others such as 8-bit attention, switched off. None: the host
        approximates nothing.
    functions: reads the functions that the host applies to its weights at each use; None: networks with such functions
        are refused.
    casts: how the host casts its weights at each use; None if it does not.
    stored: reads the weights that the host stores in few bits; None if it stores none so.
    written: attributes that the host's forwards write to their modules, and that do not affect the output.
    placed: attributes that tell where a host keeps a module's weights, and do not affect the output.
    movers: Python modules whose hooks on a network's modules only move weights.
    make_room: make_room(network, size) asks the host to move at least `size` bytes of the network's weights off the
        GPU. Returns the number of bytes that it has moved.
    """

    trusted: Collection[str] = ()
    inert: Callable[[nn.Module, nn.Module], bool] = lambda network, module: False
    sync_lora: Callable[[Iterable[nn.Module]], None] | None = None
    wanted_lora: Callable[[], Hashable] | None = None
    brought: Callable[[nn.Module, str], bool] = lambda network, path: False
    yardstick: Yardstick | None = None
    functions: FunctionReader | None = None
    casts: Casts | None = None
    stored: StoredReader | None = None
    written: frozenset[str] = frozenset()
    placed: frozenset[str] = frozenset()
    movers: Collection[str] = ()
    make_room: Callable[[nn.Module, int], int] = lambda network, size: 0
    synced: frozenset[str] = frozenset()


def refuse_foreign_code(network: nn.Module, host_traits: HostTraits) -> None:
    """Raise Refusal if a module inside of a network may compute something else than its class's original code. The
    reason names the first such module, class or hook. Takes some milliseconds; called when a network is read.

    The reasons are: a method or function set on an instance, unless the host's adapter takes it into account (inert,
    brought and trusted in HostTraits); a hook on a module (except of host_traits.movers), or on all modules of torch; a
    LoRA that is not merged, if host_traits.functions is None; dropout in training mode; or a method of a class that was
    replaced, see refuse_replaced. The network itself is left out, because its own hooks also run around our forward.
    """
    # The results of called_by, by class; and the classes of attention processors, which are not modules.
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
                    raise Refusal(f"{name}.{attribute} was replaced by {author(foreign[0])}")
        for method in run[kind]:
            own = own_method(module, method) if method in state else None
            if own is None:
                continue
            is_forward = method in FORWARDS
            if not (is_forward and (host_traits.inert(network, module) or host_traits.brought(network, name))):
                raise Refusal(f"{name}.{method} was replaced by {author(own)}")
        for hook in (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()):
            if origin(hook) not in host_traits.movers:
                raise Refusal(f"{author(hook)} has set a hook on {name}")
        if host_traits.functions is None and any(state.get(name) for name in APPLIED_AT_CALL):
            raise Refusal(
                "a LoRA is applied at each step instead of being merged (fp16 LoRA in Diffusion in Low Bits, or low "
                "VRAM)"
            )
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise Refusal(f"the model is in training mode, in which {name} drops values at random: call eval()")
    for kind, methods in (processors | run).items():
        for method in methods:
            refuse_replaced(kind, method, host_traits.trusted)
    refuse_global_hooks()


def replaced_names(
    reached: Reached, hosts: Collection[str], before: Mapping[str, str], trusted: Collection[str]
) -> list[Named]:
    """The names in a network's code whose values were replaced: values that have changed since the network was first
    read; functions in torch that are not torch's; and functions of extensions in the host's files. [] if there are
    none.

    reached: the code of the network now. hosts: the packages of the network's classes. before: Reached.facts when the
    network was first read. trusted: see HostTraits.
    """
    found = {named.label: named for named in reached.changed(before)}
    for named in reached.named():
        if named.label not in found and was_replaced(named, {*trusted, *hosts}):
            found[named.label] = named
    return list(found.values())


def was_replaced(named: Named, known: Collection[str]) -> bool:
    """Whether the value of a name contains a foreign function (see foreign_parts) that must have been put there. For a
    name that is defined in torch, or another package of NOT_READ: a function of no installed package, because installed
    ones decorate torch's. For a name that is defined in any other file: a function of an extension, because a host's
    file imports functions of other packages. False for a value that is not code. known: see foreign_parts."""
    files = [str(globals_of(one).get("__file__")) for one in foreign_parts(named, known)]
    if package(named.owner) in NOT_READ:
        return not all(map(is_installed, files))
    return any(map(extension_of, files))


def foreign_parts(named: Named, known: Collection[str]) -> list[Any]:
    """The functions in a name's value whose code is foreign. Not foreign is the code of torch, of OneDiff, of the
    standard library, of the known Python modules and packages, and of the package in which the name is defined
    (named.owner). [] for a value that is not code."""
    if not may_compute(named.value):
        return []
    return [one for one in functions_within(named.value) if not is_of(one, {*known, package(named.owner)})]


def may_compute(value: Any) -> bool:
    """Whether a value can be called, or is a property, staticmethod or classmethod. False for classes."""
    return (callable(value) and not isinstance(value, type)) or isinstance(value, (property, staticmethod, classmethod))


def has_unseen_state(replaced: Named, hosts: Collection[str]) -> bool:
    """Whether the result of a function that was put in place of another may depend on state that cannot be compared
    with an earlier one. (Plain values in its closure, in its globals and in objects there can be compared.) Then a
    comparison of one call's output with the host's proves nothing for the next call, so the caller refuses such a
    network. hosts: the packages of the network's classes, whose code is compared elsewhere."""
    digests = Digests(Tokens())
    known = {*NOT_READ, *hosts, OURS}
    digests.of(replaced.value)
    is_pure = True
    for named in Code([replaced.value]).named.values():
        if package(named.owner) in known:
            continue
        if isinstance(named.value, types.ModuleType):
            is_pure &= package(named.value.__name__) in {*PURE, TORCH, *hosts}
        else:
            digests.of(named.value)
    return not is_pure or bool(digests.unseen)


def reason_of(replaced: Named) -> str:
    """A sentence for users: which function was replaced, and by which extension or Python module; for a value that is
    not code, that it was changed."""
    if not may_compute(replaced.value):
        return f"{replaced.label} was changed"
    return f"{replaced.label} was replaced by {author(replaced.value)}"


def refuse_replaced(
    kind: type, method: str = "forward", trusted: Collection[str] = (), below: object = None
) -> None:
    """Raise Refusal if a method of a class was replaced by code of another Python package than the class's, unless that
    code's Python module is in trusted. Does nothing if the class has no such method.

    below: the function to judge. None: the class's present method, or the one below it if it is a hook of ours. A hook
    of ours passes the function that it calls as the host's.
    """
    owner = next((base for base in kind.__mro__ if method in base.__dict__), None)
    if owner is None:
        return
    function = below or beneath_ours(owner.__dict__[method])
    if not callable(function) and not may_compute(function):
        return
    # A class's own package may decorate it: diffusers.utils around a method of diffusers.models.
    known = {*trusted, package(owner.__module__)}
    for part in functions_within(function):
        if not is_of(part, known):
            raise Refusal(f"{kind.__name__}.{method} was replaced by {author(part)}")
        # A trusted module's function may hold others of its package.
        known.update(map(package, trusted))


def refuse_global_hooks() -> None:
    """Raise Refusal if a forward hook is set on all modules of torch (register_module_forward_hook). Takes
    microseconds.
    """
    everywhere = nn.modules.module
    for hook in (*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()):
        raise Refusal(f"{author(hook)} has set a hook on all models")


def is_of(function: object, authors: Collection[str]) -> bool:
    """Whether a function's code belongs to torch, OneDiff, the standard library, or one of these Python modules or
    packages. authors: their names."""
    module = str(globals_of(function).get("__name__"))
    return module in authors or package(module) in authors or package(module) in (OURS, *NOT_READ)


def called_by(kind: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """Two results. First the names of the methods that run when a module of this class is called: FORWARDS, the methods
    of the class that these call by name, and so on, and CALLED_BY_TORCH; the class need not have all of them. Then all
    names that occur in the code of these methods, except those of CALLED_BY_TORCH."""
    called = dict.fromkeys(FORWARDS)
    names: set[str] = set()
    waiting = [*FORWARDS]
    while waiting:
        for function in functions_within(beneath_ours(inspect.getattr_static(kind, waiting.pop(), None))):
            if not isinstance(function, types.FunctionType):
                continue
            found = names_in(function.__code__)
            for other in sorted(found - names):
                member = inspect.getattr_static(kind, other, None)
                # Not methods of nn.Module: tensors have methods of the same names, such as `to`, which forwards call.
                if may_compute(member) and other not in called and other not in vars(nn.Module):
                    called[other] = None
                    waiting.append(other)
            names |= found
    return (*called, *(name for name in CALLED_BY_TORCH if name not in called)), frozenset(names)


def own_method(module: nn.Module, name: str) -> object | None:
    """The attribute of this name that was set on a module's instance and hides the class's method. None if there is
    none.

    Also None if it is the class's own method, bound to the module, which an extension leaves behind when it undoes its
    patch. If our hook replaces the class's method, the method below the hook counts as the class's own.
    """
    own = module.__dict__.get(name)
    if getattr(own, "__self__", module) is not module:
        return own
    # Only our own patch is looked through: the __wrapped__ of another decorator need not be the function that it calls.
    of_class = beneath_ours(getattr(type(module), name, None))
    is_of_class = of_class is not None and beneath_ours(getattr(own, "__func__", None)) is of_class
    return None if is_of_class else own
