"""What a graph reads: tensors of its own, into which each call's are copied."""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....core.call import Call, mapped


def own_inputs(call: Call, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    """The call with inputs that belong to the graph.

    The timestep becomes a float, whole or not, so that samplers of either kind share a graph.
    """
    own = mapped(call, lambda tensor: tensor.detach().clone(memory_format=memory_format))
    return replace(own, timestep=own.timestep.float())


def tensors_of(call: Call) -> list[Tensor]:
    """What a graph reads, in an order that depends on the shape alone."""
    tensors: list[Tensor] = []
    mapped(call, tensors.append)
    return tensors


def bytes_of(inputs: Call) -> int:
    """What a graph's own inputs hold, what it writes at a cut among them: who reads it shares it."""
    cut = inputs.cut
    written = cut.memory.bytes if cut is not None and not cut.reads else 0
    return sum(tensor.nbytes for tensor in tensors_of(inputs)) + written


def copy_inputs(source: Call, target: Call) -> None:
    # Calls of one shape have the same tensors.
    for given, own in zip(tensors_of(source), tensors_of(target), strict=True):
        own.copy_(given)
