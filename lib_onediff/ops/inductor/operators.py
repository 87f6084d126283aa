"""The operators of the inductor backend: PyTorch's for what its libraries compute, and what lies between compiled."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...model.layout import Convolution, GroupNorm, LayerNorm
from ...model.operators import Stream
from ...model.weights import Affine
from .. import torch_ops
from ..torch_ops import bias_or_zeros, channels_last
from .compiled import CompiledRegion
from .regions import ADDITION, GEGLU, GROUP_NORM, LAYER_NORM, Region, Shapes, function_of, region_for

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


class RegionOperators(ABC):
    """See ops.Operators. Images are made channels-last, and what a region computes goes through one method."""

    def __init__(self, attention: Attention = torch_ops.attention) -> None:
        """attention: as Operators.attention."""
        self.attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    @abstractmethod
    def compute(self, region: Region, tensors: list[Tensor]) -> Any:
        """What a region makes of its inputs: see regions' functions for shapes. Raises NeedsAnotherGraph."""

    def _compute(self, kind: str, inputs: tuple[Tensor, ...], constants: tuple[Any, ...] = ()) -> Any:
        return self.compute(region_for(kind, inputs, constants), list(inputs))

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        image = channels_last(torch_ops.convolution(channels_last(image), Affine(affine.weight, None), shape))
        # torch's own way to add a bias is slower.
        return image if affine.bias is None else image.add_(affine.bias[:, None, None])

    def group_norm(
        self, image: Tensor, affine: Affine, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        reader: Affine | None = None,
    ) -> Tensor:
        image = channels_last(image)
        # Without a shift, a region of its own would take longer to compile than it ever saves.
        shift = image.new_zeros(image.shape[:2]) if shift is None else shift.to(image.dtype).contiguous()
        inputs = pixels(image), shift, affine.weight, bias_or_zeros(affine)
        return image_of(self._compute(GROUP_NORM, inputs, (norm.groups, norm.eps, silu)), image)

    def layer_norm(self, stream: Stream, affine: Affine, norm: LayerNorm, reader: Affine) -> tuple[Stream, Tensor]:
        tokens, deferred_bias = stream.tokens.contiguous(), stream.deferred_bias
        # Only for the first norm of a transformer is no bias deferred: a region of its own would not pay.
        deferred_bias = torch.zeros_like(affine.weight) if deferred_bias is None else deferred_bias
        inputs = tokens.flatten(0, -2), deferred_bias, affine.weight, bias_or_zeros(affine)
        summed, normed = self._compute(LAYER_NORM, inputs, (norm.eps,))
        return Stream(summed.view(tokens.shape)), normed.view(tokens.shape)

    def add_linear(self, stream: Stream, x: Tensor, affine: Affine) -> Stream:
        # A GEMM adds to its output for nothing; with a bias too it would need another pass.
        tokens = torch_ops.materialize(stream).contiguous()
        tokens.view(-1, tokens.shape[-1]).addmm_(x.flatten(0, -2), affine.weight.t())
        return Stream(tokens, affine.bias)

    def geglu(self, tokens: Tensor, reader: Affine) -> Tensor:
        gated: Tensor = self._compute(GEGLU, (tokens.contiguous().flatten(0, -2),))
        return gated.view(*tokens.shape[:-1], -1)

    def gated_linear(self, x: Tensor, affine: Affine, reader: Affine) -> Tensor:
        return self.geglu(self.linear(x, affine), reader)

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        image, update = channels_last(image), channels_last(update)
        if bias is None:
            return image + update
        return image_of(self._compute(ADDITION, (rows(update), rows(image), bias)), image)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        if (height, width) != (2 * image.shape[2], 2 * image.shape[3]):
            return torch_ops.resize(image, height, width)
        # torch takes ten times as long for a channels-last image as for a copy.
        each = channels_last(image).permute(0, 2, 3, 1)[:, :, None, :, None]
        return each.expand(-1, -1, 2, -1, 2, -1).flatten(1, 2).flatten(2, 3).permute(0, 3, 1, 2)


class InductorOperators(RegionOperators):
    """Regions as Inductor has compiled them.

    Raises NeedsAnotherGraph for what would have to be compiled first.
    """

    def __init__(self, attention: Attention = torch_ops.attention) -> None:
        super().__init__(attention)
        self._regions: dict[Region, CompiledRegion] = {}

    def region(self, region: Region) -> CompiledRegion:
        """It, compiled or not."""
        return self._regions.setdefault(region, CompiledRegion(region))

    def compute(self, region: Region, tensors: list[Tensor]) -> Any:
        if too_small(region, tensors):
            return function_of(region)(*tensors)
        return self.region(region)(*map(as_compiled, tensors))

    def graphs(self) -> int:
        """How many graphs were compiled or read."""
        return sum(one.is_ready for one in list(self._regions.values()))

    def refused(self) -> int:
        """How many calls would have needed another graph, which ought to be none."""
        return sum(one.refused for one in list(self._regions.values()))


class Recorder(RegionOperators):
    """Notes which regions a forward needs, and with inputs of which shapes, and computes no numbers (device "meta").

    device: where the numbers will be.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.needed: dict[Region, Shapes] = {}
        self._device = device

    def compute(self, region: Region, tensors: list[Tensor]) -> Any:
        if not too_small(region, tensors):
            there = replace(region, device=self._device)
            self.needed.setdefault(there, tuple(tuple(tensor.shape) for tensor in tensors))
        return function_of(region)(*tensors)


def too_small(region: Region, tensors: list[Tensor]) -> bool:
    """Whether a dimension of any size is one, which compilers take for a constant."""
    return any(tensor.shape[index] < 2 for tensor, free in zip(tensors, region.free, strict=True) for index in free)


def pixels(image: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (batch, height * width, channels) of a channels-last image."""
    return in_order(image.permute(0, 2, 3, 1).flatten(1, 2))


def rows(image: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (batch * height * width, channels) of a channels-last image."""
    return in_order(image.permute(0, 2, 3, 1).flatten(0, 2))


def image_of(computed: Tensor, image: Tensor) -> Tensor:
    """Rows or pixels as an image of this one's size."""
    batch, channels, height, width = image.shape
    return computed.view(batch, height, width, channels).permute(0, 3, 1, 2)


def in_order(tensor: Tensor) -> Tensor:
    """The same memory with the strides that compiled code was told: torch finds any right for a size of one."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= size
    wanted = tuple(reversed(strides))
    if tensor.stride() == wanted:
        return tensor
    tensor = tensor.contiguous()
    return tensor if tensor.stride() == wanted else tensor.as_strided(tensor.shape, wanted)


def as_compiled(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the kind that was compiled for: no parameter, none of inference mode."""
    tensor = in_order(tensor)
    if tensor.is_inference():
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach() if tensor.requires_grad or type(tensor) is not Tensor else tensor
