"""The structure of a toy transformer: which parameter does what, without holding any."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lib_onediff.core.family import Layout
from lib_onediff.core.leaves import (
    CrossAttention,
    LayerNorm,
    Linear,
    SelfAttention,
    TimeEmbedding,
)
from lib_onediff.families.leaf_reader import LeafReader

from .network import HEADS, PATCH, ToyTransformer


@dataclass(frozen=True)
class ToyBlockLayout:
    self_norm: LayerNorm
    self_attention: SelfAttention
    cross_norm: LayerNorm
    cross_attention: CrossAttention
    feed_forward_norm: LayerNorm
    feed_forward_in: Linear
    feed_forward_out: Linear


@dataclass(frozen=True)
class ToyTransformerLayout(Layout):
    in_channels: int
    context_width: int
    patches: Linear
    time: TimeEmbedding
    blocks: tuple[ToyBlockLayout, ...]
    out_norm: LayerNorm
    out: Linear
    model_name: str = "Toy transformer"

    def sized_layers(self, height: int, width: int, tokens: int) -> Iterator[tuple[Any, tuple[int, int]]]:
        for block in self.blocks:
            yield block, (height // PATCH, width // PATCH)


def is_toy_transformer(module: nn.Module) -> bool:
    return type(module) is ToyTransformer


def read_toy_transformer(network: Any) -> ToyTransformerLayout:
    """The layout of a toy transformer. Raises Refusal with the reason for a module that is built in another way."""
    leaves = LeafReader(network)
    layout = ToyTransformerLayout(
        in_channels=network.patches.in_features // PATCH**2,
        context_width=network.blocks[0].cross_k.in_features,
        patches=leaves.linear(network.patches),
        time=TimeEmbedding(
            channels=network.time_in.in_features, cosine_first=True, frequency_shift=0.0, scale=1000.0, condition=None,
            first=leaves.linear(network.time_in), second=leaves.linear(network.time_out),
        ),
        blocks=tuple(read_block(block, leaves) for block in network.blocks),
        out_norm=leaves.layer_norm(network.norm), out=leaves.linear(network.out),
    )
    leaves.refuse_unclaimed()
    return layout


def read_block(block: Any, leaves: LeafReader) -> ToyBlockLayout:
    path = leaves.path(block)
    query_key_value = leaves.fused(f"{path}.self", block.to_q, block.to_k, block.to_v)
    key_value = leaves.fused(f"{path}.cross", block.cross_k, block.cross_v)
    return ToyBlockLayout(
        self_norm=leaves.layer_norm(block.norm1),
        self_attention=SelfAttention(query_key_value, leaves.linear(block.to_out), HEADS),
        cross_norm=leaves.layer_norm(block.norm2),
        cross_attention=CrossAttention(
            leaves.linear(block.cross_q), key_value, leaves.linear(block.cross_out), HEADS,
        ),
        feed_forward_norm=leaves.layer_norm(block.norm3),
        feed_forward_in=leaves.linear(block.into), feed_forward_out=leaves.linear(block.out),
    )
