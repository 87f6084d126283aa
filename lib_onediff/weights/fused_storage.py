"""Tensors that lie one after the other in one storage, so that one view is all of them."""
from __future__ import annotations

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
        together = concatenated([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = together[start:start + parameter.shape[0]]
            start += parameter.shape[0]
    return together.numel() * together.element_size()


def concatenated(parameters: list[Tensor]) -> Tensor:
    """As torch.cat, which not every release has for float8."""
    dtype = parameters[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(parameters)
    return torch.cat([parameter.view(torch.uint8) for parameter in parameters]).view(dtype)


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
    weight = joined([affines[member.path].weight for member in fusion.members])
    if weight is None:
        raise Refusal(f"the weights of {fusion.name} no longer lie together")
    biases = [affines[member.path].bias for member in fusion.members]
    if all(bias is None for bias in biases):
        return Affine(weight, None)
    if any(bias is None for bias in biases):
        raise Refusal(f"{fusion.name} has a bias on some of its layers only")
    bias = joined([bias for bias in biases if bias is not None])
    if bias is None:
        raise Refusal(f"the biases of {fusion.name} no longer lie together")
    return Affine(weight, bias)
