"""The code that a module tree runs: the functions that its classes call by name, found by reading their bytecode.

A forward pass reaches functions by the names in its code: globals of its file (`get_timestep_embedding`), attributes of
modules that the file imports (`torch.cat`, `F.dropout`, `comfy_kitchen.apply_rope`), and methods (`Tensor.chunk`). Any
of them may be replaced, and the host then computes something else. So does our own forward where what it finds in torch
is replaced, and a host that has imported the same function by name goes on as before. This module lists all of these
names, as pairs of a namespace and a name.
"""
from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.origins import HOLDERS, OURS, TORCH, beneath_ours, callables_within, package
from .values import CONTAINERS, MOST_ENTRIES, as_it_is

# Classes of torch whose methods a forward pass calls on every tensor.
TENSORS = (torch.Tensor, nn.Parameter)
# Values that have no code.
CONSTANT_TYPES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
# Methods that Python and torch call without their names being in anybody's code.
CALLED_BY_PYTHON = frozenset({
    "forward", "_forward", "__call__", "__init__", "__new__", "__post_init__", "__getattr__", "__getattribute__",
    "__enter__", "__exit__", "__iter__", "__getitem__", "__len__", "__bool__", "_call_impl", "_wrapped_call_impl",
})
# Methods that run where an object is made, and not for one that is there.
MAKERS = frozenset({"__init__", "__new__", "__post_init__"})
# Where functions of torch that compute are; what else torch's functions name is loaded when it is first used.
OF_TORCH = ("torch", "torch.functional", "torch.nn", "torch._C", "torch._VF", "torch.fft", "torch.linalg")
# Functions of torch that read and write files. No forward pass calls them, and Forge Neo replaces torch.load; other
# methods of the same names are called.
OF_FILES = frozenset({"load", "save"})
# The parts of our own package whose code computes.
OF_OURS = tuple(f"{OURS}.{room}." for room in ("core", "families", "weights", "devices", "steps"))
STANDARD_LIBRARY = sys.stdlib_module_names
# torch reasons about shapes by sympy and mpmath, and networks keep their configuration in omegaconf's lists: neither
# computes anything of an image.
NOT_READ = STANDARD_LIBRARY | {TORCH, "sympy", "mpmath", "omegaconf"}
Space = dict[str, Any] | types.MappingProxyType[str, Any]


class Named(NamedTuple):
    """A name that code looks up: in which namespace, what that belongs to ("torch.nn.functional"), and the name."""

    space: Space
    owner: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def value(self) -> Any:
        return self.space[self.name]


class Code:
    """Everything that some code reaches by name, and what our own code finds in torch. It keeps all of that alive: drop
    it.

    classes: the classes whose methods are called, and their bases. functions: the Python functions reached. named: each
    look-up of a name in a namespace, with that namespace, by both. absent: by namespace, names that code looks up there
    and finds elsewhere: a builtin, or what a module's __getattr__ returns. If such a name is defined there later, the
    code means something else. names: all names that code outside of torch uses, attributes included. named_by_ours,
    classes_of_ours: the part of named and of classes that OneDiff's own code reaches.
    """

    def __init__(self, roots: Iterable[Any], left_out: Collection[str] = ()) -> None:
        """roots: classes, whose code is read in whole, and functions. left_out: names that are not followed where code
        looks them up, each with its Python module ("networks.loaded_networks")."""
        self._left_out = frozenset(left_out)
        self.classes: dict[type, None] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.named: dict[tuple[int, str], Named] = {}
        self.absent: dict[int, tuple[Space, set[str]]] = {}
        # Members of known classes and objects whose names no code has used yet, by name.
        self._unnamed: dict[str, list[Any]] = {}
        self.names: set[str] = set()
        # By identity, and alive as long as this is.
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = list(TENSORS)
        self._name(CALLED_BY_PYTHON)
        self._read_ours()
        self._follow_all()
        self.named_by_ours = list(self.named.values())
        self.classes_of_ours = list(self.classes)
        for root in roots:
            if isinstance(root, type):
                self._add_class(root)
            else:
                self._waiting.append(root)
        self._follow_all()

    def _follow_all(self) -> None:
        while self._waiting:
            self._follow(self._waiting.pop())

    def _follow(self, value: Any) -> None:
        """Read what a name stands for, and everything that it calls."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType) and package(str(value.__globals__.get("__name__"))) == OURS:
            # A hook of ours changes nothing of what the host computes.
            host = beneath_ours(value)
            if host is not value:
                self._waiting.append(host)
            return
        kind = value if isinstance(value, type) else type(value)
        if kind in TENSORS or package(kind.__module__) not in NOT_READ:
            self._add_class(kind)
            # No forward pass makes modules.
            if isinstance(value, type) and not issubclass(value, nn.Module):
                self._add_makers(value)
        if isinstance(value, types.FunctionType):
            self._read(value)
        self._waiting.extend(callables_within(value))
        self._waiting.extend(objects_in(value))
        if package(kind.__module__) not in NOT_READ and not isinstance(value, (type, nn.Module)):
            self._add_members(getattr(value, "__dict__", {}))

    def _read_ours(self) -> None:
        for function in our_functions():
            names = names_in(function.__code__)
            space = function.__globals__
            modules = (space[name] for name in names & space.keys() if isinstance(space[name], types.ModuleType))
            for module in modules:
                if package(module.__name__) == TORCH and computes(module.__name__):
                    self._look_up_in(vars(module), module.__name__, names)

    def _read(self, function: types.FunctionType) -> None:
        """Add a function, and follow the names in its bytecode."""
        space = function.__globals__
        owner = str(space.get("__name__", "?"))
        self.functions[id(function)] = function
        if package(owner) in STANDARD_LIBRARY and owner != "__main__":
            # What it calls in turn computes nothing of an image.
            return
        names = names_in(function.__code__)
        if package(owner) != TORCH:
            self._name(names)
        self._look_up(space, owner, names)

    def _look_up(self, space: Space, owner: str, names: frozenset[str]) -> None:
        """Note what these names stand for in a namespace, and in the modules that they stand for there."""
        hidden = (names & vars(builtins).keys()) - space.keys()
        self._note_absent(space, hidden)
        self._look_up_in(space, owner, names)

    def _look_up_in(self, space: Space, owner: str, names: frozenset[str]) -> None:
        """Add to named those of these names that a namespace has and that may compute, and look in its modules too.
        owner: the name of the module whose namespace it is."""
        reads_data = package(owner) not in NOT_READ
        waiting = [(space, owner)]
        seen = {id(space)}
        while waiting:
            space, owner = waiting.pop()
            for name in names & space.keys():
                if f"{owner}.{name}" in self._left_out or (package(owner) == TORCH and name in OF_FILES):
                    continue
                value = space[name]
                if isinstance(value, types.ModuleType):
                    inner = vars(value)
                    if not computes(value.__name__):
                        continue
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        waiting.append((inner, value.__name__))
                        self._note_absent(inner, found_elsewhere(value, names))
                elif not (callable(value) or (reads_data and package(owner) not in NOT_READ)):
                    continue
                else:
                    self._waiting.append(value)
                self.named.setdefault((id(space), name), Named(space, owner, name))

    def _note_absent(self, space: Space, names: Collection[str]) -> None:
        """Add these names to absent for a namespace."""
        if names:
            self.absent.setdefault(id(space), (space, set()))[1].update(names)

    def _add_class(self, kind: type) -> None:
        """What runs for an object of this class that is there already."""
        for base in bases_of(kind):
            if base not in self.classes:
                self.classes[base] = None
                self._add_members({name: value for name, value in vars(base).copy().items() if name not in MAKERS})

    def _add_makers(self, kind: type) -> None:
        """What makes objects of a class that code names."""
        for base in bases_of(kind):
            self._add_members({name: vars(base)[name] for name in MAKERS & vars(base).keys()})

    def _add_members(self, space: Space) -> None:
        """Follow the members of a class or an object whose names code uses; keep the others until code uses theirs."""
        for name, value in space.copy().items():
            if name in self.names:
                self._waiting.append(value)
            else:
                self._unnamed.setdefault(name, []).append(value)

    def _name(self, names: Collection[str]) -> None:
        """Note that code uses these names, and follow every known member that has one of them."""
        for name in frozenset(names) - self.names:
            self.names.add(name)
            self._waiting.extend(self._unnamed.pop(name, ()))


def bases_of(kind: type) -> list[type]:
    """A class and those that it inherits from, as far as their code is read."""
    return [
        base for base in kind.__mro__[:-1]
        if package(base.__module__) not in STANDARD_LIBRARY and base is not torch._C.TensorBase
    ]


def objects_in(container: Any) -> list[Any]:
    """The objects in a container, of which code calls methods."""
    if not isinstance(container, CONTAINERS) or len(container) > MOST_ENTRIES:
        return []
    now = as_it_is(container)
    found = now.values() if isinstance(now, dict) else now
    return [one for one in found if not isinstance(one, (*CONSTANT_TYPES, torch.Tensor, nn.Module, types.ModuleType))]


def our_functions() -> Iterator[types.FunctionType]:
    """Those of our own files that compute, as far as they are loaded: all of them are before a network is attached."""
    # Anything may lie in sys.modules, and other threads import meanwhile.
    files = [
        module for name, module in sorted(sys.modules.copy().items())
        if name.startswith(OF_OURS) and isinstance(module, types.ModuleType)
    ]
    for module in files:
        waiting = [one for one in vars(module).copy().values() if getattr(one, "__module__", None) == module.__name__]
        while waiting:
            one = waiting.pop()
            if isinstance(one, type):
                waiting.extend(vars(one).values())
            for function in (one, *callables_within(one)) if callable(one) or isinstance(one, HOLDERS) else ():
                if isinstance(function, types.FunctionType):
                    yield function


def found_elsewhere(module: types.ModuleType, names: Collection[str]) -> set[str]:
    """Those of these names that a module of torch finds by its __getattr__, as torch._VF does, and not in itself."""
    if type(module) is types.ModuleType or package(module.__name__) != TORCH:
        return set()
    return {name for name in names if name not in vars(module) and hasattr(module, name)}


def computes(module: str) -> bool:
    """Whether names are looked up in a module of this name: in all but torch's own machinery."""
    if package(module) != TORCH:
        return True
    return module in OF_TORCH or module.startswith(("torch.nn.", "torch._C."))


@functools.lru_cache(maxsize=1 << 14)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names that code and the functions within it look up: globals and attributes."""
    return frozenset(name for one in codes_in(code) for name in one.co_names)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions, lambdas and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
