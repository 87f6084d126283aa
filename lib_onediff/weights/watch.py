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
from functools import cached_property
from itertools import chain, compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.origins import beneath_ours
from .contents import Contents, Place

Result = TypeVar("Result")
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


def no_object() -> None:
    return None


class Names:
    """What some names stand for in each of some namespaces: the attributes of modules, of classes, of files."""

    def __init__(self, spaces: Sequence[Mapping[str, Any]], names: Iterable[Iterable[str]]) -> None:
        self._others: list[tuple[int, str, Any]] = []
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, (space, wanted) in enumerate(zip(spaces, names, strict=True)):
            plain: list[str] = []
            for name in wanted:
                if is_atom(space[name]):
                    plain.append(name)
                else:
                    self._others.append((place, name, token(space[name])))
            if plain:
                alike.setdefault(tuple(plain), []).append(place)
        # Namespaces with the same plain names are compared in one go. An itemgetter of one place gives no sequence.
        self._plain = []
        for known_names, places in alike.items():
            pick = operator.itemgetter(*places if len(places) > 1 else (slice(places[0], places[0] + 1),))
            values = operator.itemgetter(*known_names)
            self._plain.append((known_names, places, pick, values, list(map(values, pick(spaces)))))

    def stand(self, spaces: Sequence[Mapping[str, Any]]) -> bool:
        """Whether they stand for the same in these namespaces now. Raises KeyError if one is gone."""
        for _, _, pick, values, known in self._plain:
            if list(map(values, pick(spaces))) != known:
                return False
        return all(token(spaces[place][name]) == known for place, name, known in self._others)

    def digest(self, left_out: Collection[str]) -> str:
        """Equal for equal plain values of all names but these, in any process."""
        found: dict[int, list[tuple[str, str]]] = {}
        for names, places, _, _, known in self._plain:
            for place, row in zip(places, known, strict=True):
                values = zip(names, row if len(names) > 1 else (row,), strict=True)
                found[place] = sorted(
                    (name, repr(one)) for name, one in values
                    if name not in left_out and isinstance(one, SAME_IN_ANY_PROCESS)
                )
        return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


class Tree:
    """A module tree as it computed when this was made.

    ignored: names of attributes that somebody else looks at. placed: names that its digest leaves out.
    """

    def __init__(self, root: nn.Module, ignored: Collection[str], placed: Collection[str]) -> None:
        modules = list(root.modules())
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        states = list(map(state_of, modules))
        unread = BOOKKEEPING.union(ignored)
        self._attributes = Names(states, [[name for name in state if name not in unread] for state in states])
        # The places of the modules that have children, and of each child; behind the last stands None.
        self._parents = places_with(of_children, states)
        places = {id(one): place for place, one in enumerate((*modules, None))}
        self._children = [places[id(child)] for child in members_of(of_children, states)]
        self._hooked = [places_with(hooks, states) for hooks in of_hooks]
        self._hooks = [
            (place, name, token(state[name])) for place, state in enumerate(states) for name in HOOKS if state[name]
        ]
        # An attention's processor is no module, and computes as its class does too.
        processors = (type(state["processor"]) for state in states if "processor" in state)
        self._sources = list(dict.fromkeys((*self._classes, *processors)))
        kinds = list(dict.fromkeys(base for kind in self._sources for base in kind.__mro__[:-1]))
        self._kinds = list(map(vars, kinds))
        self._sizes = list(map(len, (*states, *self._kinds)))
        files = dict.fromkeys(kind.__module__ for kind in kinds)
        spaces = [*(vars(sys.modules[name]) for name in files if name in sys.modules), vars(nn.functional)]
        everywhere = vars(nn.modules.module)
        self._spaces = [*self._kinds, *spaces, everywhere]
        of_kinds = ([name for name in space if name not in ANNOTATIONS] for space in self._kinds)
        global_hooks = [name for name in GLOBAL_HOOKS if name in everywhere]
        self._code = Names(self._spaces, [*of_kinds, *map(functions_in, spaces), global_hooks])
        self._placed = placed

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
        children = members_of(of_children, states)
        known = map([*modules, None].__getitem__, self._children)
        return (
            list(map(type, modules)) == self._classes
            and places_with(of_children, states) == self._parents and len(children) == len(self._children)
            and all(map(operator.is_, children, known))
            and list(map(len, (*states, *self._kinds))) == self._sizes
            and [places_with(hooks, states) for hooks in of_hooks] == self._hooked
            and all(token(states[place][name]) == known for place, name, known in self._hooks)
            and self._attributes.stand(states)
            and self._code.stand(self._spaces)
        )

    @cached_property
    def digest(self) -> str:
        """What tells the sources of this computation from others: classes, their code, and plain attributes but
        placed. As long as it stands, so does this."""
        code = hashlib.sha256()
        for kind in self._sources:
            code.update(f"{kind.__module__}.{kind.__qualname__}".encode())
            for base in kind.__mro__[:-1]:
                for name, value in vars(base).items():
                    # What our own code does beside it is no part of the host's sources.
                    body = getattr(beneath_ours(getattr(value, "__func__", value)), "__code__", None)
                    if body is not None:
                        constants = [one for one in body.co_consts if isinstance(one, SAME_IN_ANY_PROCESS)]
                        code.update(f"{name} {body.co_names} {constants}".encode() + body.co_code)
        together = (self._attributes.digest(self._placed) + code.hexdigest()).encode()
        return hashlib.sha256(together).hexdigest()[:16]


def places_with(of: Callable[[dict[str, Any]], Any], states: Sequence[dict[str, Any]]) -> list[int]:
    """Where this part of the modules' states is not empty; for most it is."""
    return list(compress(range(len(states)), map(of, states)))


def members_of(of: Callable[[dict[str, Any]], dict[str, Any]], states: Iterable[dict[str, Any]]) -> list[Any]:
    """What is in this part of the modules' states, one after the other."""
    return list(chain.from_iterable(map(dict.values, filter(None, map(of, states)))))


def functions_in(space: Mapping[str, Any]) -> list[str]:
    """The names of the functions and classes that code of a file calls by its globals."""
    callables = (types.FunctionType, types.BuiltinFunctionType, type)
    return [name for name, value in space.items() if isinstance(value, callables)]


class Parameters:
    """The parameters of some modules: which objects they are, where they lie, and how."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(map(weakref.ref, modules))
        parameters = present_in(modules)
        self._references = list(map(weakref.ref, parameters))
        self._addresses = list(map(Tensor.data_ptr, parameters))
        self._layouts = list(map(layout_of, parameters))
        self._strides = list(map(Tensor.stride, parameters))
        self._versions = edit_counts(parameters)

    def lie_still(self) -> list[Any] | None:
        """The parameters, where what lies at the addresses is alive: without that, nothing may read there. A fifth of a
        millisecond for SDXL's UNet. Drop them after the call."""
        modules: list[Any] = [reference() for reference in self._modules]
        if None in modules:
            return None
        parameters = present_in(modules)
        with suppress(RuntimeError, TypeError):
            if self._addresses == list(map(Tensor.data_ptr, parameters)):
                return parameters
        return None

    def stand(self) -> bool:
        """Whether these are the very parameters, and each lies where and as it lay."""
        found = self.lie_still()
        return found is not None and self._are_the_same(found)

    def were_edited(self, found: list[Any] | None = None) -> bool | None:
        """Whether any was edited in place since this was asked last, as far as torch counts that; None where they do
        not stand. found: what lie_still has told at this call."""
        parameters = found or self.lie_still()
        if parameters is None or not self._are_the_same(parameters):
            return None
        before, self._versions = self._versions, edit_counts(parameters)
        return self._versions != before

    def _are_the_same(self, parameters: list[Any]) -> bool:
        """Whether those that lie still are the very parameters, and lie as they lay."""
        if not all(map(operator.is_, parameters, [reference() for reference in self._references])):
            return False
        with suppress(RuntimeError, TypeError):
            strides, layouts = list(map(Tensor.stride, parameters)), list(map(layout_of, parameters))
            return (strides, layouts) == (self._strides, self._layouts)
        return False


def present_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The parameters that are these modules' own, in their order."""
    found = members_of(of_parameters, map(state_of, modules))
    return [parameter for parameter in found if parameter is not None]


def during(
    work: Callable[[], Result], root: nn.Module, tree: Tree, parameters: Parameters, contents: Contents | None
) -> tuple[Result, bool] | None:
    """What work() returns, a replay, and whether values were edited since that was asked last, as far as torch counts
    that or the contents of these parameters tell it. None where the module tree computes otherwise, or the parameters
    are others: that is looked at once the replay is launched, but for what it would read from memory that is not there
    any more. Then it is not."""
    found = parameters.lie_still()
    if found is None:
        return None
    changed = bool if contents is None else contents.begin(are_alive=True)
    result = work()
    if not tree.stands(root):
        return None
    have_changed = changed()
    # Last: it tells of each edit once.
    were_edited = parameters.were_edited(found)
    return None if were_edited is None else (result, were_edited or have_changed)


UNCOUNTED = -1


def edit_counts(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was edited in place."""
    # Asking an inference tensor raises, which takes twenty times as long.
    if not any(map(Tensor.is_inference, tensors)):
        with suppress(RuntimeError):
            return list(map(VERSION, tensors))
    return list(map(edit_count, tensors))


def edit_count(tensor: Any) -> int:
    """How often a tensor was edited in place; UNCOUNTED for an inference tensor."""
    try:
        return UNCOUNTED if tensor.is_inference() else int(tensor._version)
    except RuntimeError:  # one whose data is an inference tensor's
        return UNCOUNTED
