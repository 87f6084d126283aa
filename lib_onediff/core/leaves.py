"""The layers of networks, as descriptions: which parameter does what, without holding any.

A path is the dotted name of a leaf module inside the host's network, whose weight and bias it stands for; or of one
parameter of a module. A network's layout is a tree of such descriptions.
"""
from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

# The source of the tokens that a linear layer reads: a norm, a GEGLU, or anything that cannot write them in eight bits.
NORMED = "normed"
GATED = "gated"
PLAIN_INPUT = "plain"
# The role of a linear layer in its block.
SELF_QKV = "self-attention QKV"
SELF_OUT = "self-attention out"
CROSS_QUERY = "cross-attention query"
CROSS_OUT = "cross-attention out"
FEED_FORWARD_IN = "feed-forward in"
FEED_FORWARD_OUT = "feed-forward out"


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
class RMSNorm:
    """plus_one: its weight is stored relative to one, so that 1 + weight is multiplied. as_stored: the host multiplies
    by the weight in float32, whatever it computes in: the weight is never cast, and may be of another type than the
    network's other parameters."""

    path: str
    width: int
    eps: float
    plus_one: bool = False
    as_stored: bool = False


@dataclass(frozen=True)
class FreeParameter:
    """A parameter that belongs to no layer, such as a learned token, or a table that is added to modulations. path: the
    parameter's own."""

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AdaptiveNorm:
    """A layer norm without parameters: a modulation follows, made from the timestep."""

    width: int
    eps: float


@dataclass(frozen=True)
class NormedHeads:
    """The RMS norm of the heads of an attention's queries or keys: how many heads, and their width. interleaved: as the
    rotary embedding behind it."""

    heads: int
    width: int
    interleaved: bool = False


@dataclass(frozen=True)
class SwiGLU:
    """A gated linear unit with a SiLU, (..., 2 * width) -> (..., width), over the image's tokens."""

    width: int


@dataclass(frozen=True)
class SigmoidGate:
    """A sigmoid gate on the image's tokens, (..., width)."""

    width: int


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers over the same input whose weights lie one after the other in memory, so that one GEMM computes all.
    """

    name: str
    members: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        return sum(member.out_features for member in self.members)


class TokenLinear(NamedTuple):
    """A linear layer over the image's tokens, which may be computed in eight bits. source: what makes the tokens. role:
    the layer's place in its block. norm: the path of the norm before it, if the scales in float8 follow from that."""

    layer: Linear | FusedLinear
    source: str
    role: str
    norm: str = ""


@dataclass(frozen=True)
class SelfAttention:
    """norms: of each head's queries and of its keys, or none. Keys and values may have fewer heads than queries. gated:
    query_key_value also makes a gate for each number of the mix of values, which is multiplied by the gate's sigmoid.
    """

    query_key_value: FusedLinear
    out: Linear
    heads: int
    norms: tuple[RMSNorm, ...] = ()
    gated: bool = False

    @property
    def head_width(self) -> int:
        return self.out.in_features // self.heads

    @property
    def key_heads(self) -> int:
        """The number of heads of keys, and of values."""
        others = 2 * self.heads if self.gated else self.heads
        return (self.query_key_value.out_features // self.head_width - others) // 2

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """See Block."""
        return TokenLinear(self.query_key_value, NORMED, SELF_QKV), TokenLinear(self.out, PLAIN_INPUT, SELF_OUT)


@dataclass(frozen=True)
class CrossAttention:
    """norms: as SelfAttention's."""

    query: Linear
    key_value: FusedLinear
    out: Linear
    heads: int
    norms: tuple[RMSNorm, ...] = ()

    @property
    def head_width(self) -> int:
        return self.query.out_features // self.heads

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """See Block."""
        return TokenLinear(self.query, NORMED, CROSS_QUERY), TokenLinear(self.out, PLAIN_INPUT, CROSS_OUT)


class Block:
    """A block of a network, of any family. Its properties name the layers that may have their weights in eight bits,
    in the order in which they are computed."""

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers over the image's tokens."""
        return ()

    @property
    def prompt_layers(self) -> tuple[FusedLinear, ...]:
        """The linear layers over the prompt's tokens, whose products are computed in the model's dtype."""
        return ()

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions of images that come from a group norm."""
        return ()


def feed_forward_layers(
    into: Linear | FusedLinear, out: Linear, source: str, norm: str = ""
) -> tuple[TokenLinear, ...]:
    """The two layers of a feed-forward. source: GATED if a gated unit is between them, else PLAIN_INPUT. norm: see
    TokenLinear."""
    return TokenLinear(into, NORMED, FEED_FORWARD_IN, norm), TokenLinear(out, source, FEED_FORWARD_OUT)


@dataclass(frozen=True)
class TimeEmbedding:
    """Sinusoids of the timestep, then two linear layers. See sinusoids in devices/torch/operators.py."""

    channels: int
    cosine_first: bool
    frequency_shift: float
    scale: float
    condition: Linear | None
    first: Linear
    second: Linear


# What describes a module that holds parameters, or one parameter.
LEAVES = (Linear, Convolution, GroupNorm, LayerNorm, RMSNorm, FreeParameter)


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


def names_of(node: Any, apart: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the layers in a tree, by which Weights has them: first those of fused layers, then the paths of all
    layers that are not in one. apart: paths to leave out."""
    names: list[str] = []
    left_out = set(apart)
    for fusion in descriptions(node, FusedLinear):
        names.append(fusion.name)
        left_out.update(member.path for member in fusion.members)
    names += [leaf.path for leaf in descriptions(node, LEAVES) if leaf.path not in left_out]
    return tuple(names)


@cache
def _names_backwards(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, the last one first; none for what is no dataclass."""
    return tuple(item.name for item in reversed(fields(kind))) if is_dataclass(kind) else ()
