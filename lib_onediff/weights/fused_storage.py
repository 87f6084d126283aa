"""Tensors that lie one after the other in one storage, so that one view is all of them."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.affine import Affine, Weights
from ..core.leaves import FusedLinear
from ..core.refusal import Refusal


def shares_storage(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() > parameter.numel() * parameter.element_size()


def fuse(parameters: list[Tensor]) -> int:
    """Re-point parameters to slices of one new tensor, unless they already lie together. Returns the bytes copied."""
    if joined(parameters) is not None:
        return 0
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        together = in_one(parameters, parameters[0].device)
        for piece, parameter in zip(together.split(list(map(len, parameters))), parameters, strict=True):
            parameter.data = of_kind(piece, parameter.is_inference())
    return together.nbytes


def of_kind(piece: Tensor, is_inference: bool) -> Tensor:
    """The same memory as a tensor of inference mode, or as an ordinary one."""
    if piece.is_inference() == is_inference:
        return piece
    with torch.inference_mode(is_inference):
        empty: Any = torch.empty(0, dtype=piece.dtype, device=piece.device)
        found: Tensor = empty.set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
        return found


def mend(parameter: Tensor) -> None:
    """Let views be made of a parameter of inference mode that was moved outside of it: torch makes none of a tensor
    that is neither of that mode nor counts edits."""
    if not parameter.is_inference() and not counts_edits(parameter):
        with torch.no_grad():
            parameter.data = of_kind(parameter.detach(), is_inference=True)


def counts_edits(tensor: Tensor) -> bool:
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


def in_one(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors (rows, ...) of one type, one after the other in a new one on a device. Not every torch joins float8."""
    first = tensors[0]
    made = torch.empty((sum(map(len, tensors)), *first.shape[1:]), dtype=first.dtype, device=device)
    for piece, tensor in zip(made.split(list(map(len, tensors))), tensors, strict=True):
        piece.copy_(tensor.detach(), non_blocking=True)
    return made


def joined(parameters: list[Tensor]) -> Tensor | None:
    """One view, (sum of rows, ...), over tensors that lie one after the other in one storage, else None."""
    first = parameters[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for parameter in parameters:
        beside = parameter.untyped_storage().data_ptr() == storage and parameter.storage_offset() == offset
        if not beside or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return None
        offset += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def joined_affine(fusion: FusedLinear, affines: Weights) -> Affine:
    """A fused layer's weight and bias, as views. Raises Refusal where its members no longer lie together."""
    members = [affines[member.path] for member in fusion.members]
    biases = [affine.bias for affine in members if affine.bias is not None]
    weight, bias = joined([affine.weight for affine in members]), joined(biases) if biases else None
    if weight is None or (biases and (bias is None or len(biases) < len(members))):
        raise Refusal(f"the layers of {fusion.name} no longer lie together")
    return Affine(weight, bias)
