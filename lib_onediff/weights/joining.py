"""The memory of parameters: puts several into one storage, so that one view reads them all as a single weight, and
changes their memory format."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.edits import UNCOUNTED, edit_count
from .exact_copy import copy_into, copy_of, split_rows


def shares_storage(parameter: Tensor) -> bool:
    """Whether the parameter's storage is larger than the parameter, as it is after fuse()."""
    return parameter.untyped_storage().nbytes() > parameter.numel() * parameter.element_size()


def fuse(parameters: list[Tensor]) -> int:
    """Copy the values of parameters (rows, ...) into one new tensor, one below the other, and let each Parameter.data
    be a view of its rows there. Returns the bytes copied: 0, with nothing changed, if the parameters already lie so."""
    if joined(parameters) is not None:
        return 0
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        together = in_one(parameters, parameters[0].device)
        for piece, parameter in zip(split_rows(together, list(map(len, parameters))), parameters, strict=True):
            parameter.data = of_kind(piece, parameter.is_inference())
    return together.nbytes


def of_kind(piece: Tensor, is_inference: bool) -> Tensor:
    """A tensor over the same memory as `piece` that is an inference tensor if is_inference, and otherwise an ordinary
    one; `piece` itself if it is of that kind. torch assigns only a tensor of the parameter's own kind to
    Parameter.data.
    """
    if piece.is_inference() == is_inference:
        return piece
    with torch.inference_mode(is_inference):
        empty: Any = torch.empty(0, dtype=piece.dtype, device=piece.device)
        found: Tensor = empty.set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
        return found


def mend(parameter: Tensor) -> None:
    """Make a parameter an inference tensor again, in place, if it was created in inference mode and moved outside of
    that mode; leave any other parameter as it is. After such a move, torch makes no views of the parameter, and counts
    no edits."""
    if not parameter.is_inference() and edit_count(parameter) == UNCOUNTED:
        with torch.no_grad():
            parameter.data = of_kind(parameter.detach(), is_inference=True)


def in_one(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A new tensor on a device, with the values of these tensors (rows, ...) of one dtype, one below the other. They
    may be on other devices. Like torch.cat, which does not take float8 in every version."""
    first = tensors[0]
    made = torch.empty((sum(map(len, tensors)), *first.shape[1:]), dtype=first.dtype, device=device)
    for piece, tensor in zip(split_rows(made, list(map(len, tensors))), tensors, strict=True):
        copy_into(piece, tensor, non_blocking=True)
    return made


def joined(parameters: list[Tensor]) -> Tensor | None:
    """One view, (sum of rows, ...), over tensors (rows, ...) that already lie one after the other in one storage. None
    if they do not. Copies nothing."""
    first = parameters[0]
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for parameter in parameters:
        beside = parameter.untyped_storage().data_ptr() == storage and parameter.storage_offset() == offset
        if not beside or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return None
        offset += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def in_memory_format(weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A convolution's weight, (out, in, height, width), in a memory format: a new tensor with memory of its own.

    If the GPU is too full for that, the values are reordered inside of the weight's own memory, by way of main memory,
    and the returned tensor is a view of it. The given tensor then has wrong values, so go on with the returned one in
    either case."""
    try:
        return copy_of(weight, memory_format)
    except torch.cuda.OutOfMemoryError:
        in_main_memory = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", memory_format=memory_format)
        copy_into(in_main_memory, weight)
        target = weight.detach().as_strided(weight.shape, in_main_memory.stride())
        return copy_into(target, in_main_memory)


def lies_away(parameter: Tensor, device: torch.device) -> bool:
    """Whether a parameter is not on this device, which computes, so that it must be copied there for each use."""
    return parameter.device != device
