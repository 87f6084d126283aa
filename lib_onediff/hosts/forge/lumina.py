"""Forge Neo's NextDiT (backend.nn.lumina), which is Z-Image or Lumina 2: reads its layout, the description of its
structure and layers by which our forward computes it, and converts its calls to ours."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.call import Call
from ...core.leaves import SelfAttention
from ...core.refusal import unsupported_model
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import FAMILIES
from ...families.rotary import RotaryAxes
from ...families.z_image.call import ZImageCall, joined_prompts
from ...families.z_image.layout import ZImageLayout
from ...families.z_image.read import HostParts, read_layout, without_bias
from .call import HostCall, transformer_call


def is_lumina(network: nn.Module) -> bool:
    """Whether a module's class is Forge Neo's own NextDiT, and not a derived one."""
    return is_class(type(network), "backend.nn.lumina", "NextDiT")


def read_lumina(network: Any) -> ZImageLayout:
    """The layout of a NextDiT module, which is Z-Image or, without learned padding tokens, Lumina 2. Raises Refusal if
    the module is built in a way that our forward does not compute."""
    if network.clip_text_pooled_proj is not None:
        raise unsupported_model("it takes a pooled prompt")
    leaves = LeafReader(network)
    embedder = network.rope_embedder
    leaves.expect("EmbedND", embedder)
    widths = tuple(embedder.axes_dim)
    # The host computes the rotary angles in float64.
    axes = RotaryAxes(widths, (float(embedder.theta),) * len(widths), interleaved=True, angles=torch.float64)
    return read_layout(network, leaves, HostParts(
        "JointTransformerBlock", attention_of, network.x_embedder, network.final_layer, network.patch_size,
        network.pad_tokens_multiple or 1, axes, network.time_scale, is_negated=True,
        model_name="Z-Image" if network.pad_tokens_multiple else "Lumina 2",
    ))


def attention_of(attention: Any, leaves: LeafReader) -> SelfAttention:
    """The layout of a block's self attention. Raises Refusal for one that computes anything else than our forward.
    leaves: the reader of the network, which notes the parameters that are read."""
    leaves.expect("JointAttention", attention)
    norms = leaves.layers({"RMSNorm": lambda module, reader: reader.rms_norm(module)}, (
        attention.q_norm, attention.k_norm,
    ))
    joint = leaves.fused(leaves.path(attention), attention.qkv)
    return SelfAttention(joint, without_bias(attention.out, leaves), attention.n_local_heads, norms)


def z_image_call(network: Any, given: HostCall, *how: Any) -> Call:
    """Our Call for a call of the host's network, Z-Image or Lumina 2. Raises Refusal if only the host can compute the
    call.

    given: the host's call. Its prompts, which all have the same length, are padded in our Call to the multiple of
    tokens that the network uses. how: upcast_attention, names_read, image_prompts and changed, in this order, as for
    transformer_call.
    """

    def call_of(latent: Tensor, timestep: Tensor, context: Tensor, **others: Any) -> ZImageCall:
        context, lengths, _ = joined_prompts(list(context), network.pad_tokens_multiple or 1)
        return ZImageCall(latent, timestep, context, lengths, **others)

    return transformer_call(call_of, network, given, *how)


FAMILIES.take_reader((is_lumina, read_lumina))
