"""Copies of a call's inputs for a graph, and selections of a call's rows."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .fields import mapped, tensors_of


def cloned_inputs(call: Call, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    """The call with every tensor cloned, as the static inputs of a graph.

    The timestep becomes float32, so that samplers with integer and with fractional timesteps share a graph.
    """
    own = mapped(call, lambda tensor: tensor.detach().clone(memory_format=memory_format))
    return replace(own, timestep=own.timestep.float())


def take_rows(call: Call, rows: slice) -> Call:
    """The call with these rows of the batch alone. Raises ValueError if an input has neither one row nor the batch's
    number of rows."""
    return mapped(call, lambda tensor: rows_of(tensor, rows, call.latent.shape[0]))


def rows_of(tensor: Tensor, rows: slice, batch: int) -> Tensor:
    """These rows of an input, (batch, ...), or the input itself if it has a single row for the whole batch. Raises
    ValueError for any other number of rows."""
    if tensor.shape[0] == batch:
        return tensor[rows]
    if tensor.shape[0] != 1:
        raise ValueError(f"an input has {tensor.shape[0]} rows in a batch of {batch}")
    return tensor


def rows_within(value: Any, rows: slice, batch: int) -> Any:
    """rows_of() for every tensor in nested lists, tuples and dictionaries. Other values stay as they are."""
    if isinstance(value, dict):
        return {name: rows_within(inside, rows, batch) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [rows_within(part, rows, batch) for part in value]
        return inside if isinstance(value, list) else tuple(inside)
    return rows_of(value, rows, batch) if isinstance(value, Tensor) and value.dim() else value


def bytes_of(inputs: Call) -> int:
    """Bytes of a graph's static inputs, plus those of the cut's memory if the graph writes it. A graph that only reads
    a cut shares the memory of the graph that writes it."""
    cut = inputs.cut
    written = cut.memory.bytes if cut is not None and not cut.reads else 0
    return sum(tensor.nbytes for tensor in tensors_of(inputs)) + written


def copy_inputs(source: Call, target: Call) -> None:
    """Copy every tensor of a call into those of another call of the same shape."""
    for given, own in zip(tensors_of(source), tensors_of(target), strict=True):
        own.copy_(given)
