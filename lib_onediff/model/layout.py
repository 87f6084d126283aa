"""What a UNet is: a tree of stages that says which parameter does what, without holding any parameter.

The same tree describes ldm, sgm, Forge and diffusers modules; read_ldm.py and read_diffusers.py fill it in.
A path is the dotted name of a leaf module inside the host's UNet.
"""
from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from ..core.refusal import Refusal

# Weights of a group of context projections: SD1.5's are 19 million, SDXL's 370.
LARGEST_GROUP = 1 << 25


UnsupportedUNet = Refusal


@dataclass(frozen=True)
class Linear:
    """A linear layer, or a 1x1 convolution, which is the same thing applied to every pixel."""

    path: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Convolution:
    """circular: what lies beyond an edge is the opposite edge (Tiling), not zero."""

    path: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    padding: int
    circular: bool = False


@dataclass(frozen=True)
class GroupNorm:
    path: str
    channels: int
    groups: int
    eps: float


@dataclass(frozen=True)
class LayerNorm:
    path: str
    width: int
    eps: float


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers over the same input whose weights lie one after the other in memory, so that one GEMM does all."""

    name: str
    members: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        return sum(member.out_features for member in self.members)


@dataclass(frozen=True)
class ContextGroup:
    """Keys and values of several cross attentions, over the same context, as one linear layer.

    parts: the names of their fused layers; widths: the output features of each, in this order.
    """

    fused: FusedLinear
    parts: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.fused.name


@dataclass(frozen=True)
class SelfAttention:
    query_key_value: FusedLinear
    out: Linear
    heads: int


@dataclass(frozen=True)
class CrossAttention:
    query: Linear
    key_value: FusedLinear
    out: Linear
    heads: int

    @property
    def head_width(self) -> int:
        return self.query.out_features // self.heads


@dataclass(frozen=True)
class TransformerBlock:
    self_norm: LayerNorm
    self_attention: SelfAttention
    cross_norm: LayerNorm
    cross_attention: CrossAttention
    feed_forward_norm: LayerNorm
    feed_forward_in: Linear
    feed_forward_out: Linear


@dataclass(frozen=True)
class SpatialTransformer:
    norm: GroupNorm
    project_in: Linear
    blocks: tuple[TransformerBlock, ...]
    project_out: Linear


@dataclass(frozen=True)
class ResidualBlock:
    in_norm: GroupNorm
    in_convolution: Convolution
    embedding: Linear
    out_norm: GroupNorm
    out_convolution: Convolution
    skip: Linear | None


@dataclass(frozen=True)
class Downsample:
    convolution: Convolution


@dataclass(frozen=True)
class Upsample:
    """Nearest-neighbour enlargement and a convolution.

    Where a size is odd on the way down (45 -> 23), the way up must end at the skip's size. Forge and diffusers
    enlarge 23 -> 45 before the convolution (resize_before); A1111 enlarges 23 -> 46, convolves, and resizes the
    result to 45 when it meets the skip.
    """

    convolution: Convolution
    resize_before: bool


Layer = ResidualBlock | SpatialTransformer | Downsample | Upsample | Convolution
Stage = tuple[Layer, ...]


@dataclass(frozen=True)
class TimeEmbedding:
    """Sinusoids of the timestep, then two linear layers. See ops.torch_ops.sinusoids for the parameters' meaning."""

    channels: int
    cosine_first: bool
    frequency_shift: float
    scale: float
    condition: Linear | None
    first: Linear
    second: Linear


@dataclass(frozen=True)
class LabelEmbedding:
    """Two linear layers over y: SDXL's pooled text and size embedding."""

    first: Linear
    second: Linear


@dataclass(frozen=True)
class UNetLayout:
    """The whole network. Every input stage leaves a skip; output stage i takes the last one left.

    foreign: what others have put into the module that calls must bring as patches, each in words for the user.
    """

    family: str
    in_channels: int
    out_channels: int
    context_width: int
    time: TimeEmbedding
    label: LabelEmbedding | None
    input_stages: tuple[Stage, ...]
    middle_stage: Stage
    output_stages: tuple[Stage, ...]
    out_norm: GroupNorm
    out_convolution: Convolution
    foreign: tuple[str, ...] = ()
    embeddings: FusedLinear = field(init=False)

    def __post_init__(self) -> None:
        projections = tuple(block.embedding for block in self.residual_blocks)
        object.__setattr__(self, "embeddings", FusedLinear("time embedding projections", projections))

    def layers(self, kind: type | tuple[type, ...]) -> Iterator[Any]:
        """Every layer description of this kind, depth first in a fixed order, transformer blocks included."""
        return descriptions((self.input_stages, self.middle_stage, self.output_stages), kind)

    @cached_property
    def residual_blocks(self) -> tuple[ResidualBlock, ...]:
        return tuple(self.layers(ResidualBlock))

    @cached_property
    def cross_attentions(self) -> tuple[CrossAttention, ...]:
        return tuple(self.layers(CrossAttention))

    @cached_property
    def context_groups(self) -> dict[str, ContextGroup]:
        """By the name of each attention's fused layer, the group that it is computed with; none where all of them are
        so large that one product gains nothing, and its memory costs something."""
        parts = tuple(attention.key_value for attention in self.cross_attentions)
        if sum(map(weights_of, parts)) > LARGEST_GROUP:
            return {}
        members = tuple(member for part in parts for member in part.members)
        group = ContextGroup(
            FusedLinear("context projections", members), tuple(part.name for part in parts),
            tuple(part.out_features for part in parts),
        )
        return dict.fromkeys(group.parts, group)

    def leaves(self) -> list[Linear | Convolution | GroupNorm | LayerNorm]:
        """Every description of a module that holds parameters, each once."""
        return list(descriptions(tuple(getattr(self, item.name) for item in fields(self) if item.name != "embeddings"),
                                 (Linear, Convolution, GroupNorm, LayerNorm)))

    @cached_property
    def kernel_users(self) -> list[Linear | Convolution | GroupNorm | LayerNorm | CrossAttention]:
        """Every description that decides which kernels are needed."""
        return [*self.leaves(), *self.cross_attentions]

    def fusions(self) -> list[FusedLinear]:
        """Every group of linear layers that is to lie in one tensor."""
        return [*self.layers(FusedLinear), self.embeddings]

    def wider_fusions(self) -> list[FusedLinear]:
        """Groups of such groups that lie in one tensor too, where nothing is applied to their weights at each use."""
        return list(dict.fromkeys(group.fused for group in self.context_groups.values()))

    @property
    def y_width(self) -> int | None:
        return self.label.first.in_features if self.label else None

    @property
    def model_name(self) -> str:
        """A name for people; nothing depends on it."""
        known = {(768, None): "SD1", (1024, None): "SD2", (2048, 2816): "SDXL", (1280, 2560): "SDXL refiner"}
        kind, size = "SDXL" if self.y_width else "SD 1.x", "small" if self.context_width < 768 else "unusual"
        other = f"{kind} UNet, {size} (prompt width {self.context_width})"
        name = known.get((self.context_width, self.y_width), other)
        return f"{name} inpainting" if self.in_channels == 9 else name

    @cached_property
    def architecture(self) -> str:
        """A digest that two UNets share exactly when they are the same network up to their weights and names."""
        return digest_without(self, ("path", "name", "family", "foreign"))


def weights_of(fused: FusedLinear) -> int:
    """How many numbers its weight has."""
    return fused.members[0].in_features * fused.out_features


def digest_without(layout: Any, names: Collection[str]) -> str:
    """A digest of a tree of dataclasses and tuples, whatever the fields of these names hold."""

    def plain(node: Any) -> Any:
        if is_dataclass(node):
            kept = (item.name for item in fields(node) if item.name not in names)
            return type(node).__name__, *(plain(getattr(node, name)) for name in kept)
        return tuple(map(plain, node)) if isinstance(node, tuple) else node

    return hashlib.sha256(repr(plain(layout)).encode()).hexdigest()[:16]


def descriptions(node: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Every description of this kind in a tree of dataclasses and tuples, depth first."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            yield node
        if isinstance(node, tuple):
            waiting.extend(reversed(node))
        else:
            known: Any = type(node)
            waiting.extend(getattr(node, name) for name in _names_backwards(known))


@cache
def _names_backwards(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, the last one first; none for what is no dataclass."""
    return tuple(item.name for item in reversed(fields(kind))) if is_dataclass(kind) else ()
