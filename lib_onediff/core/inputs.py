"""Copies of a call's inputs for a graph, and selections of a call's rows (the rows of its batch)."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .fields import mapped, tensors_of


def cloned_inputs(call: Call, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    """A copy of the call in which every tensor is a clone, for the static inputs of a graph. memory_format: of the
    clones. The cut's memory and other extensions' functions (fields marked LEFT_OUT) are shared with the call.

    The timestep becomes float32, so that samplers with integer and with fractional timesteps share a graph.
    """
    own = mapped(call, lambda tensor: tensor.detach().clone(memory_format=memory_format))
    return replace(own, timestep=own.timestep.float())


def take_rows(call: Call, rows: slice) -> Call:
    """A call with these rows of the batch alone. Its tensors are views of the given call's; fields marked LEFT_OUT,
    such as patches, are the same objects. Raises ValueError if an input has neither one row nor the batch's number of
    rows.
    """
    return mapped(call, lambda tensor: rows_of(tensor, rows, call.latent.shape[0]))


def rows_of(tensor: Tensor, rows: slice, batch: int) -> Tensor:
    """A view of these rows of an input, (batch, ...), or the input itself if it has a single row for the whole batch.
    Raises ValueError for any other number of rows."""
    if tensor.shape[0] == batch:
        return tensor[rows]
    if tensor.shape[0] != 1:
        raise ValueError(f"an input has {tensor.shape[0]} rows in a batch of {batch}")
    return tensor


def rows_within(value: Any, rows: slice, batch: int) -> Any:
    """A copy of nested lists, tuples and dictionaries in which each tensor is replaced by its rows (rows_of). Tensors
    without dimensions and values of other types stay as they are. Raises ValueError as rows_of does."""
    if isinstance(value, dict):
        return {name: rows_within(inside, rows, batch) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [rows_within(part, rows, batch) for part in value]
        return inside if isinstance(value, list) else tuple(inside)
    return rows_of(value, rows, batch) if isinstance(value, Tensor) and value.dim() else value


def bytes_of(inputs: Call) -> int:
    """The bytes of a graph's static inputs, and of the cut's memory if the graph is a full pass. A cached pass shares
    that memory with the full pass, so it is not counted twice."""
    cut = inputs.cut
    written = cut.memory.bytes if cut is not None and not cut.reads else 0
    return sum(tensor.nbytes for tensor in tensors_of(inputs)) + written


def copy_inputs(source: Call, target: Call) -> None:
    """Copy every tensor of the call `source` into the tensors of `target`, in place, with a change of dtype where they
    differ. Both calls must have the same signature. The memory of a cut is not copied."""
    for given, own in zip(tensors_of(source), tensors_of(target), strict=True):
        own.copy_(given)
