"""What a graph reads: tensors of its own, into which each call's are copied."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ....core.call import Call, Control


def own_inputs(call: Call, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    """The call with inputs that belong to the graph.

    The timestep becomes a float, whole or not, so that samplers of either kind share a graph.
    """
    own = mapped(call, lambda tensor: tensor.detach().clone(memory_format=memory_format))
    return replace(own, timestep=own.timestep.float())


def mapped(call: Call, of: Callable[[Tensor], Any]) -> Call:
    """The call with of(tensor) in the place of every tensor that a graph reads, in an order that depends on the shape
    alone."""
    change = lambda tensor: None if tensor is None else of(tensor)  # noqa: E731
    latent, timestep, condition = of(call.latent), of(call.timestep), change(call.timestep_condition)
    parts = (getattr(call.control, part.name) for part in fields(Control)) if call.control else ()
    control = Control(*(tuple(map(change, part)) for part in parts)) if call.control else None
    prompts = tuple(prompt.map(of) for prompt in call.image_prompts)
    return replace(
        call, latent=latent, timestep=timestep, timestep_condition=condition, control=control,
        context=of(call.context), y=change(call.y), image_prompts=prompts,
    )


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
