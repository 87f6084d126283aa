"""Copies of a call's inputs that a graph owns, and some of their rows."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .fields import mapped, tensors_of


def cloned_inputs(call: Call, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    """The call with every tensor cloned, to be the static inputs of a graph.

    The timestep becomes a float, whole or not, so that samplers of either kind share a graph.
    """
    own = mapped(call, lambda tensor: tensor.detach().clone(memory_format=memory_format))
    return replace(own, timestep=own.timestep.float())


def take_rows(call: Call, rows: slice) -> Call:
    """The call of these rows alone. Raises ValueError for an input that has neither the batch's rows nor one for all.
    """
    return mapped(call, lambda tensor: rows_of(tensor, rows, call.latent.shape[0]))


def rows_of(tensor: Tensor, rows: slice, batch: int) -> Tensor:
    """These rows of an input, (batch, ...); one of a single row is for all of them. Raises ValueError for others."""
    if tensor.shape[0] == batch:
        return tensor[rows]
    if tensor.shape[0] != 1:
        raise ValueError(f"an input has {tensor.shape[0]} rows in a batch of {batch}")
    return tensor


def rows_within(value: Any, rows: slice, batch: int) -> Any:
    """As rows_of for what a host holds in lists and dictionaries; what is no tensor, or is for all rows, stays."""
    if isinstance(value, dict):
        return {name: rows_within(inside, rows, batch) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [rows_within(part, rows, batch) for part in value]
        return inside if isinstance(value, list) else tuple(inside)
    return rows_of(value, rows, batch) if isinstance(value, Tensor) and value.dim() else value


def bytes_of(inputs: Call) -> int:
    """Bytes of a graph's static inputs, and of its cut's memory if it writes that: a graph that only reads a cut shares
    the memory of the one that writes it."""
    cut = inputs.cut
    written = cut.memory.bytes if cut is not None and not cut.reads else 0
    return sum(tensor.nbytes for tensor in tensors_of(inputs)) + written


def copy_inputs(source: Call, target: Call) -> None:
    # Calls of one shape have the same tensors.
    for given, own in zip(tensors_of(source), tensors_of(target), strict=True):
        own.copy_(given)
