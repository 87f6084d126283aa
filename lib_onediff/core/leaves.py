"""Descriptions of layers: their kinds, sizes and names, without their parameters. A network's layout is a tree of them.

A path is the dotted name of a leaf module (a module without children) inside the host's network, and the key of its
weight and bias in layer_weights.Weights; the path of a FreeParameter is the dotted name of the parameter itself.
"""
from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

# The operator that writes the input of a linear layer: a norm, a gated unit, or one that cannot write eight bits.
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
    """A linear layer, or a 1x1 convolution, which is a linear layer over each pixel. Its bias may be missing."""

    path: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Convolution:
    """A square 2D convolution. circular: padded with the opposite edge (the WebUI's option Tiling) instead of zeros."""

    path: str
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    padding: int
    circular: bool = False


@dataclass(frozen=True)
class GroupNorm:
    """A group norm with weight and bias."""

    path: str
    channels: int
    groups: int
    eps: float


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm over the last dimension, with weight and bias."""

    path: str
    width: int
    eps: float


@dataclass(frozen=True)
class RMSNorm:
    """A root mean square norm.

    plus_one: it multiplies by 1 + weight.
    as_stored: the host multiplies by the weight in float32, in every compute dtype. Its weight is never cast, and may
        have another dtype than the network's other parameters.
    """

    path: str
    width: int
    eps: float
    plus_one: bool = False
    as_stored: bool = False


@dataclass(frozen=True)
class FreeParameter:
    """A parameter that belongs to no layer, such as a learned token, or a table that is added to modulations. path: the
    parameter's."""

    path: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AdaptiveNorm:
    """A layer norm without parameters, followed by a modulation that is computed from the timestep."""

    width: int
    eps: float


@dataclass(frozen=True)
class NormedHeads:
    """The RMS norms over each head of an attention's queries or keys, followed by a rotary embedding; a kernel user
    (Layout.kernel_users). heads: the number of heads. width: of a head. interleaved: see core.operators.Rotary."""

    heads: int
    width: int
    interleaved: bool = False


@dataclass(frozen=True)
class SwiGLU:
    """A gated linear unit with SiLU over the image's tokens: (..., 2 * width) -> (..., width). The gate is the first
    half (core.operators.SWIGLU)."""

    width: int


@dataclass(frozen=True)
class SigmoidGate:
    """A product of the image's tokens with the sigmoid of a gate: (..., width) each."""

    width: int


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers over the same input whose weights are consecutive in memory, so that one GEMM computes them all.

    name: the key in Weights of their joined weight and bias.
    members: in the order of their rows.
    """

    name: str
    members: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        """The sum over the members."""
        return sum(member.out_features for member in self.members)


class TokenLinear(NamedTuple):
    """A linear layer over the image's tokens, which may be computed in eight bits.

    source: what computes its input: NORMED, GATED or PLAIN_INPUT. role: its role in its block, such as SELF_QKV.
    norm: the path of the norm before the layer, if the scales of its input in float8 are derived from that norm's
        parameters; "" if not.
    """

    layer: Linear | FusedLinear
    source: str
    role: str
    norm: str = ""


@dataclass(frozen=True)
class SelfAttention:
    """A self attention. Keys and values may have fewer heads than queries (grouped-query attention).

    norms: (norm over each head of the queries, norm over each head of the keys); () for none.
    gated: query_key_value also computes a gate; the attention's output is multiplied by its sigmoid before `out`.
    """

    query_key_value: FusedLinear
    out: Linear
    heads: int
    norms: tuple[RMSNorm, ...] = ()
    gated: bool = False

    @property
    def head_width(self) -> int:
        """The number of features of one head."""
        return self.out.in_features // self.heads

    @property
    def key_heads(self) -> int:
        """The number of heads of the keys, and of the values; `heads` counts the heads of the queries."""
        others = 2 * self.heads if self.gated else self.heads
        return (self.query_key_value.out_features // self.head_width - others) // 2

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """This attention's part of Block.token_layers."""
        return TokenLinear(self.query_key_value, NORMED, SELF_QKV), TokenLinear(self.out, PLAIN_INPUT, SELF_OUT)


@dataclass(frozen=True)
class CrossAttention:
    """A cross attention: queries from the image's tokens, keys and values from the prompt's. norms: see SelfAttention.
    """

    query: Linear
    key_value: FusedLinear
    out: Linear
    heads: int
    norms: tuple[RMSNorm, ...] = ()

    @property
    def head_width(self) -> int:
        """The number of features of one head."""
        return self.query.out_features // self.heads

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """This attention's part of Block.token_layers."""
        return TokenLinear(self.query, NORMED, CROSS_QUERY), TokenLinear(self.out, PLAIN_INPUT, CROSS_OUT)


class Block:
    """The base of the blocks of all families. Its properties list the layers whose weights may be stored in eight bits,
    in the order in which they are computed. () is the default: a family overrides a property if its block has layers
    for it."""

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers over the image's tokens. Their products may be computed in eight bits."""
        return ()

    @property
    def prompt_layers(self) -> tuple[FusedLinear, ...]:
        """The linear layers over the prompt's tokens. Only their weights may be stored in eight bits: products are
        computed in the model's dtype."""
        return ()

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions whose input is the output of a group norm. They may be computed in eight bits."""
        return ()


def feed_forward_layers(
    into: Linear | FusedLinear, out: Linear, source: str, norm: str = ""
) -> tuple[TokenLinear, ...]:
    """The descriptions of a feed-forward's two linear layers, `into` and `out`, for Block.token_layers. source:
    TokenLinear.source of `out`, GATED or PLAIN_INPUT; `into` always has NORMED. norm: TokenLinear.norm of `into`."""
    return TokenLinear(into, NORMED, FEED_FORWARD_IN, norm), TokenLinear(out, source, FEED_FORWARD_OUT)


@dataclass(frozen=True)
class TimeEmbedding:
    """The embedding of the timestep: sinusoids (see sinusoids in devices/torch/operators.py), then two linear layers.

    channels, cosine_first, frequency_shift, scale: of the sinusoids, as embedding_dim, flip_sin_to_cos,
        downscale_freq_shift and scale of diffusers' get_timestep_embedding.
    condition: the linear layer of an LCM's guidance embedding, whose output is added to the sinusoids; None without.
    """

    channels: int
    cosine_first: bool
    frequency_shift: float
    scale: float
    condition: Linear | None
    first: Linear
    second: Linear


# The classes of descriptions that have a path: of a module with parameters, or of one parameter.
LEAVES = (Linear, Convolution, GroupNorm, LayerNorm, RMSNorm, FreeParameter)


def digest_without(layout: Any, names: Collection[str]) -> str:
    """A digest (16 hex digits) of a tree of dataclasses and tuples: of the classes' names and of all fields, except
    those with these names. Equal in every process."""

    def plain(node: Any) -> Any:
        if is_dataclass(node):
            kept = (item.name for item in fields(node) if item.name not in names)
            return type(node).__name__, *(plain(getattr(node, name)) for name in kept)
        return tuple(map(plain, node)) if isinstance(node, tuple) else node

    return hashlib.sha256(repr(plain(layout)).encode()).hexdigest()[:16]


def descriptions(node: Any, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """All objects of this class in a tree of dataclasses and tuples, depth first in the order of the fields. One that
    occurs at several places in the tree comes several times. node: the tree, or a part of it."""
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
    """The keys in Weights under which a forward reads the layers of a tree: first the names of the fused layers, then
    the paths of all layers that are not members of a fused layer. If a layer occurs twice in the tree, so does its key
    here. node: a layout, or a part of it. apart: paths to leave out."""
    names: list[str] = []
    left_out = set(apart)
    for fusion in descriptions(node, FusedLinear):
        names.append(fusion.name)
        left_out.update(member.path for member in fusion.members)
    names += [leaf.path for leaf in descriptions(node, LEAVES) if leaf.path not in left_out]
    return tuple(names)


@cache
def _names_backwards(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields in reverse order; () for any other class."""
    return tuple(item.name for item in reversed(fields(kind))) if is_dataclass(kind) else ()
