"""Finds out whether the code that a network runs has changed: the values of the names in it, and the functions' bodies.

code.py finds the names. Reached notes their values once, and they are compared with the present ones at every call.
Extensions of a WebUI replace functions at any time, and a CUDA graph would go on with the old ones.
"""
from __future__ import annotations

import hashlib
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from .code import Code, Named
from .comparers import Comparer, comparer
from .snapshot import BY_IDENTITY, Same, is_plain, same, snapshot, state_of
from .values import CONTAINERS, Digests, Tokens, name_of, short

# The __dict__ of a module, class or file.
Namespace = Mapping[str, Any]
# Annotations do not affect computation and are slow to compare.
ANNOTATIONS = frozenset({"__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"})
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
# The types of plain values that are part of Names.digest, by their repr. torch.device is not among them: a network
# computes the same on any device. (values.SAME_IN_ANY_PROCESS is a longer list, for values that code names.)
IN_DIGEST = (int, float, complex, bool, str, bytes, type(None), tuple, torch.dtype)


class Alike(NamedTuple):
    """A group of namespaces in which the same names are compared, so that one pass without Python calls compares all.

    names: the names that are compared.
    indices: the positions of these namespaces in the list of all namespaces.
    pick: returns these namespaces from the list of all.
    values: returns the values of the names in one namespace: a tuple; for a single name the value itself.
    known: the results of `values` when this was made, one for each of these namespaces.
    """

    names: tuple[str, ...]
    indices: list[int]
    pick: Callable[[Sequence[Namespace]], Sequence[Namespace]]
    values: Callable[[Namespace], Any]
    known: list[Any]


class Names:
    """The values of some names in some namespaces (the attributes of modules and classes, and the globals of files), to
    find out later whether they have changed."""

    def __init__(self, spaces: Sequence[Namespace], names: Iterable[Iterable[str]]) -> None:
        """names: for each of the spaces, in their order, the names to compare. Keeps plain values (snapshot.is_plain)
        alive, and neither spaces nor other values. Raises KeyError if a space does not have one of its names."""
        # Values that are compared by identity, and must not be kept alive.
        self._objects: list[tuple[int, str]] = []
        self._references: list[weakref.ref[Any]] = []
        # The same for objects without attributes, such as most attention processors, with their classes.
        self._bare: list[tuple[int, str]] = []
        self._bare_references: list[weakref.ref[Any]] = []
        self._bare_types: list[type] = []
        self._others: list[tuple[int, str, Comparer]] = []
        indices_of: dict[tuple[str, ...], list[int]] = {}
        for index, (space, wanted) in enumerate(zip(spaces, names, strict=True)):
            plain: list[str] = []
            for name in wanted:
                value = space[name]
                if is_plain(value):
                    plain.append(name)
                elif isinstance(value, BY_IDENTITY):
                    self._objects.append((index, name))
                    self._references.append(weakref.ref(value))
                elif is_bare(value):
                    self._bare.append((index, name))
                    self._bare_references.append(weakref.ref(value))
                    self._bare_types.append(type(value))
                else:
                    self._others.append((index, name, comparer(value)))
            if plain:
                indices_of.setdefault(tuple(plain), []).append(index)
        self._plain = [alike_at(spaces, plain_names, indices) for plain_names, indices in indices_of.items()]
        # Groups of one namespace with several names: (its index, Alike.values, the known values). Most code has these.
        self._alone: list[tuple[int, Callable[[Namespace], Any], tuple[Any, ...]]] = []
        self._groups: list[Alike] = []
        for one in self._plain:
            if len(one.indices) == 1 and len(one.names) > 1:
                self._alone.append((one.indices[0], one.values, one.known[0]))
            else:
                self._groups.append(one)

    def are_unchanged(self, spaces: Sequence[Namespace]) -> bool:
        """Whether the names have the same values as when this was made. spaces: the same namespaces in the same order.
        Raises KeyError if a namespace does not have one of its names any more."""
        for index, values, known_values in self._alone:
            if values(spaces[index]) != known_values:
                return False
        for alike in self._groups:
            if list(map(alike.values, alike.pick(spaces))) != alike.known:
                return False
        found = [spaces[index][name] for index, name in self._objects]
        known = [reference() for reference in self._references]
        # A freed object must not be taken for a name that is None now.
        if not all(map(operator.is_, found, known)) or not all(map(operator.is_not, known, repeat(None))):
            return False
        bare = [spaces[index][name] for index, name in self._bare]
        known = [reference() for reference in self._bare_references]
        # Objects of these types have a __dict__, so reading it raises nothing.
        if not all(map(operator.is_, bare, known)) or list(map(type, bare)) != self._bare_types:
            return False
        if any(map(state_of, bare)):
            return False
        return all(is_same(spaces[index][name]) for index, name, is_same in self._others)

    def digest(self, left_out: Collection[str]) -> str:
        """A digest, equal in any process, of the values whose type is in IN_DIGEST, with their names, as they were when
        this was made. Names with other values do not count. left_out: more names that do not count."""
        found: dict[int, list[tuple[str, str]]] = {}
        for alike in self._plain:
            for index, row in zip(alike.indices, alike.known, strict=True):
                values = row if len(alike.names) > 1 else (row,)
                pairs: list[tuple[str, str]] = []
                for name, value in zip(alike.names, values, strict=True):
                    if name not in left_out and isinstance(value, IN_DIGEST):
                        pairs.append((name, repr(value)))
                found[index] = sorted(pairs)
        return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


def is_bare(value: Any) -> bool:
    """Whether a value that is not plain is an object without attributes that may get some: it supports weak references,
    and its __dict__ is empty. False for containers, tensors and bound methods, which are compared by their contents."""
    if isinstance(value, (*CONTAINERS, torch.Tensor, types.MethodType)) or not isinstance(same(value), Same):
        return False
    return getattr(value, "__dict__", None) == {}


def alike_at(spaces: Sequence[Namespace], names: tuple[str, ...], indices: list[int]) -> Alike:
    """The Alike of the namespaces at these indices of spaces, with their present values. Each has all of the names."""
    # A slice, because an itemgetter of one index returns the item and not a sequence.
    wanted = indices if len(indices) > 1 else [slice(indices[0], indices[0] + 1)]
    pick = operator.itemgetter(*wanted)
    values = operator.itemgetter(*names)
    known = list(map(values, pick(spaces)))
    return Alike(names, indices, pick, values, known)


class Bodies:
    """The bodies of functions as they are when this is made: their code, and the values of their defaults and closures,
    to find out later whether they have changed. Keeps alive only functions without a closure, whose defaults are plain
    (snapshot.is_plain)."""

    def __init__(self, functions: Sequence[types.FunctionType]) -> None:
        # Functions without a closure cannot keep a model alive, and are compared in one go.
        self._plain: list[types.FunctionType] = []
        self._others: list[tuple[weakref.ref[types.FunctionType], tuple[Any, ...]]] = []
        self._with_keywords: list[tuple[weakref.ref[types.FunctionType], Any]] = []
        for function in functions:
            if function.__closure__ is None and is_plain(function.__defaults__):
                self._plain.append(function)
            else:
                self._others.append((weakref.ref(function), snapshot_of_body(function)))
            if function.__kwdefaults__:
                self._with_keywords.append((weakref.ref(function), snapshot(function.__kwdefaults__)))
        self._known = list(map(body_of, self._plain))

    def are_unchanged(self) -> bool:
        """Whether all bodies are the same as when this was made; False also if a function was freed."""
        if list(map(body_of, self._plain)) != self._known:
            return False
        for reference, known in self._others:
            function = reference()
            if function is None or snapshot_of_body(function) != known:
                return False
        for reference, known in self._with_keywords:
            function = reference()
            if function is None or snapshot(function.__kwdefaults__) != known:
                return False
        return True


body_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
# A cell without content.
EMPTY = types.CellType()


def snapshot_of_body(function: types.FunctionType) -> tuple[Any, ...]:
    """A function's code, and snapshots of its positional defaults and of the contents of its closure. Equal to an
    earlier result as long as these are unchanged."""
    cells = function.__closure__ or ()
    held = [snapshot(cell.cell_contents) for cell in cells if cell != EMPTY]
    return function.__code__, snapshot(function.__defaults__), len(cells), held


# The labels of torch's state in Reached.facts.
TORCH_STATE = ("torch's default dtype", "torch's modes")


class Reached:
    """The code that some classes and functions run, with everything that it reaches by name and the state of torch that
    it reads, as they are when this is made, to find out later whether any of it has changed.

    sources: the classes that it was made from.
    names: all names that occur in the code outside of torch; see Code.
    """

    def __init__(
        self, sources: Sequence[type], functions: Sequence[Any], tokens: Tokens, left_out: Collection[str] = (),
    ) -> None:
        """sources, functions: the classes and functions of a network, where reading begins. tokens: names for objects
        without a digest by value. left_out: see Code."""
        code = Code([*sources, *functions], left_out)
        self.sources = sources
        self.names = code.names
        self._tokens = tokens
        self._classes = list(code.classes)
        self._named = list(code.named.values())
        self._named_by_ours = code.named_by_ours
        self._classes_of_ours = code.classes_of_ours
        self._class_spaces = list(map(vars, self._classes))
        self._sizes = list(map(len, self._class_spaces))
        by_space: dict[int, list[Named]] = {}
        for named in self._named:
            by_space.setdefault(id(named.space), []).append(named)
        all_modules = vars(nn.modules.module)
        names_of_classes = [
            [name for name in space if name not in ANNOTATIONS] for space in self._class_spaces
        ]
        names_of_files = [[named.name for named in found] for found in by_space.values()]
        names_of_hooks = [name for name in GLOBAL_HOOKS if name in all_modules]
        files = [found[0].space for found in by_space.values()]
        self._spaces: list[Namespace] = [*self._class_spaces, *files, all_modules]
        self._meanings = Names(self._spaces, [*names_of_classes, *names_of_files, names_of_hooks])
        self._absent = list(code.absent.values())
        self._bodies = Bodies(list(code.functions.values()))
        self._torch_state = torch_state()

    def is_unchanged(self) -> bool:
        """Whether neither code nor values nor torch's state have changed since this was made. Takes a third of a
        millisecond."""
        try:
            return (
                list(map(len, self._class_spaces)) == self._sizes
                and self._meanings.are_unchanged(self._spaces)
                and self._bodies.are_unchanged()
                and all(space.keys().isdisjoint(names) for space, names in self._absent)
                and torch_state() == self._torch_state
            )
        except (KeyError, RuntimeError, TypeError, ValueError):
            # A function is gone, or a name is now a value, such as a tensor, that == does not compare with a plain one.
            return False

    def named(self) -> Iterator[Named]:
        """Every name that is compared: those that code looks up in Python modules, and the members of classes."""
        yield from self._named
        yield from members_of_classes(self._classes)

    @cached_property
    def facts(self) -> dict[str, str]:
        """The digest of each name's value, by the name's label ("torch.nn.functional.linear"), and the state of torch
        by the labels of TORCH_STATE. Computed at the first use, in tens of milliseconds. Equal in any process, except
        for values without a digest by value, and valid as long as is_unchanged() is true."""
        digests = Digests(self._tokens)
        found = {named.label: digests.of_data(named.value) for named in self.named()}
        default_dtype, modes = TORCH_STATE
        found[default_dtype] = repr(torch.get_default_dtype())
        found[modes] = repr([*map(digests.of_data, function_modes()), self._torch_state[-1]])
        return found

    @property
    def facts_of_ours(self) -> dict[str, str]:
        """The part of `facts` that OneDiff's own operators depend on. As long as these are equal, graphs and copies of
        weights stay valid, even if code of the host, such as that of its LoRAs, has changed: none of it runs in a
        graph.
        """
        named = [*self._named_by_ours, *members_of_classes(self._classes_of_ours)]
        labels = [one.label for one in named]
        return {label: self.facts[label] for label in (*labels, *TORCH_STATE)}

    def changed(self, before: Mapping[str, str]) -> list[Named]:
        """The names whose values differ from those in `before`, the facts of an earlier Reached. A name that is not in
        `before` does not count as changed."""
        facts = self.facts
        return [one for one in self.named() if facts[one.label] != before.get(one.label, facts[one.label])]

    @cached_property
    def digest(self) -> str:
        """A digest of all facts, which identifies this state of the code."""
        return short(repr(sorted(self.facts.items())))


def members_of_classes(classes: Sequence[type]) -> Iterator[Named]:
    """The members of classes, each as a Named, without annotations and without members of base classes."""
    for kind in classes:
        space = vars(kind)
        for name in list(space):
            if name not in ANNOTATIONS:
                yield Named(space, name_of(kind), name)


def torch_state() -> tuple[Any, ...]:
    """The state of torch that a forward depends on besides its arguments, to compare with a later result: the default
    dtype, and the torch modes that every operator goes through (torch.set_default_device sets one)."""
    modes = list(map(snapshot, function_modes()))
    return torch.get_default_dtype(), modes, torch._C._len_torch_dispatch_stack()


def function_modes() -> list[Any]:
    """The TorchFunctionModes that are active in this thread, the outermost first."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(count)]
