"""What Inductor compiles: what lies between a UNet's convolutions, matrix products and attentions, as functions of
tensors.

A region has no weights and no names: layers of the same sizes share one, within a network and between networks.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from .. import torch_ops

GROUP_NORM, LAYER_NORM, GEGLU, ADDITION = "group norm", "layer norm", "GEGLU", "addition"
# Which dimensions of the inputs of a region are of any size, in the order of its function's arguments. A batch of one
# is a constant to every compiler.
FREE = {
    GROUP_NORM: ((0, 1), (0,), (), ()), LAYER_NORM: ((0,), (), (), ()), GEGLU: ((0,),), ADDITION: ((0,), (0,), ()),
}
HAS_BATCH = (GROUP_NORM,)

Shapes = tuple[tuple[int, ...], ...]


class NeedsAnotherGraph(RuntimeError):
    """What was compiled does not serve these tensors, and no image waits until something else is: the message says why.

    An exception, because torch's own code and a whole forward lie between the region and who falls back.
    """


@dataclass(frozen=True)
class Region:
    """Everything that decides what is compiled.

    shapes: those of the inputs, with 0 where a dimension is of any size.
    constants: what the function takes besides. single: for a batch of one.
    """

    kind: str
    shapes: Shapes
    constants: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    single: bool

    @property
    def digest(self) -> str:
        """The same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:24]

    @property
    def free(self) -> list[tuple[int, ...]]:
        """Which dimensions are of any size, of every input."""
        return [tuple(index for index, size in enumerate(shape) if size == 0) for shape in self.shapes]


def region_for(kind: str, inputs: tuple[Tensor, ...], constants: tuple[Any, ...] = ()) -> Region:
    """The region that computes these inputs; all of one dtype and on one device."""
    first = inputs[0]
    single = kind in HAS_BATCH and first.shape[0] == 1
    shapes = tuple(
        tuple(0 if index in free and not (single and index == 0) else size for index, size in enumerate(tensor.shape))
        for tensor, free in zip(inputs, FREE[kind], strict=True)
    )
    return Region(kind, shapes, constants, first.dtype, first.device, single)


def function_of(region: Region) -> Callable[..., Any]:
    """The region's arithmetic, as a function of its inputs."""
    functions: dict[str, Callable[..., Any]] = {
        GROUP_NORM: group_norm, LAYER_NORM: layer_norm, GEGLU: geglu, ADDITION: addition,
    }
    compute, constants = functions[region.kind], region.constants

    def function(*tensors: Tensor) -> Any:
        return compute(*tensors, *constants)

    return function


def group_norm(
    pixels: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of pixels (batch, pixels, channels) + shift (batch, channels), followed by SiLU if silu.

    Each channel is measured by itself and joined with its group afterwards (Chan, Golub, LeVeque 1979): channels lie
    side by side, and Inductor reads groups of them slowly.
    """
    wide = pixels.float()
    variances, means = torch.var_mean(wide, 1, correction=0)
    added = shift.float()
    means = (means + added).unflatten(1, (groups, -1))
    mean = means.mean(2, keepdim=True)
    spread = variances.unflatten(1, (groups, -1)).mean(2, keepdim=True) + (means - mean).square().mean(2, keepdim=True)
    factor = torch.rsqrt(spread + eps) * weight.float().unflatten(0, (groups, -1))
    addend = bias.float().unflatten(0, (groups, -1)) - mean * factor
    factor = factor.flatten(1)
    normed = wide * factor[:, None] + (addend.flatten(1) + added * factor)[:, None]
    return (functional.silu(normed) if silu else normed).to(pixels.dtype)


def layer_norm(
    tokens: Tensor, deferred_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """tokens (rows, width) + deferred_bias (width,), and the layer norm of that.

    In these steps, because Inductor's own layer norm takes half as long again where rows are wider than 1024.
    """
    tokens = tokens + deferred_bias
    wide = tokens.float()
    deviations = wide - wide.mean(1, keepdim=True)
    factor = torch.rsqrt(deviations.square().mean(1, keepdim=True) + eps)
    return tokens, (deviations * factor * weight.float() + bias.float()).to(tokens.dtype)


def geglu(tokens: Tensor) -> Tensor:
    return torch_ops.geglu(tokens)


def addition(rows: Tensor, others: Tensor, each: Tensor) -> Tensor:
    """rows (count, width) + others (count, width) + each (width,)."""
    return others + (rows + each)
