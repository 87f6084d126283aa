"""Whether anything has changed under us: what a module tree computes with, noted once and compared at every call.

Noted are the modules and their order, their classes and what these and their bases define, every attribute, hooks,
everything that their code reaches by name (see code.py), and the parameters: which objects they are, where they lie and
how. An edit of a value in place is none of these: whoever keeps something that was made of values
(eight-bit weights, a second card's copy) asks weights.contents as well.

Nothing noted keeps a module, a tensor or a function's closure alive. Objects are recognised by weak references: an
id() may come again.
"""
from __future__ import annotations

import hashlib
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.origins import package
from .code import NOT_READ, Code, Named, as_it_is, objects_in
from .contents import Contents, Place
from .values import FUNCTIONS, Digests, Tokens, name_of, short

Result = TypeVar("Result")
# What torch keeps on every module and no forward pass reads, or what is compared by itself.
BOOKKEEPING = frozenset({
    "_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})
PROCESSOR = "processor"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
# Equal values are the same to whoever computes with them.
ATOMS = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, type, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.ModuleType,
)
# Of these very types, and of no subclass: what is asked about most, told without a call.
PLAIN = frozenset(ATOMS)
# What a class says of types: nobody computes with it, and it takes as long to compare as all the rest.
ANNOTATIONS = frozenset({"__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"})
SAME_IN_ANY_PROCESS = (int, float, complex, bool, str, bytes, type(None), tuple, torch.dtype)
FORWARDS = ("forward", "_forward")
# A closure may hold a model. What it holds is compared where its code is reached.
BY_IDENTITY = (types.FunctionType, nn.Module)
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
        now = as_it_is(value)
        inside: Iterable[Any] = chain.from_iterable(now.items()) if isinstance(now, dict) else now
        return kind, tuple([one if type(one) in PLAIN else token(one, depth + 1) for one in inside])
    if isinstance(value, Tensor):
        return Place.of(value), edit_count(value)
    if isinstance(value, types.MethodType):
        return types.MethodType, token(value.__func__, depth + 1), token(value.__self__, depth + 1)
    one_object = same(value)
    if isinstance(value, BY_IDENTITY):
        return one_object
    state = getattr(value, "__dict__", {})
    if not state or depth > DEEPEST:
        return one_object, type(value), None
    return one_object, type(value), {name: token_of_held(one, depth) for name, one in state.copy().items()}


def token_of_held(value: Any, depth: int) -> Any:
    """Of an attribute of an object that is no module: plain values and code. What else it holds is known by its
    type."""
    if is_atom(value):
        return value
    return token(value, depth + 1) if isinstance(value, FUNCTIONS) else type(value)


def same(value: Any) -> Any:
    """What equals that of the same object alone; of an object to which there can be no weak reference, its class."""
    try:
        return Same(value)
    except TypeError:
        return type(value)


def no_object() -> None:
    return None


class Names:
    """What some names stand for in each of some namespaces: the attributes of modules, of classes, of files."""

    def __init__(self, spaces: Sequence[Mapping[str, Any]], names: Iterable[Iterable[str]]) -> None:
        self._others: list[tuple[int, str, Any]] = []
        # What is the same as long as it is the same object, and must not be kept alive.
        self._objects: list[tuple[int, str]] = []
        self._references: list[weakref.ref[Any]] = []
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, (space, wanted) in enumerate(zip(spaces, names, strict=True)):
            plain: list[str] = []
            for name in wanted:
                if is_atom(space[name]):
                    plain.append(name)
                elif isinstance(space[name], BY_IDENTITY):
                    self._objects.append((place, name))
                    self._references.append(weakref.ref(space[name]))
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
        found = [spaces[place][name] for place, name in self._objects]
        if not all(map(operator.is_, found, [reference() for reference in self._references])):
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


class Bodies:
    """What runs when some functions are called, besides what their names stand for: their code, the values of their
    defaults and of their closures."""

    def __init__(self, functions: Sequence[types.FunctionType]) -> None:
        # Those without a closure hold no model, and are compared in one go.
        self._plain = [one for one in functions if one.__closure__ is None and is_atom(one.__defaults__)]
        self._known = list(map(body_of, self._plain))
        others = (one for one in functions if one.__closure__ is not None or not is_atom(one.__defaults__))
        self._others = [(weakref.ref(one), token_of_body(one)) for one in others]
        named = (one for one in functions if one.__kwdefaults__)
        self._named = [(weakref.ref(one), token(one.__kwdefaults__)) for one in named]

    def stand(self) -> bool:
        if list(map(body_of, self._plain)) != self._known:
            return False
        for reference, known in self._others:
            function = reference()
            if function is None or token_of_body(function) != known:
                return False
        for reference, known in self._named:
            function = reference()
            if function is None or token(function.__kwdefaults__) != known:
                return False
        return True


body_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def token_of_body(function: types.FunctionType) -> tuple[Any, ...]:
    cells = function.__closure__ or ()
    # A cell that nothing has been put into yet is told by its emptiness.
    held = [token(cell.cell_contents) for cell in cells if cell != EMPTY]
    return function.__code__, token(function.__defaults__), len(cells), held


EMPTY = types.CellType()


class Reached:
    """The code that some classes and functions run, all of that they reach by name, and what of torch's state it reads.

    names: all names in that code outside of torch.
    """

    def __init__(self, sources: Sequence[type], functions: Sequence[Any], tokens: Tokens) -> None:
        code = Code([*sources, *functions])
        self.sources, self.names = sources, code.names
        self._tokens = tokens
        self._kinds, self._named = list(code.kinds), list(code.named.values())
        class_spaces = list(map(vars, self._kinds))
        by_space: dict[int, list[Named]] = {}
        for named in self._named:
            by_space.setdefault(id(named.space), []).append(named)
        everywhere = vars(nn.modules.module)
        self._spaces = [*class_spaces, *(found[0].space for found in by_space.values()), everywhere]
        of_kinds = ([name for name in space if name not in ANNOTATIONS] for space in class_spaces)
        of_modules = ([named.name for named in found] for found in by_space.values())
        global_hooks = [name for name in GLOBAL_HOOKS if name in everywhere]
        self._code = Names(self._spaces, [*of_kinds, *of_modules, global_hooks])
        self._class_spaces, self._sizes = class_spaces, list(map(len, class_spaces))
        self._absent = list(code.absent.values())
        self._bodies = Bodies(list(code.functions.values()))
        self._ambient = ambient()

    def stands(self) -> bool:
        """Whether all of it is as it was. A third of a millisecond."""
        try:
            return (
                list(map(len, self._class_spaces)) == self._sizes
                and self._code.stand(self._spaces)
                and self._bodies.stand()
                and all(space.keys().isdisjoint(names) for space, names in self._absent)
                and ambient() == self._ambient
            )
        except KeyError:  # a function is gone
            return False

    def named(self) -> Iterator[Named]:
        """Everything that the code reaches by name, in modules and in classes."""
        yield from self._named
        for kind in self._kinds:
            space = vars(kind)
            yield from (Named(space, name_of(kind), name) for name in list(space) if name not in ANNOTATIONS)

    @cached_property
    def facts(self) -> dict[str, str]:
        """What the names stand for, as digests that are equal in any process. As long as it stands, so do these. Tens
        of milliseconds."""
        digests = Digests(self._tokens)
        found = {named.label: digests.of_data(named.value) for named in self.named()}
        found["torch's default dtype"] = repr(torch.get_default_dtype())
        found["torch's modes"] = repr([*map(digests.of_data, function_modes()), self._ambient[-1]])
        return found

    def changed(self, before: Mapping[str, str]) -> list[Named]:
        """What stands for something else than before, which are facts of earlier code."""
        facts = self.facts
        return [one for one in self.named() if facts[one.label] != before.get(one.label, facts[one.label])]

    @cached_property
    def digest(self) -> str:
        return short(repr(sorted(self.facts.items())))


class Tree:
    """A module tree as it computed when this was made.

    reached: the code that it runs.
    """

    def __init__(
        self, root: nn.Module, ignored: Collection[str], placed: Collection[str], tokens: Tokens | None = None,
        before: Tree | None = None,
    ) -> None:
        """ignored: names of attributes that somebody else looks at. placed: names that its digest leaves out. tokens:
        name what has no digest by value. before: an earlier tree of this root; code that stands is not read again."""
        modules = list(root.modules())
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        states = list(map(state_of, modules))
        unread = BOOKKEEPING.union(ignored)
        packages = {package(kind.__module__) for kind in self._classes}
        # An attention's processor is no module. One of another package is called as it is, at every call: which object
        # it is counts, and neither its code nor what it remembers between calls is part of what was proved.
        self._foreign = {
            place: same(state[PROCESSOR]) for place, state in enumerate(states)
            if PROCESSOR in state and package(type(state[PROCESSOR]).__module__) not in packages
        }
        self._attributes = Names(states, [
            [name for name in state.copy() if name not in unread and not self._is_foreign(place, name)]
            for place, state in enumerate(states)
        ])
        # The places of the modules that have children, and of each child; behind the last stands None.
        self._parents = places_with(of_children, states)
        places = {id(one): place for place, one in enumerate((*modules, None))}
        self._children = [places[id(child)] for child in members_of(of_children, states)]
        self._hooked = [places_with(hooks, states) for hooks in of_hooks]
        self._hooks = [
            (place, name, token(state[name])) for place, state in enumerate(states) for name in HOOKS if state[name]
        ]
        self._sizes = list(map(len, states))
        processors = [
            type(state[PROCESSOR]) for place, state in enumerate(states)
            if PROCESSOR in state and place not in self._foreign
        ]
        # Objects that are no modules compute as their classes do.
        held = list(chain.from_iterable(
            held_by(one) for state in states for name, one in state.copy().items()
            if type(one) not in PLAIN and name not in unread and name not in FORWARDS and name != PROCESSOR
        ))
        set_on_instances = [one for one in held if isinstance(one, FUNCTIONS)]
        objects = [type(one) for one in held if not isinstance(one, FUNCTIONS)]
        # The packages of the host's own classes.
        self.hosts = frozenset(package(kind.__module__) for kind in (*self._classes, *processors))
        sources = list(dict.fromkeys((*self._classes, *processors, *objects)))
        self._ignored, self._placed, self._tokens = unread, placed, tokens or Tokens()
        known = None if before is None or set_on_instances else before.reached
        self.reached: Reached
        if known is not None and known.sources == sources and known.stands():
            self.reached = known
        else:
            self.reached = Reached(sources, set_on_instances, self._tokens)

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
            and list(map(len, states)) == self._sizes
            and [places_with(hooks, states) for hooks in of_hooks] == self._hooked
            and all(token(states[place][name]) == known for place, name, known in self._hooks)
            and self._attributes.stand(states)
            and all(same(states[place][PROCESSOR]) == known for place, known in self._foreign.items())
            and self.reached.stands()
        )

    @cached_property
    def digest(self) -> str:
        """What tells the sources of this computation from others: classes, all code that they reach, and plain
        attributes but placed. As long as it stands, so does this."""
        modules = [reference() for reference in self._modules]
        paths = {id(module): str(place) for place, module in enumerate(modules)}
        digests = Digests(self._tokens, paths)
        read = [
            (place, name, digests.of_data(value)) for place, module in enumerate(modules)
            for name, value in vars(module).copy().items()
            if type(value) not in PLAIN and self._is_read(name, value) and not self._is_foreign(place, name)
        ]
        found = self.reached.digest, self._attributes.digest(self._placed), list(map(name_of, self._classes)), read
        return short(repr(found))

    def _is_foreign(self, place: int, name: str) -> bool:
        """Whether an attribute of the module at a place is a processor of another package."""
        return name == PROCESSOR and place in self._foreign

    def _is_read(self, name: str, value: Any) -> bool:
        """Whether an attribute of a module is a function, an object or a plain container, and the network's code has
        its name. Containers of other classes (diffusers' configurations) note where a network is from."""
        if name not in self.reached.names or name in self._ignored or name in self._placed or name in FORWARDS:
            return False
        if isinstance(value, CONTAINERS):
            return type(value) in CONTAINERS
        return not isinstance(value, (nn.Module, Tensor, type))


def held_by(value: Any) -> list[Any]:
    """The functions and objects that an attribute of a module is, or contains."""
    found = objects_in(value) if isinstance(value, CONTAINERS) else [value]
    return [one for one in found if isinstance(one, FUNCTIONS) or has_code(one)]


def has_code(value: Any) -> bool:
    """Whether an object is of a class whose methods are read."""
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor, nn.Module)):
        return False
    return package(type(value).__module__) not in NOT_READ


def ambient() -> tuple[Any, ...]:
    """The state of torch that a forward pass reads beside its arguments: the type of new tensors, and the modes that
    every operator goes through (torch.set_default_device is one)."""
    return torch.get_default_dtype(), list(map(token, function_modes())), torch._C._len_torch_dispatch_stack()


def function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def places_with(of: Callable[[dict[str, Any]], Any], states: Sequence[dict[str, Any]]) -> list[int]:
    """Where this part of the modules' states is not empty; for most it is."""
    return list(compress(range(len(states)), map(of, states)))


def members_of(of: Callable[[dict[str, Any]], dict[str, Any]], states: Iterable[dict[str, Any]]) -> list[Any]:
    """What is in this part of the modules' states, one after the other."""
    return list(chain.from_iterable(map(dict.values, filter(None, map(of, states)))))


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
