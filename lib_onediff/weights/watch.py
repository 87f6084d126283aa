"""Whether anything has changed under us: what a module tree computes with, noted once and compared at every call.

Noted are the modules and their order, their classes and what these and their bases define, every attribute, hooks, the
functions that torch and the host's own files call by their global names, and the parameters: which objects they are,
where they lie and how. An edit of a value in place is none of these: whoever keeps something that was made of values
(eight-bit weights, a second card's copy) asks weights.contents as well.

Nothing noted keeps a module, a tensor or a function's closure alive. Objects are recognised by weak references: an
id() may come again.
"""
from __future__ import annotations

import hashlib
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn

from ..core.refusal import Refusal
from .contents import Place

# What torch keeps on every module and no forward pass reads, or what is compared by itself.
BOOKKEEPING = frozenset({
    "_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
# Equal values are the same to whoever computes with them.
ATOMS = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, type, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
)
# Of these very types, and of no subclass: what is asked about most, told without a call.
PLAIN = frozenset(ATOMS)
# What a class says of types: nobody computes with it, and it takes as long to compare as all the rest.
ANNOTATIONS = frozenset({"__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"})
SAME_IN_ANY_PROCESS = (int, float, complex, bool, str, bytes, type(None), tuple, torch.dtype)
CONTAINERS = (dict, list, tuple, set, frozenset)
# Of the entries of an attribute: a longer one is known by its length alone.
MOST_ENTRIES, DEEPEST = 256, 4
# torch's own check of its CUDA graphs: builds with CUDA have it, and it takes half the time of a loop here. Private, so
# it may go or change: where it is missing or raises, the loop is asked.
lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

state_of = operator.attrgetter("__dict__")
of_parameters = operator.itemgetter("_parameters")
of_children = operator.itemgetter("_modules")
of_hooks = tuple(map(operator.itemgetter, HOOKS))
VERSION = operator.attrgetter("_version")
layout_of = operator.attrgetter("shape", "dtype")


class Same:
    """The object that this was made of, and no other. Keeps nothing alive."""

    __slots__ = ("reference",)

    def __init__(self, one: Any) -> None:
        self.reference = weakref.ref(one)

    def __eq__(self, other: object) -> bool:
        # A live object has one plain weak reference: comparing these asks no object for its own idea of equality.
        return isinstance(other, Same) and self.reference is other.reference

    __hash__ = None  # type: ignore[assignment]


def is_atom(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_atom, value))
    if kind is types.FunctionType:
        # A closure may hold a model.
        return value.__closure__ is None
    if kind is staticmethod or kind is classmethod:
        return is_atom(value.__func__)
    if kind is property:
        return is_atom(value.fget) and is_atom(value.fset)
    return isinstance(value, ATOMS)


def token(value: Any, depth: int = 0) -> Any:
    """What is equal as long as a value is the same: containers by what is in them, other objects by identity and by
    their plain attributes."""
    if is_atom(value):
        return value
    if isinstance(value, CONTAINERS):
        size, kind = len(value), type(value)
        if size > MOST_ENTRIES or depth > DEEPEST:
            return kind, size
        inside: Iterable[Any] = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        return kind, tuple([one if type(one) in PLAIN else token(one, depth + 1) for one in inside])
    if isinstance(value, Tensor):
        return Place.of(value), edit_count(value)
    if isinstance(value, types.MethodType):
        return types.MethodType, token(value.__func__, depth + 1), token(value.__self__, depth + 1)
    try:
        same = Same(value)
    except TypeError:  # there can be no reference to it
        return type(value)
    if isinstance(value, (nn.Module, types.FunctionType)):
        return same
    state = getattr(value, "__dict__", {})
    return same, type(value), {name: one for name, one in state.items() if is_atom(one)} if state else None


class Other:
    """What a name stands for, where that is no plain value. Compared in less time than a token is made, where it is an
    object without attributes or a function."""

    __slots__ = ("known", "name", "reference")

    def __init__(self, space: Mapping[str, Any], name: str) -> None:
        value = space[name]
        self.name, self.known = name, token(value)
        self.reference: Callable[[], Any] = no_object
        # What is in a container may change.
        is_bare = not isinstance(value, CONTAINERS) and hasattr(value, "__dict__") and not vars(value)
        if isinstance(value, types.FunctionType) or is_bare:
            with suppress(TypeError):
                self.reference = weakref.ref(value)

    def stands(self, space: Mapping[str, Any]) -> bool:
        """Raises KeyError if the name is gone."""
        value, known = space[self.name], self.reference()
        if known is not None and value is known and (type(value) is types.FunctionType or not value.__dict__):
            return True
        return bool(token(value) == self.known)


def no_object() -> None:
    return None


class Names:
    """Some names of a namespace, of a module's attributes, of a class or of a file, and what they stand for."""

    def __init__(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        plain: list[str] = []
        self._others: list[Other] = []
        for name in names:
            value = space[name]
            if is_atom(value):
                plain.append(name)
            else:
                self._others.append(Other(space, name))
        # itemgetter of one name gives no tuple.
        self.plain = tuple(plain) if len(plain) > 1 else (*plain, *plain)
        self._getter = operator.itemgetter(*self.plain) if plain else no_values
        self._values = self._getter(space)

    def stand(self, space: Mapping[str, Any]) -> bool:
        """Whether they stand for the same. Raises KeyError if one is gone."""
        return bool(self._getter(space) == self._values) and all(other.stands(space) for other in self._others)


def no_values(space: Mapping[str, Any]) -> tuple[()]:
    return ()


class Attributes:
    """Every attribute of a set of modules that a forward pass could read."""

    def __init__(self, states: Sequence[dict[str, Any]], ignored: Collection[str]) -> None:
        self._counts = list(map(len, states))
        groups: dict[tuple[str, ...], list[int]] = {}
        self._others: list[tuple[int, Other]] = []
        for index, state in enumerate(states):
            plain: list[str] = []
            for name, value in state.items():
                if name in BOOKKEEPING or name in ignored:
                    continue
                if is_atom(value):
                    plain.append(name)
                else:
                    self._others.append((index, Other(state, name)))
            groups.setdefault(tuple(plain), []).append(index)
        # Modules with the same attributes are compared in one go.
        self._groups = []
        for names, places in groups.items():
            if names:
                wanted = operator.itemgetter(*names)
                # itemgetter of one place gives no tuple.
                pick = operator.itemgetter(*places, *places[:len(places) == 1])
                self._groups.append((pick, wanted, list(map(wanted, pick(states)))))

    def stand(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether all are the same. Raises KeyError if one is gone."""
        return (
            list(map(len, states)) == self._counts
            and all(
                all(map(operator.eq, map(wanted, pick(states)), known)) for pick, wanted, known in self._groups
            )
            and all(other.stands(states[place]) for place, other in self._others)
        )

    def digest(self) -> str:
        """Equal for equal plain attributes, in any process."""
        rows = (row if isinstance(row, tuple) else (row,) for _, _, known in self._groups for row in known)
        plain = repr([[one for one in row if isinstance(one, SAME_IN_ANY_PROCESS)] for row in rows])
        return hashlib.sha256(plain.encode()).hexdigest()[:16]


class Tree:
    """A module tree as it computed when this was made.

    ignored: names of attributes that somebody else looks at.
    """

    def __init__(self, root: nn.Module, ignored: Collection[str] = ()) -> None:
        modules = list(root.modules())
        places = {id(module): place for place, module in enumerate(modules)}
        self._modules = list(map(weakref.ref, modules))
        self.classes = list(map(type, modules))
        states = list(map(state_of, modules))
        self._attributes = Attributes(states, ignored)
        families = list(filter(None, map(of_children, states)))
        # The places of the modules that have children, and of each child; behind the last stands None.
        self._parents = places_with(of_children, states)
        found = [len(modules) if child is None else places[id(child)] for child in children_of(families)]
        self._child_count = len(found)
        self._children = operator.itemgetter(*found, len(modules)) if found else no_children
        self._hooked = [places_with(hooks, states) for hooks in of_hooks]
        self._hooks = [
            (place, name, token(state[name])) for place, state in enumerate(states) for name in HOOKS if state[name]
        ]
        # An attention's processor is no module, and computes as its class does too.
        processors = (type(state["processor"]) for state in states if "processor" in state)
        self._sources = list(dict.fromkeys((*self.classes, *processors)))
        kinds = list(dict.fromkeys(base for kind in self._sources for base in kind.__mro__[:-1]))
        self._kinds = [
            (vars(kind), len(vars(kind)), Names(vars(kind), vars(kind).keys() - ANNOTATIONS)) for kind in kinds
        ]
        self._globals = globals_of(kinds)

    def stands(self, root: nn.Module) -> bool:
        """Whether it computes as it did. A millisecond for SDXL's UNet."""
        modules: list[Any] = [reference() for reference in self._modules]
        if modules[0] is not root or None in modules:
            return False
        try:
            return self._stands(modules)
        except KeyError:  # an attribute is gone
            return False

    def _stands(self, modules: list[Any]) -> bool:
        states: list[dict[str, Any]] = list(map(state_of, modules))
        children = children_of(filter(None, map(of_children, states)))
        return (
            list(map(type, modules)) == self.classes
            and places_with(of_children, states) == self._parents and len(children) == self._child_count
            and all(map(operator.is_, children, self._children([*modules, None])))
            and [places_with(hooks, states) for hooks in of_hooks] == self._hooked
            and all(token(states[place][name]) == known for place, name, known in self._hooks)
            and self._attributes.stand(states)
            and all(len(space) == count and names.stand(space) for space, count, names in self._kinds)
            and all(names.stand(space) for space, names in self._globals)
        )

    def digest(self) -> str:
        """What tells the sources of this computation from others: classes, their code, and plain attributes."""
        code = hashlib.sha256()
        for kind in self._sources:
            code.update(f"{kind.__module__}.{kind.__qualname__}".encode())
            for base in kind.__mro__[:-1]:
                for name, value in vars(base).items():
                    body = getattr(getattr(value, "__func__", value), "__code__", None)
                    if body is not None:
                        constants = [one for one in body.co_consts if isinstance(one, SAME_IN_ANY_PROCESS)]
                        code.update(f"{name} {body.co_names} {constants}".encode() + body.co_code)
        return hashlib.sha256((self._attributes.digest() + code.hexdigest()).encode()).hexdigest()[:16]


def places_with(of: Callable[[dict[str, Any]], Any], states: Sequence[dict[str, Any]]) -> list[int]:
    """Where this part of the modules' states is not empty; for most it is."""
    return list(compress(range(len(states)), map(of, states)))


def children_of(families: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, families)))


def no_children(modules: Sequence[Any]) -> tuple[None]:
    return (None,)


def globals_of(kinds: Iterable[type]) -> list[tuple[dict[str, Any], Names]]:
    """The functions and classes that the files of these classes name, torch's functional ones, and the hooks that run
    in every module."""
    files = dict.fromkeys(kind.__module__ for kind in kinds)
    spaces = [vars(sys.modules[name]) for name in files if name in sys.modules]
    found = [(space, Names(space, functions_in(space))) for space in (*spaces, vars(nn.functional))]
    everywhere = vars(nn.modules.module)
    return [*found, (everywhere, Names(everywhere, [name for name in GLOBAL_HOOKS if name in everywhere]))]


def functions_in(space: Mapping[str, Any]) -> list[str]:
    callables = (types.FunctionType, types.BuiltinFunctionType, type)
    return [name for name, value in space.items() if isinstance(value, callables)]


class Parameters:
    """The parameters of some modules: which objects they are, where they lie, and how.

    places, keys: of each parameter, which of the modules has it and by which name.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(map(weakref.ref, modules))
        found = children_of(map(of_parameters, map(state_of, modules)))
        self._count = len(found)
        parameters = [parameter for parameter in found if parameter is not None]
        self._references = list(map(weakref.ref, parameters))
        self.addresses = list(map(Tensor.data_ptr, parameters))
        self._indices = list(range(len(parameters)))
        self._layouts = list(map(layout_of, parameters))
        self._strides = list(map(Tensor.stride, parameters))
        self._guards = guards_of(parameters)
        self.versions = edit_counts(parameters)

    def now(self) -> list[Any] | None:
        """The parameters that these modules have now, in the same order; None where others than then are missing."""
        modules: list[Any] = [reference() for reference in self._modules]
        if None in modules:
            return None
        found = children_of(map(of_parameters, map(state_of, modules)))
        parameters = [parameter for parameter in found if parameter is not None]
        return parameters if len(found) == self._count and len(parameters) == len(self._references) else None

    def lie_still(self) -> list[Any] | None:
        """The parameters, where what lies at the addresses is alive: without that, nothing may read there. A fifth of a
        millisecond for SDXL's UNet. Drop them after the call."""
        parameters = self.now()
        return parameters if parameters is not None and self._lie_at_their_addresses(parameters) else None

    def _lie_at_their_addresses(self, parameters: list[Any]) -> bool:
        if lie_at is not None:
            with suppress(RuntimeError, TypeError):
                return bool(lie_at(parameters, self.addresses, self._indices))
        try:
            return self.addresses == list(map(Tensor.data_ptr, parameters))
        except (TypeError, RuntimeError):
            return False

    def stand(self) -> bool:
        """Whether these are the very parameters, and each lies where and as it lay."""
        return self._standing(self.now()) is not None

    def edited(self, found: list[Any] | None = None) -> list[int]:
        """Which were edited in place since their versions were noted, as far as torch counts that. found: what
        lie_still has told at this call. Raises Refusal where they do not stand."""
        parameters = self._standing(found or self.now())
        if parameters is None:
            raise Refusal("the host has moved or exchanged weights")
        versions = edit_counts(parameters)
        if versions == self.versions:
            return []
        before, self.versions = self.versions, versions
        return [place for place, pair in enumerate(zip(versions, before, strict=True)) if pair[0] != pair[1]]

    def _standing(self, parameters: list[Any] | None) -> list[Any] | None:
        """The parameters, where they are those that they were and lie where and as they lay."""
        if parameters is None or not all(
            map(operator.is_, parameters, [reference() for reference in self._references])
        ):
            return None
        if not self._lie_at_their_addresses(parameters):
            return None
        if self._guards is not None:
            with suppress(RuntimeError, TypeError):
                if self._guards.check(*parameters):
                    return parameters
        try:
            is_same = (
                self._strides == list(map(Tensor.stride, parameters))
                and self._layouts == list(map(layout_of, parameters))
            )
        except (TypeError, RuntimeError):
            return None
        return parameters if is_same else None

    def __len__(self) -> int:
        return len(self.versions)


def guards_of(parameters: Sequence[Tensor]) -> Any:
    """torch's own check of shapes, strides and types, as torch.compile has it: a third of the time of a loop here. It
    keeps no tensor alive. Private, as lie_at; None where this torch has none. What it does not pass may be the same
    all the same (other modes of autograd): then the loop is asked."""
    try:
        kind: Any = torch._C._dynamo.guards.TensorGuards
        shapes, strides = [list(one.shape) for one in parameters], [list(one.stride()) for one in parameters]
        return kind(*parameters, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    except Exception:
        return None


UNCOUNTED = -1


def edit_counts(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was edited in place."""
    try:
        return list(map(VERSION, tensors))
    except RuntimeError:  # an inference tensor counts none
        return list(map(edit_count, tensors))


def edit_count(tensor: Any) -> int:
    """How often a tensor was edited in place; UNCOUNTED for an inference tensor, 0 for None."""
    if tensor is None:
        return 0
    try:
        return int(tensor._version)
    except (RuntimeError, AttributeError):
        return UNCOUNTED
