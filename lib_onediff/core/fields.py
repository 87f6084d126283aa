"""Functions over the fields of a frozen dataclass, such as a Call: list its tensors, replace them, make its signature.

A field is a tensor, a tuple, another frozen dataclass, None, or a plain hashable value; a tuple contains any of these.
Tensors are inputs of the network. Plain values are part of the signature.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

# The metadata of a field that all functions here skip: it is neither an input nor part of the signature. A copy made by
# mapped() has the same object in it.
LEFT_OUT = {"is_left_out": True}
# The metadata of a tensor field whose dtype is not part of the signature.
ANY_DTYPE = {"any_dtype": True}
# Types whose values are part of the signature as they are.
PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device)

Value = TypeVar("Value")


@cache
def walked_fields(kind: type) -> tuple[Field[Any], ...]:
    """The fields of a dataclass, in their order, without those marked LEFT_OUT; () for a class that is no dataclass."""
    if not is_dataclass(kind):
        return ()
    return tuple(one for one in fields(kind) if not one.metadata.get("is_left_out"))


@cache
def walked_names(kind: type) -> tuple[str, ...]:
    """The names of walked_fields."""
    return tuple(one.name for one in walked_fields(kind))


@cache
def any_dtype_names(kind: type) -> frozenset[str]:
    """The names of the walked fields that are marked ANY_DTYPE."""
    return frozenset(one.name for one in walked_fields(kind) if one.metadata.get("any_dtype"))


@cache
def settable_names(kind: type) -> tuple[str, ...]:
    """The names of the walked fields that the constructor takes. Fields with init=False are left out: the dataclass
    computes them in __post_init__."""
    return tuple(one.name for one in walked_fields(kind) if one.init)


def mapped(value: Value, function: Callable[[Tensor], Any]) -> Value:
    """A copy of the value in which function(tensor) replaces every tensor. function is called in the order of the
    fields. Plain values and fields marked LEFT_OUT are the same objects as in the value; fields that the constructor
    does not take are computed anew."""
    given: Any = value
    made: Any = given
    if isinstance(given, Tensor):
        made = function(given)
    elif isinstance(given, tuple):
        made = tuple([mapped(one, function) for one in given])
    else:
        kind: Any = type(given)
        changes = {name: mapped(getattr(given, name), function) for name in settable_names(kind)}
        if changes:
            made = replace(given, **changes)
    copy: Value = made
    return copy


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a value (see the module's docstring), in the order of its fields; [] without any."""
    found: list[Tensor] = []
    collect(value, found)
    return found


def collect(value: Any, found: list[Tensor]) -> None:
    """Append every tensor in a value to the list `found`, in the order of the value's fields."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple):
        for one in value:
            collect(one, found)
    elif value is not None:
        kind: Any = type(value)
        for name in walked_names(kind):
            collect(getattr(value, name), found)


def named_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """A pair for every tensor in a dataclass: the name of the dataclass's field that contains it, at any depth, and the
    tensor."""
    kind: Any = type(value)
    for name in walked_names(kind):
        for tensor in tensors_of(getattr(value, name)):
            yield name, tensor


def shapes_of(value: Any) -> Hashable:
    """The value as nested tuples, in which each tensor is replaced by its shape, and each dataclass by a tuple of its
    walked fields, without their names. None and plain values stay."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return tuple([shapes_of(one) for one in value])
    kind: Any = type(value)
    names = walked_names(kind)
    if names:
        return tuple([shapes_of(getattr(value, name)) for name in names])
    plain: Hashable = value
    return plain


def signature_of(value: Any) -> Hashable:
    """A hashable that is equal for two values of one class if their tensors have the same shapes, dtypes (except in
    fields marked ANY_DTYPE) and devices, and their plain values are equal."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, tuple):
        return tuple([signature_of(one) for one in value])
    kind: Any = type(value)
    return signature_function(kind)(value) if walked_names(kind) else value


@cache
def signature_function(kind: type) -> Callable[[Any], Hashable]:
    """A function that returns signature_of(value) for the values of one dataclass.

    Its Python code is generated from the types of the fields, as dataclasses generate __eq__: a loop over the fields
    takes twice as long, and every call of a network computes its signature.
    """
    hints = get_type_hints(kind)
    parts = [signature_source(one, hints[one.name]) for one in walked_fields(kind)]
    function: Callable[[Any], Hashable] = eval(f"lambda value: ({', '.join(parts)},)", {"signature_of": signature_of})
    return function


def signature_source(field: Field[Any], hint: Any) -> str:
    """The Python expression, with the variable `value`, that computes one field's part of the signature. hint: the
    field's type, resolved by get_type_hints."""
    read = f"value.{field.name}"
    form = "({0}.shape, {0}.device)" if field.metadata.get("any_dtype") else "({0}.shape, {0}.dtype, {0}.device)"
    if hint is Tensor:
        return form.format(read)
    if hint == (Tensor | None):
        return f"None if (one := {read}) is None else {form.format('one')}"
    if hint in PLAIN_TYPES:
        return read
    if get_origin(hint) is tuple:
        # An empty tuple is its own signature.
        return f"{read} and signature_of({read})"
    return f"None if (one := {read}) is None else signature_of(one)"
