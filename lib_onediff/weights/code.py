"""Lists the functions that a network's classes call by name, by reading their bytecode.

A forward reaches functions by the names in its code: globals of its file (`get_timestep_embedding`), attributes of
modules that the file imports (`torch.cat`, `F.dropout`, `comfy_kitchen.apply_rope`), and methods (`Tensor.chunk`). If
an extension replaces one of them, the host computes something else. If it replaces a function in torch, our own forward
may compute something else, while a host that has imported the function by name does not. So this module lists all of
these names, with the namespaces in which they are looked up.
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
from .values import CONTAINERS, MOST_ENTRIES, safe_to_iterate

# Classes of torch whose methods a forward calls on tensors.
TENSORS = (torch.Tensor, nn.Parameter)
# Types of values without code.
CONSTANT_TYPES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
# Methods that Python and torch call implicitly, so that their names are not in the code.
CALLED_BY_PYTHON = frozenset({
    "forward", "_forward", "__call__", "__init__", "__new__", "__post_init__", "__getattr__", "__getattribute__",
    "__enter__", "__exit__", "__iter__", "__getitem__", "__len__", "__bool__", "_call_impl", "_wrapped_call_impl",
})
# Methods that run only when an object is made.
MAKERS = frozenset({"__init__", "__new__", "__post_init__"})
# The modules of torch with functions that compute. Others are left out: torch loads many of them at their first use.
OF_TORCH = ("torch", "torch.functional", "torch.nn", "torch._C", "torch._VF", "torch.fft", "torch.linalg")
# torch.load and torch.save are left out, because forwards call other methods of these names, and Forge Neo replaces
# torch.load.
OF_FILES = frozenset({"load", "save"})
# The folders of our own package whose code computes.
OF_OURS = tuple(f"{OURS}.{room}." for room in ("core", "families", "weights", "devices", "steps"))
STANDARD_LIBRARY = sys.stdlib_module_names
# Packages whose code is not read. torch uses sympy and mpmath for symbolic shapes, and networks keep configurations in
# omegaconf's lists: none of them affects an image.
NOT_READ = STANDARD_LIBRARY | {TORCH, "sympy", "mpmath", "omegaconf"}
Space = dict[str, Any] | types.MappingProxyType[str, Any]


class Named(NamedTuple):
    """A name that code looks up.

    space: the namespace that has the name: the attributes of a Python module or of a class.
    owner: the full name of that module or class, such as "torch.nn.functional".
    """

    space: Space
    owner: str
    name: str

    @property
    def label(self) -> str:
        """The full name, such as "torch.nn.functional.linear"."""
        return f"{self.owner}.{self.name}"

    @property
    def value(self) -> Any:
        """The present value of the name. Raises KeyError if the namespace does not have it any more."""
        return self.space[self.name]


class Code:
    """Everything that a network's code reaches by name, directly or through other functions; and everything in torch
    that OneDiff's own code reaches. Do not keep this object, because it keeps all of that alive.

    classes: the classes whose methods may be called, with their bases, in the order in which they were found.
    functions: all functions reached, by id, except OneDiff's own.
    named: all look-ups of a name in a namespace, by the namespace's id and the name.
    absent: by a namespace's id, the namespace, and the names that code looks up there and finds elsewhere: as a
        builtin, or through a module's __getattr__. If such a name is defined in the namespace later, the code calls
        something else.
    names: all names in code outside of torch, attributes included.
    named_by_ours, classes_of_ours: the values of `named`, and the `classes`, that OneDiff's own code reaches.
    """

    def __init__(self, roots: Iterable[Any], left_out: Collection[str] = ()) -> None:
        """roots: the network's classes and functions, from which names are followed. left_out: names that are not
        followed, each with its Python module ("networks.loaded_networks"). Reads everything now."""
        self._left_out = frozenset(left_out)
        self.classes: dict[type, None] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.named: dict[tuple[int, str], Named] = {}
        self.absent: dict[int, tuple[Space, set[str]]] = {}
        # Members of known classes and objects, by name, for names that are not in any code so far.
        self._unnamed: dict[str, list[Any]] = {}
        self.names: set[str] = set()
        # The values that were followed, by id, to keep them alive.
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = list(TENSORS)
        self._note_names(CALLED_BY_PYTHON)
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
        """Follow every value in _waiting, the list of values to follow, and all values found on the way."""
        while self._waiting:
            self._follow(self._waiting.pop())

    def _follow(self, value: Any) -> None:
        """Read the value of a name, if it was not read before: add its code and its class, and note the values inside
        of it to be followed next. Of a function of OneDiff, only the host's function beneath it is followed, if it is a
        hook."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType) and package(str(value.__globals__.get("__name__"))) == OURS:
            # Look through a hook of ours: it does not affect what the host computes.
            host = beneath_ours(value)
            if host is not value:
                self._waiting.append(host)
            return
        kind = value if isinstance(value, type) else type(value)
        if kind in TENSORS or package(kind.__module__) not in NOT_READ:
            self._add_class(kind)
            # A class named in the code may be instantiated, except modules, which no forward makes.
            if isinstance(value, type) and not issubclass(value, nn.Module):
                self._add_makers(value)
        if isinstance(value, types.FunctionType):
            self._read(value)
        self._waiting.extend(callables_within(value))
        self._waiting.extend(objects_in(value))
        if package(kind.__module__) not in NOT_READ and not isinstance(value, (type, nn.Module)):
            self._add_members(getattr(value, "__dict__", {}))

    def _read_ours(self) -> None:
        """Add the names in torch that OneDiff's own functions look up. Their values are followed like any others."""
        for function in our_functions():
            names = names_in(function.__code__)
            space = function.__globals__
            modules = (space[name] for name in names & space.keys() if isinstance(space[name], types.ModuleType))
            for module in modules:
                if package(module.__name__) == TORCH and computes(module.__name__):
                    self._look_up_in(vars(module), module.__name__, names)

    def _read(self, function: types.FunctionType) -> None:
        """Add a function to `functions`. Unless it is of the standard library, look up the names in its bytecode."""
        space = function.__globals__
        owner = str(space.get("__name__", "?"))
        self.functions[id(function)] = function
        if package(owner) in STANDARD_LIBRARY and owner != "__main__":
            # The standard library's own calls are not followed: they do not affect an image.
            return
        names = names_in(function.__code__)
        if package(owner) != TORCH:
            self._note_names(names)
        self._look_up(space, owner, names)

    def _look_up(self, space: Space, owner: str, names: frozenset[str]) -> None:
        """Look these names up in a function's globals, and in modules found there; see _look_up_in. A name that is not
        in the globals but among Python's builtins is added to `absent`. owner: the function's Python module."""
        hidden = (names & vars(builtins).keys()) - space.keys()
        self._note_absent(space, hidden)
        self._look_up_in(space, owner, names)

    def _look_up_in(self, space: Space, owner: str, names: frozenset[str]) -> None:
        """Look these names up in a namespace, and add to `named` each one that is found and may affect what code
        computes: callables, Python modules that compute, and in files outside of torch also data. If a value is such a
        module, look all of the names up in it too. owner: the name of the namespace's Python module."""
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
        """Add these names, which the namespace does not have, to `absent`."""
        if names:
            self.absent.setdefault(id(space), (space, set()))[1].update(names)

    def _add_class(self, kind: type) -> None:
        """Add a class and its bases to `classes`, and follow their members except MAKERS; see _add_members."""
        for base in bases_of(kind):
            if base not in self.classes:
                self.classes[base] = None
                self._add_members({name: value for name, value in vars(base).copy().items() if name not in MAKERS})

    def _add_makers(self, kind: type) -> None:
        """Follow the MAKERS of a class that code may instantiate; see _add_members."""
        for base in bases_of(kind):
            self._add_members({name: vars(base)[name] for name in MAKERS & vars(base).keys()})

    def _add_members(self, space: Space) -> None:
        """Follow those members of a class or object whose names are in code that was read. The others are followed when
        code with their name is read (_note_names). space: the members by name."""
        for name, value in space.copy().items():
            if name in self.names:
                self._waiting.append(value)
            else:
                self._unnamed.setdefault(name, []).append(value)

    def _note_names(self, names: Collection[str]) -> None:
        """Note that code with these names was read, and follow every known member that has one of them."""
        for name in frozenset(names) - self.names:
            self.names.add(name)
            self._waiting.extend(self._unnamed.pop(name, ()))


def bases_of(kind: type) -> list[type]:
    """A class and its bases in the order of method resolution, without those of Python, the standard library, and
    torch's C base class of tensors."""
    return [
        base for base in kind.__mro__[:-1]
        if package(base.__module__) not in STANDARD_LIBRARY and base is not torch._C.TensorBase
    ]


def objects_in(container: Any) -> list[Any]:
    """The members of a container (of a dictionary: its values) that may have code: all but plain values, tensors,
    torch's modules and Python's modules. An empty list for a container with more than MOST_ENTRIES, and for anything
    that is not one of CONTAINERS."""
    if not isinstance(container, CONTAINERS) or len(container) > MOST_ENTRIES:
        return []
    now = safe_to_iterate(container)
    found = now.values() if isinstance(now, dict) else now
    return [one for one in found if not isinstance(one, (*CONSTANT_TYPES, torch.Tensor, nn.Module, types.ModuleType))]


def our_functions() -> Iterator[types.FunctionType]:
    """All functions and methods in those files of OneDiff that compute (OF_OURS), as far as they are imported; they all
    are before a network is served."""
    # sys.modules may contain any object, and other threads import meanwhile.
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
    """The names among `names` that a Python module of torch finds only through its __getattr__, as torch._VF does. An
    empty set for any other module."""
    if type(module) is types.ModuleType or package(module.__name__) != TORCH:
        return set()
    return {name for name in names if name not in vars(module) and hasattr(module, name)}


def computes(module: str) -> bool:
    """Whether the Python module of this name may have functions that affect an image, so that names are looked up in
    it: True for every module outside of torch; of torch's, for OF_TORCH, torch.nn.* and torch._C.*."""
    if package(module) != TORCH:
        return True
    return module in OF_TORCH or module.startswith(("torch.nn.", "torch._C."))


@functools.lru_cache(maxsize=1 << 14)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names of globals and attributes in a code object and in the functions inside of it."""
    return frozenset(name for one in codes_in(code) for name in one.co_names)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions, lambdas and comprehensions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
