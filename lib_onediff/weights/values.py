"""Digests of functions and plain values: equal in any process for the same code and equal values."""
from __future__ import annotations

import functools
import hashlib
import re
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ..core.origins import beneath_ours, content_of, package

# Values of these types have a repr that is the same in any process, and are known by it.
SAME_IN_ANY_PROCESS = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format,
    torch.layout, range, slice, re.Pattern,
)
# Written in C: they are what their names say.
NATIVE = (
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CONTAINERS = (dict, list, tuple, set, frozenset)
# A larger tensor has no digest by value.
MOST_BYTES = 1 << 16
# A container with more entries is known by its length alone.
MOST_ENTRIES = 256
# The depth of containers within containers, as snapshot.DEEPEST has it; what lies deeper has no digest by value.
MOST_WITHIN = 4
# The depth of any values within each other, such as a partial of a function with defaults; what lies deeper has no
# digest by value.
DEEPEST = 32
KNOWN_BY_NAME = sys.stdlib_module_names | {"torch"}
LOCAL = "<locals>"


class Tokens:
    """Names for objects that have no digest by value: another object, or another process, has another one. And the
    digests of code, which is read once."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(8)
        self._numbers = count()
        # By identity, with what tells whether it is still that object. Code is not hashed: that takes as long.
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def of(self, value: Any) -> str:
        return self._of(value, lambda: f"{self._process} {next(self._numbers)}")

    def of_code(self, code: types.CodeType) -> str:
        return self._of(code, lambda: digest_of_code(code))

    def _of(self, value: Any, make: Callable[[], str]) -> str:
        reference, found = self._known.get(id(value), (None, ""))
        if reference is None or reference() is not value:
            found = make()
            with suppress(TypeError):  # of some objects there are no weak references
                self._known[id(value)] = weakref.ref(value), found
        return found


class Digests:
    """Digests of values, made at one time.

    modules: the paths of a network's modules, by their identity. unseen: what has no digest by value, or could change
    without a change that snapshot sees.
    """

    def __init__(self, tokens: Tokens, modules: Mapping[int, str] = types.MappingProxyType({})) -> None:
        self._tokens = tokens
        self._modules = modules
        # By identity, with the value, which it keeps alive.
        self._known: dict[int, tuple[Any, str]] = {}
        self._within: list[int] = []
        # In how many containers the value at hand lies.
        self._depth = 0
        self.unseen: list[Any] = []

    def of(self, value: Any) -> str:
        """Equal for equal values. Of anything but plain values, code, and what consists of these: a token."""
        if isinstance(value, SAME_IN_ANY_PROCESS):
            return f"{type(value).__name__} {value!r}"
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._within:
            return f"itself, {len(self._within) - self._within.index(id(value))} above"
        if len(self._within) > DEEPEST or self._depth > MOST_WITHIN:
            return self._token(value)
        depth = self._depth
        if isinstance(value, types.FunctionType) and depth:
            # Code is reached by names and closures, and nobody looks at this function's own.
            self.unseen.append(value)
        self._depth = depth + 1 if isinstance(value, CONTAINERS) else 0
        self._within.append(id(value))
        try:
            found = self._of(value)
        finally:
            self._within.pop()
            self._depth = depth
        if not self._within:
            self._known[id(value)] = value, found
        return found

    def of_data(self, value: Any) -> str:
        """The same, but an object that is neither code nor plain is known by its class, its plain attributes and its
        functions."""
        is_object = not isinstance(value, (*SAME_IN_ANY_PROCESS, *NATIVE, *CONTAINERS, type, types.ModuleType))
        if not is_object or isinstance(value, FUNCTIONS):
            return self.of(value)
        state = getattr(value, "__dict__", {})
        functions = {name: self.of(one) for name, one in state.copy().items() if isinstance(one, FUNCTIONS)}
        return f"{name_of(type(value))} {plain_in(value)} {functions or ''}"

    def _of(self, value: Any) -> str:
        kind = type(value)
        if kind is types.FunctionType:
            return self._of_function(value)
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, NATIVE):
            owner = getattr(value, "__self__", None)
            is_method = hasattr(owner, "__dict__") and not isinstance(owner, (type, types.ModuleType))
            return f"{name_of(value)} {self.of(owner) if is_method else ''}"
        if isinstance(value, dict):
            pairs = (f"{self.of(name)}: {self.of(one)}" for name, one in as_it_is(value).items())
            return self._of_many(value, pairs, True)
        if isinstance(value, (set, frozenset)):
            return self._of_many(value, map(self.of, as_it_is(value)), True)
        if isinstance(value, (list, tuple)):
            return self._of_many(value, map(self.of, value))
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            return self._of_many(value, map(self.of, (value.__func__, getattr(value, "__self__", None))))
        if isinstance(value, property):
            return self._of_many(value, map(self.of, (value.fget, value.fset)))
        if isinstance(value, functools.partial):
            return self._of_many(value, map(self.of, (value.func, value.args, value.keywords)))
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, nn.Module):
            path = self._modules.get(id(value))
            return self._token(value) if path is None else f"module of the network {path!r}"
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        return self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> str:
        host = beneath_ours(function)
        if host is not function:
            return self.of(host)
        found = [str(function.__globals__.get("__name__")), self._tokens.of_code(function.__code__)]
        for parts in (function.__defaults__, function.__kwdefaults__, function.__closure__):
            if parts is function.__closure__:
                parts = tuple(map(content_of, parts or ()))
            found.extend(map(self.of, (parts or {}).values() if isinstance(parts, dict) else parts or ()))
            found.append("|")
        return " ".join(found)

    def _of_class(self, kind: type) -> str:
        name = name_of(kind)
        if LOCAL not in name:
            return name
        methods = (f"{name}: {self.of(one)}" for name, one in vars(kind).copy().items() if callable(one))
        return self._of_many(kind, (name, *methods), True)

    def _of_many(self, value: Any, parts: Iterable[str], are_sorted: bool = False) -> str:
        """The digest of a value that consists of parts. parts: their digests. are_sorted: their order does not
        count."""
        if hasattr(value, "__len__") and len(value) > MOST_ENTRIES:
            self.unseen.append(value)
            return f"{name_of(type(value))} of {len(value)}"
        found = sorted(parts) if are_sorted else list(parts)
        return f"{name_of(type(value))} {short(repr(found))}"

    def _of_tensor(self, tensor: Tensor) -> str:
        if tensor.device.type != "cpu" or tensor.nbytes > MOST_BYTES or tensor.is_quantized or tensor.is_sparse:
            return self._token(tensor)
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return f"{tensor.dtype} {tuple(tensor.shape)} {short(repr(values))}"

    def _of_object(self, value: Any) -> str:
        kind = type(value)
        if kind is CACHE:
            return f"cached {self.of(value.__wrapped__)}"
        state = getattr(value, "__dict__", None)
        if package(kind.__module__) in KNOWN_BY_NAME and kind is not types.SimpleNamespace:
            # A context manager is plain; a lock or a random generator shows nothing of its state.
            plain = plain_in(value)
            if not plain or len(plain) < len(state or {}):
                self.unseen.append(value)
            return f"{name_of(kind)} {plain}"
        if type(state) is not dict or any("__slots__" in vars(base) for base in kind.__mro__[:-1]):
            return self._token(value)
        if len(plain_in(value)) < len(state):
            self.unseen.append(value)
        return self._of_many(value, (self.of(kind), self.of(state)))

    def _token(self, value: Any) -> str:
        self.unseen.append(value)
        return f"{name_of(type(value))} {self._tokens.of(value)}"


def as_it_is(container: Any) -> Any:
    """A copy of a dictionary or set, as other threads may write to it meanwhile; another container itself. By the
    methods of the built-in class alone: those of somebody's own class may import modules, as those of transformers'
    mappings do, and its copy may be made in another way."""
    if type(container) is dict:
        return container.copy()
    if isinstance(container, dict):
        # The keys are listed at one stroke.
        return {name: dict.get(container, name) for name in list(dict.keys(container))}
    return set.copy(container) if isinstance(container, set) else container


def plain_in(value: Any) -> dict[str, Any]:
    """The attributes of an object that are plain values."""
    state = getattr(value, "__dict__", {})
    return {name: one for name, one in state.copy().items() if isinstance(one, SAME_IN_ANY_PROCESS)}


def name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '?')}"


def short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def digest_of_code(code: types.CodeType) -> str:
    """Of what code computes, wherever its file is and whatever its lines."""
    constants = [
        digest_of_code(one) if isinstance(one, types.CodeType) else repr_of_constant(one) for one in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return short(repr((names, counts, constants, code.co_code, getattr(code, "co_exceptiontable", b""))))


def repr_of_constant(constant: Any) -> str:
    """The same in any process: the order of a set's members is not."""
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr_of_constant, constant)))
    if isinstance(constant, tuple):
        return repr(list(map(repr_of_constant, constant)))
    return repr(constant)


# What functools.cache makes of a function.
CACHE = type(functools.cache(digest_of_code))
