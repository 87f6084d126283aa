"""What Inductor compiles: the parts of a UNet between its convolutions and attentions, as functions of tensors.

A region has no weights and no names: blocks of the same sizes share one, within a network and between networks.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..unet.layers import Layers
from ..unet.layout import (
    Downsample,
    FusedLinear,
    ResidualBlock,
    SpatialTransformer,
    UNetLayout,
    Upsample,
)
from ..unet.weights import Affine, Weights
from . import Stream, torch_ops

NORM, SHIFTED_NORM, ADD = "group norm", "group norm with a shift", "residual addition"
ENTER, LEAVE = "transformer's entry", "transformer's exit"
TO_SELF, TO_CROSS, TO_NEXT = "up to self attention", "up to cross attention", "feed forward"
# Sizes of pictures that the compiler shall think of. No two of the dimensions of an input are equal, and none is 1:
# it would take them for one, or for a constant.
NARROWER, BATCH = 8, 2
LATENT_SIDE = {True: 128, False: 64}


class Laid(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | None) -> Laid | None:
        return None if tensor is None else cls(tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True)
class Region:
    """Everything that decides what is compiled. node: a description of unet.layout without the host's names.

    weights: how each weight and its bias lie, in the order of parts(); None for what there is not. single: for a batch
    of one, which is a constant to every compiler.
    """

    kind: str
    node: Any
    weights: tuple[tuple[Laid | None, Laid | None], ...]
    dtype: torch.dtype
    device: torch.device
    single: bool

    @property
    def digest(self) -> str:
        """The same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:24]

    @property
    def channels(self) -> int:
        """Of the image or the tokens that come in."""
        node = self.node
        if self.kind in (NORM, SHIFTED_NORM):
            return node.channels
        if self.kind == ADD:
            return node.out_channels
        return node.norm.channels if self.kind in (ENTER, LEAVE) else node.self_norm.width


class Site(NamedTuple):
    """Where a network has a region. key: the description by which it is found again. level: how often the image was
    halved before."""

    kind: str
    key: Any
    node: Any
    level: int


def sites(layout: UNetLayout) -> Iterator[Site]:
    """Every place of a network that is a region, in the order in which they are used."""
    level = 0
    for stage in (*layout.input_stages, layout.middle_stage, *layout.output_stages):
        for layer in stage:
            if isinstance(layer, Downsample):
                level += 1
            elif isinstance(layer, Upsample):
                level -= 1
            elif isinstance(layer, ResidualBlock):
                yield Site(NORM, layer.in_norm, layer.in_norm, level)
                yield Site(SHIFTED_NORM, layer.out_norm, layer.out_norm, level)
                yield Site(ADD, layer.out_convolution, layer.out_convolution, level)
            elif isinstance(layer, SpatialTransformer):
                yield Site(ENTER, layer, layer, level)
                yield from (
                    Site(kind, block, block, level) for block in layer.blocks for kind in (TO_SELF, TO_CROSS, TO_NEXT)
                )
                yield Site(LEAVE, layer, layer, level)
    yield Site(NORM, layout.out_norm, layout.out_norm, 0)


def parts(kind: str, node: Any) -> tuple[Any, ...]:
    """The descriptions of the weights that a region takes."""
    if kind in (NORM, SHIFTED_NORM, ADD):
        return (node,)
    if kind == ENTER:
        return node.norm, node.project_in
    if kind == LEAVE:
        return (node.project_out,)
    if kind == TO_SELF:
        return node.self_norm, node.self_attention.query_key_value
    if kind == TO_CROSS:
        return node.self_attention.out, node.cross_norm, node.cross_attention.query
    return node.cross_attention.out, node.feed_forward_norm, node.feed_forward_in, node.feed_forward_out


def name_of(part: Any) -> str:
    return part.name if isinstance(part, FusedLinear) else part.path


def region_of(site: Site, weights: Weights, single: bool) -> Region:
    """The region at a site of a network with these weights."""
    node = nameless(site.node)
    laid = []
    for part in parts(site.kind, site.node):
        weight, bias = tensors_of(weights[name_of(part)], site.kind)
        laid.append((Laid.of(weight), Laid.of(bias)))
    any_weight = weights[name_of(parts(site.kind, site.node)[0])].weight
    return Region(site.kind, node, tuple(laid), any_weight.dtype, any_weight.device, single)


def tensors_of(affine: Affine, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """A layer's tensors as a region takes them: of a convolution before an addition the bias alone, and of a 1x1
    convolution what a linear layer has."""
    weight, bias = affine.weight, affine.bias
    if kind == ADD:
        return None, bias
    return (weight.flatten(1) if weight.dim() == 4 else weight), bias


def nameless(node: Any, name: str = "") -> Any:
    """The same description with names of ours, and without what is no part of a region."""
    if isinstance(node, FusedLinear):
        return FusedLinear(name, ())
    if isinstance(node, SpatialTransformer):
        node = replace(node, blocks=())
    if not is_dataclass(node):
        return node
    inside = {
        item.name: name if item.name == "path" else nameless(getattr(node, item.name), f"{name}.{item.name}")
        for item in fields(node)
    }
    return replace(node, **inside)


def function_of(region: Region) -> Callable[..., Any]:
    """The region's arithmetic, which is that of unet.layers by the reference operators.

    Images (batch, channels, height, width), tokens (batch, tokens, width), shifts (channels, batch); then the weights
    and biases in the order of parts(), without those that there are not.
    """
    node = region.node
    names = tuple(name_of(part) for part in parts(region.kind, node))
    biased = tuple(bias is not None for _, bias in region.weights)

    def layers(tensors: tuple[Tensor, ...]) -> Layers:
        weights, position = {}, 0
        for name, has_bias in zip(names, biased):  # noqa: B905
            bias = tensors[position + 1] if has_bias else None
            weights[name] = Affine(tensors[position], bias)
            position += 2 if has_bias else 1
        return Layers(weights, torch_ops, {}, {}, False)

    def norm(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return lying_last(torch_ops.group_norm(image, Affine(weight, bias), node, silu=True))

    def shifted_norm(image: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return lying_last(torch_ops.group_norm(image, Affine(weight, bias), node, silu=True, shift=shift.t()))

    def add(image: Tensor, update: Tensor, bias: Tensor | None = None) -> Tensor:
        return lying_last(torch_ops.residual_add(image, update, bias))

    def enter(image: Tensor, *weights: Tensor) -> Tensor:
        return layers(weights)._enter(node, image)

    def leave(image: Tensor, tokens: Tensor, *weights: Tensor) -> Tensor:
        return lying_last(layers(weights)._leave(node, image, Stream(tokens)))

    def to_self(tokens: Tensor, *weights: Tensor) -> Tensor:
        return layers(weights)._before_self_attention(node, Stream(tokens))[1]

    def to_cross(tokens: Tensor, mixed: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        stream, query = layers(weights)._before_cross_attention(node, Stream(tokens), mixed)
        return stream.tokens, query

    def to_next(tokens: Tensor, mixed: Tensor, *weights: Tensor) -> Tensor:
        return layers(weights)._after_cross_attention(node, Stream(tokens), mixed).tokens

    return {
        NORM: norm, SHIFTED_NORM: shifted_norm, ADD: add, ENTER: enter, LEAVE: leave, TO_SELF: to_self,
        TO_CROSS: to_cross, TO_NEXT: to_next,
    }[region.kind]


def lying_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


class Sized(NamedTuple):
    """An input of made-up numbers, and which of its dimensions are any size."""

    tensor: Tensor
    free: tuple[int, ...]


def example(region: Region, size: tuple[int, int]) -> tuple[list[Sized], list[Tensor]]:
    """Inputs of a region for images of this (height, width), and weights of the right form; all numbers are zero."""
    height, width = size
    batch, channels, count = 1 if region.single else BATCH, region.channels, height * width
    outer = () if region.single else (0,)
    of = lambda *shape: torch.zeros(shape, dtype=region.dtype, device=region.device)  # noqa: E731
    image = lambda: Sized(  # noqa: E731
        of(batch, channels, height, width).to(memory_format=torch.channels_last), (*outer, 2, 3)
    )
    tokens = lambda wide: Sized(of(batch, count, wide), (*outer, 1))  # noqa: E731
    node, kind = region.node, region.kind
    if kind in (NORM, ENTER):
        inputs = [image()]
    elif kind == SHIFTED_NORM:
        inputs = [image(), Sized(of(channels, batch), () if region.single else (1,))]
    elif kind == ADD:
        inputs = [image(), image()]
    elif kind == LEAVE:
        inputs = [image(), tokens(node.project_out.in_features)]
    elif kind == TO_SELF:
        inputs = [tokens(channels)]
    else:
        attention = node.self_attention if kind == TO_CROSS else node.cross_attention
        inputs = [tokens(channels), tokens(attention.out.in_features)]
    laid = [one for pair in region.weights for one in pair if one is not None]
    weights = [
        torch.empty_strided(*one, dtype=region.dtype, device=region.device).zero_() for one in laid
    ]
    return inputs, weights


def size_to_think_of(layout: UNetLayout, level: int) -> tuple[int, int]:
    """Height and width of an image at this level, in a picture as the network was made for, but not square."""
    side = LATENT_SIDE[layout.label is not None]
    return max(2, (side - NARROWER) >> level), max(3, (side + NARROWER) >> level)
