"""Reads a host's Z-Image module. The classes of all hosts differ only in what HostParts names."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.leaves import Linear, SelfAttention, TimeEmbedding
from ...core.refusal import unsupported_model
from ..leaf_reader import LeafReader
from ..rotary import RotaryAxes
from .layout import StreamBlock, ZImageLayout


@dataclass(frozen=True)
class HostParts:
    """The differences of one host's Z-Image module from the modules of other hosts. Each host's package makes a
    HostParts for read_layout.

    block: the name of the class of blocks.
    attention_of: returns the description of a block's attention, given its module and the LeafReader.
    patches, final: the module of the linear layer over patches, and the module of class FinalLayer.
    patch, multiple, axes, time_scale, is_negated, model_name: become the fields of ZImageLayout with these names.
    """

    block: str
    attention_of: Callable[[Any, LeafReader], SelfAttention]
    patches: Any
    final: Any
    patch: int
    multiple: int
    axes: RotaryAxes
    time_scale: float
    is_negated: bool
    model_name: str = "Z-Image"


def read_layout(network: Any, leaves: LeafReader, host: HostParts) -> ZImageLayout:
    """The layout of a Z-Image or Lumina 2 module of a host.

    network: the module. leaves: a new LeafReader of it. host: see HostParts. Raises Refusal if the module is built in
    another way, or has parameters that our forward would ignore.
    """
    first, between, second = network.t_embedder.mlp
    norm, text = network.cap_embedder
    silu, out_modulation = host.final.adaLN_modulation
    leaves.expect("TimestepEmbedder", network.t_embedder)
    leaves.expect("FinalLayer", host.final)
    leaves.expect("SiLU", between, silu)
    modulated = [*network.noise_refiner, *network.layers]
    *activations, last = zip(*(block.adaLN_modulation for block in modulated), strict=True)
    for modules in activations:
        leaves.expect("SiLU", *modules)

    def blocks_of(blocks: Any, has_image: bool) -> tuple[StreamBlock, ...]:
        return tuple(read_block(block, leaves, host, has_image) for block in blocks)

    patches = leaves.linear(host.patches)
    width = patches.out_features
    is_filled_up = host.multiple > 1
    layout = ZImageLayout(
        in_channels=patches.in_features // host.patch**2, patch=host.patch, width=width,
        context_width=text.weight.shape[1], patches=patches,
        time=TimeEmbedding(
            channels=network.t_embedder.frequency_embedding_size, cosine_first=True, frequency_shift=0.0, scale=1.0,
            condition=None, first=leaves.linear(first), second=leaves.linear(second),
        ),
        time_scale=host.time_scale, modulations=leaves.fused("modulations", *last), activates_time=bool(activations),
        text_norm=leaves.rms_norm(norm), text=leaves.linear(text),
        image_pad=leaves.parameter(network, "x_pad_token") if is_filled_up else None,
        text_pad=leaves.parameter(network, "cap_pad_token") if is_filled_up else None,
        multiple=host.multiple, axes=host.axes, image_refiner=blocks_of(network.noise_refiner, has_image=True),
        text_refiner=blocks_of(network.context_refiner, has_image=False),
        blocks=blocks_of(network.layers, has_image=True), out_modulation=leaves.linear(out_modulation),
        out_norm=leaves.adaptive_norm(host.final.norm_final, width), out=leaves.linear(host.final.linear),
        is_negated=host.is_negated, model_name=host.model_name,
    )
    leaves.refuse_unclaimed()
    return layout


def read_block(block: Any, leaves: LeafReader, host: HostParts, has_image: bool) -> StreamBlock:
    """The description of one of the host's blocks, whose parameters `leaves` claims. has_image: see StreamBlock.

    Raises Refusal for a block of another class or with other modules, or if the second linear layer of the feed-forward
    layer has a bias, which forward.scaled_down could not scale.
    """
    feed_forward = block.feed_forward
    leaves.expect(host.block, block)
    leaves.expect("FeedForward", feed_forward)
    leaves.require(block, modulation=has_image)
    return StreamBlock(
        leaves.rms_norm(block.attention_norm1), host.attention_of(block.attention, leaves),
        leaves.rms_norm(block.attention_norm2), leaves.rms_norm(block.ffn_norm1),
        leaves.fused(leaves.path(feed_forward), feed_forward.w1, feed_forward.w3),
        without_bias(feed_forward.w2, leaves), leaves.rms_norm(block.ffn_norm2), has_image,
    )


def without_bias(layer: Any, leaves: LeafReader) -> Linear:
    """The description of a linear layer that must not have a bias. Raises Refusal if it has one."""
    found = leaves.linear(layer)
    if any(name.endswith("bias") for name, _ in layer.named_parameters()):
        raise unsupported_model(f"the layer {found.path} has a bias")
    return found
