"""Digests of functions and plain values: texts that are equal in any process for the same code and equal values.
Verdicts on the disk belong to code with these digests."""
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

# The digest of a value of these types is its repr, which is the same in any process.
SAME_IN_ANY_PROCESS = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format,
    torch.layout, range, slice, re.Pattern,
)
# Types of functions written in C: their digest is their name.
NATIVE = (
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CONTAINERS = (dict, list, tuple, set, frozenset)
# In bytes. Larger tensors have no digest by value.
MOST_BYTES = 1 << 16
# Of a container with more entries, only type and length count.
MOST_ENTRIES = 256
# The depth of nested containers, equal to snapshot.DEEPEST, beyond which values have no digest by value.
MOST_WITHIN = 4
# The depth of nested values of any kind, such as a partial of a function with defaults, beyond which values have no
# digest by value.
DEEPEST = 32
# Packages whose classes are identified by their names: their code is not read.
KNOWN_BY_NAME = sys.stdlib_module_names | {"torch"}
# A part of the qualified names of classes that are defined in functions.
LOCAL = "<locals>"


class Tokens:
    """Gives each object without a digest by value a unique text (its token), which is the same in this process as long
    as the object exists, and another one in every other process. Also caches the digests of code objects."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(8)
        self._numbers = count()
        # By id, with a weak reference that tells whether it is still the same object. Not by the hash of code objects:
        # computing it takes as long as the digest.
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}

    def of(self, value: Any) -> str:
        """The token of an object. For an object that does not support weak references, a new one at each call."""
        return self._of(value, lambda: f"{self._process} {next(self._numbers)}")

    def of_code(self, code: types.CodeType) -> str:
        """digest_of_code(), cached."""
        return self._of(code, lambda: digest_of_code(code))

    def _of(self, value: Any, make: Callable[[], str]) -> str:
        """The text that is known for an object; for an unknown object, make(), which is kept without keeping the
        object alive."""
        reference, found = self._known.get(id(value), (None, ""))
        if reference is None or reference() is not value:
            found = make()
            with suppress(TypeError):  # some objects do not support weak references
                self._known[id(value)] = weakref.ref(value), found
        return found


class Digests:
    """Computes digests of values. An object is made for one pass, in which values must not change, because it keeps
    results. It also keeps the values alive.

    unseen: the values of this pass that had no digest by value, and those that could change without a change of their
        snapshot. The caller reads it after the pass: if there are any, changes may stay unnoticed.
    """

    def __init__(self, tokens: Tokens, modules: Mapping[int, str] = types.MappingProxyType({})) -> None:
        """tokens: for values without a digest by value. modules: the paths of a network's modules, by id; these are
        identified by their paths, and other modules get a token."""
        self._tokens = tokens
        self._modules = modules
        # By id, with the value, to keep it alive.
        self._known: dict[int, tuple[Any, str]] = {}
        # The ids of the values around the present one.
        self._within: list[int] = []
        # The number of containers directly around the present value.
        self._depth = 0
        self.unseen: list[Any] = []

    def of(self, value: Any) -> str:
        """The digest of a value: equal in any process for equal plain values, for the same code, and for containers and
        objects that consist of these. Any other value gets its token, which differs in every process, and is added to
        `unseen`."""
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
            # Reached watches functions that are found by names and in closures, but not those in containers.
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
        """Like of(), except for an object that is neither code nor a container nor plain: its class, its plain
        attributes and its functions count, and other attributes do not. So it gets no token."""
        is_object = not isinstance(value, (*SAME_IN_ANY_PROCESS, *NATIVE, *CONTAINERS, type, types.ModuleType))
        if not is_object or isinstance(value, FUNCTIONS):
            return self.of(value)
        state = getattr(value, "__dict__", {})
        functions = {name: self.of(one) for name, one in state.copy().items() if isinstance(one, FUNCTIONS)}
        return f"{name_of(type(value))} {plain_in(value)} {functions or ''}"

    def _of(self, value: Any) -> str:
        """The digest of a value that is not plain, by its type; see of(). Calls of() for the values inside of it."""
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
            pairs = (f"{self.of(name)}: {self.of(one)}" for name, one in safe_to_iterate(value).items())
            return self._of_many(value, pairs, True)
        if isinstance(value, (set, frozenset)):
            return self._of_many(value, map(self.of, safe_to_iterate(value)), True)
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
        """The digest of a function's code, defaults and closure. For a hook of ours, the digest of the host's function
        beneath it."""
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
        """The name of a class; for a class that is defined in a function, a digest of its name and its methods."""
        name = name_of(kind)
        if LOCAL not in name:
            return name
        methods = (f"{name}: {self.of(one)}" for name, one in vars(kind).copy().items() if callable(one))
        return self._of_many(kind, (name, *methods), True)

    def _of_many(self, value: Any, parts: Iterable[str], are_sorted: bool = False) -> str:
        """The digest of a value that consists of several values. parts: their digests. are_sorted: whether their order
        is ignored. For a container with more than MOST_ENTRIES members, only its type and length, and it is added to
        `unseen`."""
        if hasattr(value, "__len__") and len(value) > MOST_ENTRIES:
            self.unseen.append(value)
            return f"{name_of(type(value))} of {len(value)}"
        found = sorted(parts) if are_sorted else list(parts)
        return f"{name_of(type(value))} {short(repr(found))}"

    def _of_tensor(self, tensor: Tensor) -> str:
        """The digest of a small dense tensor on the CPU, by its values; the token of any other tensor."""
        if tensor.device.type != "cpu" or tensor.nbytes > MOST_BYTES or tensor.is_quantized or tensor.is_sparse:
            return self._token(tensor)
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return f"{tensor.dtype} {tuple(tensor.shape)} {short(repr(values))}"

    def _of_object(self, value: Any) -> str:
        """The digest of an object of any other class, by its class and all its attributes. For a class of the standard
        library or torch, by its plain attributes alone. The object's token, if it has no __dict__ or has __slots__."""
        kind = type(value)
        if kind is CACHE:
            return f"cached {self.of(value.__wrapped__)}"
        state = getattr(value, "__dict__", None)
        if package(kind.__module__) in KNOWN_BY_NAME and kind is not types.SimpleNamespace:
            # The attributes of a context manager show its state; those of a lock or a random generator do not.
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
        """The class and the token of a value, which is added to `unseen`."""
        self.unseen.append(value)
        return f"{name_of(type(value))} {self._tokens.of(value)}"


def safe_to_iterate(container: Any) -> Any:
    """A shallow copy of a dictionary or set, because iterating fails if another thread changes it meanwhile; any other
    container itself.

    Uses the methods of the built-in classes alone. Those of a subclass may do other things: transformers' mappings
    import modules.
    """
    if type(container) is dict:
        return container.copy()
    if isinstance(container, dict):
        # list() is atomic.
        return {name: dict.get(container, name) for name in list(dict.keys(container))}
    return set.copy(container) if isinstance(container, set) else container


def plain_in(value: Any) -> dict[str, Any]:
    """The attributes of an object whose values have the same repr in any process, by name. {} for an object without
    __dict__."""
    state = getattr(value, "__dict__", {})
    return {name: one for name, one in state.copy().items() if isinstance(one, SAME_IN_ANY_PROCESS)}


def name_of(value: Any) -> str:
    """The Python module and the qualified name of a class or function, such as "torch.nn.modules.linear.Linear"."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '?')}"


def short(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def digest_of_code(code: types.CodeType) -> str:
    """A digest, equal in any process, of a code object: its instructions, names and constants, without its file name
    and line numbers."""
    constants = [
        digest_of_code(one) if isinstance(one, types.CodeType) else repr_of_constant(one) for one in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return short(repr((names, counts, constants, code.co_code, getattr(code, "co_exceptiontable", b""))))


def repr_of_constant(constant: Any) -> str:
    """The repr of a constant in code, with the members of sets sorted, because their order differs between processes.
    """
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr_of_constant, constant)))
    if isinstance(constant, tuple):
        return repr(list(map(repr_of_constant, constant)))
    return repr(constant)


# The class of functions decorated by functools.cache.
CACHE = type(functools.cache(digest_of_code))
