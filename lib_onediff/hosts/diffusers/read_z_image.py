"""Reads diffusers' ZImageTransformer2DModel into a layout: the description of its structure and layers by which our
forward computes it."""
from __future__ import annotations

from typing import Any

from torch import nn

from ...core.leaves import SelfAttention
from ...core.refusal import unsupported_model
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import FAMILIES
from ...families.rotary import RotaryAxes
from ...families.z_image.layout import ZImageLayout
from ...families.z_image.read import HostParts, read_layout, without_bias

# The host pads the prompt's tokens to a multiple of this number, and the image's tokens too.
MULTIPLE = 32
# The height and width of a patch, in latent pixels.
PATCH = 2
# The host's key for the layers of patches of this size and one frame.
LAYERS = f"{PATCH}-1"


def is_z_image(network: nn.Module) -> bool:
    """Whether a module's class is diffusers' own ZImageTransformer2DModel, and not a derived one."""
    return is_class(type(network), "diffusers.models.transformers.transformer_z_image", "ZImageTransformer2DModel")


def read_z_image(network: Any) -> ZImageLayout:
    """The layout of a ZImageTransformer2DModel. Raises Refusal if the module is built in a way that our forward does
    not compute."""
    if network.siglip_embedder is not None:
        raise unsupported_model("it also takes images as prompts (omni)")
    if list(network.all_x_embedder) != [LAYERS]:
        patches = ", ".join(network.all_x_embedder)
        raise unsupported_model(f"its patches (side-frames) are {patches} instead of {LAYERS}")
    leaves = LeafReader(network, reads_loras=True)
    rope = network.rope_embedder
    widths = tuple(rope.axes_dims)
    axes = RotaryAxes(widths, (float(rope.theta),) * len(widths), interleaved=True)
    return read_layout(network, leaves, HostParts(
        "ZImageTransformerBlock", attention_of, network.all_x_embedder[LAYERS], network.all_final_layer[LAYERS], PATCH,
        MULTIPLE, axes, float(network.t_scale), is_negated=False,
    ))


def attention_of(attention: Any, leaves: LeafReader) -> SelfAttention:
    """The layout of a block's self attention. Raises Refusal for one that computes anything else than our forward.
    leaves: the reader of the network, which notes the parameters that are read."""
    leaves.expect("Attention", attention)
    leaves.expect("Dropout", *attention.to_out[1:])
    if leaves.kind(attention.processor) != "ZSingleStreamAttnProcessor":
        raise leaves.unknown(attention, f"its processor is {leaves.kind(attention.processor)}")
    norms = tuple(leaves.rms_norm(norm) for norm in (attention.norm_q, attention.norm_k) if norm is not None)
    joint = leaves.fused(leaves.path(attention), attention.to_q, attention.to_k, attention.to_v)
    return SelfAttention(joint, without_bias(attention.to_out[0], leaves), attention.heads, norms)


FAMILIES.take_reader((is_z_image, read_z_image))
