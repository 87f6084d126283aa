"""The structure of a UNet: a tree of stages that says which parameter does what, without holding any parameter.

The same tree describes the modules of ldm, sgm, Forge and diffusers. Readers make it: read.py, and the hosts' readers.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.family import Layout
from ...core.leaves import (
    GATED,
    Block,
    Convolution,
    CrossAttention,
    FusedLinear,
    GroupNorm,
    LayerNorm,
    Linear,
    SelfAttention,
    TimeEmbedding,
    TokenLinear,
    descriptions,
    feed_forward_layers,
    names_of,
)
from ...core.refusal import unsupported_model


@dataclass(frozen=True)
class TransformerBlock(Block):
    """A self attention, a cross attention and a feed-forward layer with GEGLU, each after a layer norm."""

    self_norm: LayerNorm
    self_attention: SelfAttention
    cross_norm: LayerNorm
    cross_attention: CrossAttention
    feed_forward_norm: LayerNorm
    feed_forward_in: Linear
    feed_forward_out: Linear

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers over the image's tokens, in the order of the forward. Their weights may be in 8 bits."""
        feed_forward = feed_forward_layers(
            self.feed_forward_in, self.feed_forward_out, GATED, self.feed_forward_norm.path
        )
        return *self.self_attention.token_layers, *self.cross_attention.token_layers, *feed_forward

    @property
    def prompt_layers(self) -> tuple[FusedLinear, ...]:
        """The linear layers over the prompt's tokens: keys and values of the cross attention. Their weights may be in 8
        bits."""
        return (self.cross_attention.key_value,)


@dataclass(frozen=True)
class ResidualBlock(Block):
    """Two convolutions in sequence, each after a group norm with SiLU. The block's input is added to their output.

    embedding: projects the time embedding; the result is added after the first convolution.
    skip: a 1x1 convolution, of the block's input, whose output is added instead of the input. None: the input is added
        as it is.
    """

    in_norm: GroupNorm
    in_convolution: Convolution
    embedding: Linear
    out_norm: GroupNorm
    out_convolution: Convolution
    skip: Linear | None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions after a group norm, in the order of the forward. Their weights may be in 8 bits."""
        return self.in_convolution, self.out_convolution


@dataclass(frozen=True)
class SpatialTransformer:
    """A group norm, a linear layer, transformer blocks and a linear layer over the pixels of an image as tokens; the
    output is added to the image."""

    norm: GroupNorm
    project_in: Linear
    blocks: tuple[TransformerBlock, ...]
    project_out: Linear


@dataclass(frozen=True)
class Downsample:
    """A 3x3 convolution with a stride of 2, which halves the image's sides."""

    convolution: Convolution


@dataclass(frozen=True)
class Upsample:
    """Nearest-neighbour upsampling by 2, and a convolution.

    resize_before: whether the image is resized to the size of the next skip before the convolution, as in Forge and
        diffusers. The two sizes differ if an odd size was halved: 45 becomes 23, and twice 23 is 46. True: the
        convolution gets 45. False: the convolution gets 46, and its result is resized to 45 when it is concatenated
        with the skip, as in A1111.
    """

    convolution: Convolution
    resize_before: bool


Layer = ResidualBlock | SpatialTransformer | Downsample | Upsample | Convolution
Stage = tuple[Layer, ...]


@dataclass(frozen=True)
class LabelEmbedding:
    """Two linear layers over y, SDXL's embedding of pooled text and sizes."""

    first: Linear
    second: Linear


@dataclass(frozen=True)
class UNetLayout(Layout):
    """A UNet. Each input stage makes a skip; output stages take the skips in reverse order.

    time: the embedding of the timestep. label: the embedding of y; None if the UNet takes no y.
    embeddings: the projections of the time embedding in all residual blocks, as one layer.
    context_width: the width of the prompt's tokens.
    foreign: see Layout; two layouts that differ only in it are equal.
    """

    in_channels: int = field(init=False)
    out_channels: int = field(init=False)
    context_width: int = field(init=False)
    time: TimeEmbedding
    label: LabelEmbedding | None
    input_stages: tuple[Stage, ...]
    middle_stage: Stage
    output_stages: tuple[Stage, ...]
    out_norm: GroupNorm
    out_convolution: Convolution
    foreign: tuple[str, ...] = field(default=(), compare=False)
    embeddings: FusedLinear = field(init=False)

    def __post_init__(self) -> None:
        """Set in_channels, out_channels, context_width and embeddings from the other fields. Raises Refusal unless the
        first layer is a convolution, there are as many input stages as output stages, and an input stage or the middle
        stage has a cross attention."""
        first = self.input_stages[0][0]
        if not isinstance(first, Convolution):
            raise unsupported_model("the UNet's first layer is not a convolution")
        if len(self.input_stages) != len(self.output_stages):
            raise unsupported_model("the UNet's skip connections do not match its output blocks")
        attention = next(descriptions((self.middle_stage, self.input_stages), CrossAttention), None)
        if attention is None:
            raise unsupported_model("the UNet has no cross attention")
        blocks = descriptions((self.input_stages, self.middle_stage, self.output_stages), ResidualBlock)
        derived = {
            "in_channels": first.in_channels, "out_channels": self.out_convolution.out_channels,
            "context_width": attention.key_value.members[0].in_features,
            "embeddings": FusedLinear("time embedding projections", tuple(block.embedding for block in blocks)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def sized_layers(self, height: int, width: int, tokens: int) -> Iterator[tuple[Layer, tuple[int, int]]]:
        """Every layer of the stages in the order of a forward pass, each with the (height, width) of its input in
        pixels of the feature map. height, width: of the latent. tokens: ignored."""
        size = (height, width)
        skips: list[tuple[int, int]] = []
        for stage in self.input_stages:
            for layer in stage:
                yield layer, size
                size = size_after(layer, size, None)
            skips.append(size)
        for layer in self.middle_stage:
            yield layer, size
            size = size_after(layer, size, None)
        for stage in self.output_stages:
            size = skips.pop()
            following = skips[-1] if skips else None
            for layer in stage:
                yield layer, size
                size = size_after(layer, size, following)

    @cached_property
    def residual_blocks(self) -> tuple[ResidualBlock, ...]:
        """All residual blocks, in the order of a forward pass. The members of `embeddings` have the same order."""
        return tuple(self.layers(ResidualBlock))

    @cached_property
    def kernel_users(self) -> list[Any]:
        """The layers for which a device loads kernels (see Layout.kernel_users): all leaves and all cross attentions,
        because blocks differ in their sizes. Leaves that need no kernel are among them."""
        return [*self.leaves(), *self.layers(CrossAttention)]

    def units(self, depth: int | None) -> list[tuple[str, ...]]:
        """The names of the layers whose weights a forward reads, in groups (units), in the order in which it reads
        them.

        depth: of a cached pass, how many of the first input stages and of the last output stages it computes; at least
            1. None: all stages are computed.
        """
        inner = (self.middle_stage, *self.output_stages) if depth is None else self.output_stages[-depth:]
        layers = [layer for stage in (*self.input_stages[:depth], *inner) for layer in stage]
        parts: list[Any] = [(self.time, self.label, self.embeddings)]
        for layer in layers:
            if isinstance(layer, SpatialTransformer):
                parts += ((layer.norm, layer.project_in), *layer.blocks, layer.project_out)
            else:
                parts.append(layer)
        # The projections of the time embedding are read as one layer, in the first unit, not with their blocks.
        apart = {member.path for member in self.embeddings.members}
        return [names_of(part, apart) for part in (*parts, (self.out_norm, self.out_convolution))]

    @property
    def y_width(self) -> int | None:
        """The width of y, SDXL's pooled prompt and sizes; None if the UNet takes no y."""
        return self.label.first.in_features if self.label else None

    @property
    def model_name(self) -> str:
        """The kind of model for users, such as "SDXL" or "SD1 inpainting", by the widths of the UNet's inputs. For
        unknown widths, it begins with "SDXL UNet" or "SD 1.x UNet", and contains the prompt's width."""
        known = {(768, None): "SD1", (1024, None): "SD2", (2048, 2816): "SDXL", (1280, 2560): "SDXL refiner"}
        name = known.get((self.context_width, self.y_width))
        if name is None:
            kind = "SDXL" if self.y_width else "SD 1.x"
            size = "small" if self.context_width < 768 else "unusual"
            name = f"{kind} UNet, {size} (prompt width {self.context_width})"
        return f"{name} inpainting" if self.in_channels == 9 else name


def size_after(layer: Layer, size: tuple[int, int], following: tuple[int, int] | None) -> tuple[int, int]:
    """The (height, width) of a layer's output, for an input of this (height, width). Only convolutions, Downsamples and
    Upsamples change it. following: the (height, width) of the skip that the next output stage takes, to which an
    Upsample with resize_before enlarges its input; None if no output stage follows."""
    if isinstance(layer, Upsample):
        size = (size[0] * 2, size[1] * 2)
        if layer.resize_before and following is not None:
            size = following
    shape = layer.convolution if isinstance(layer, (Upsample, Downsample)) else layer
    if isinstance(shape, Convolution):
        height, width = ((side + 2 * shape.padding - shape.kernel) // shape.stride + 1 for side in size)
        return height, width
    return size
