"""Forge Neo's Anima (backend.nn.anima): reads its layout, the description of its structure and layers by which our
forward computes it; converts its calls to ours; checks state that is not in a call's arguments."""
from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...core.call import Call
from ...core.leaves import TimeEmbedding
from ...core.refusal import Refusal, unsupported_model
from ...families.anima.call import AnimaCall
from ...families.anima.layout import AdaptiveBlock, AnimaLayout, read_attentions, refuse_biases, rotary_axes
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import FAMILIES
from ...families.rotary import RotaryAxes
from .call import HostCall, transformer_call

# The names of a block's sublayers, in their order: parts of the names of its modules.
PLACES = ("self_attn", "cross_attn", "mlp")
# The number of dimensions of a context (batch, 1, tokens, width).
WITH_ANOTHER_DIMENSION = 4
# The parts of an attention, as read_attentions takes them.
PARTS = attrgetter("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "output_proj", "n_heads")


def is_anima(network: nn.Module) -> bool:
    """Whether a module's class is Forge Neo's own Anima, and not a derived one."""
    return is_class(type(network), "backend.nn.anima", "Anima")


def read_anima(network: Any) -> AnimaLayout:
    """The layout of an Anima module. Raises Refusal if the module is built in a way that our forward does not
    compute."""
    leaves = LeafReader(network)
    width = network.t_embedding_norm.normalized_shape[0]
    if network.patch_temporal != 1:
        raise unsupported_model(f"its patches have {network.patch_temporal} frames of a video")
    embedder = network.t_embedder[1]
    final = network.final_layer
    patches = leaves.linear(network.x_embedder.proj[1])
    area = network.patch_spatial**2
    if patches.in_features != area * (network.in_channels + 1):
        raise unsupported_model("it does not take a padding mask")
    pairs = [getattr(block, f"adaln_modulation_{place}") for block in network.blocks for place in PLACES]
    leaves.expect("SiLU", embedder.activation, *(pair[0] for pair in (*pairs, final.adaln_modulation)))
    layout = AnimaLayout(
        in_channels=network.in_channels, out_channels=network.out_channels, patch=network.patch_spatial, width=width,
        context_width=network.blocks[0].cross_attn.k_proj.weight.shape[1], patches=patches,
        time=TimeEmbedding(
            channels=network.t_embedder[0].num_channels, cosine_first=True, frequency_shift=0.0, scale=1.0,
            condition=None, first=leaves.linear(embedder.linear_1), second=leaves.linear(embedder.linear_2),
        ),
        time_norm=leaves.rms_norm(network.t_embedding_norm),
        downs=leaves.fused("modulation.down", *(pair[1] for pair in (*pairs, final.adaln_modulation))),
        ups=leaves.fused("modulation.up", *(pair[2] for pair in pairs)),
        out_up=leaves.linear(final.adaln_modulation[2]),
        axes=read_axes(network.pos_embedder),
        blocks=tuple(read_block(block, leaves) for block in network.blocks),
        out_norm=leaves.adaptive_norm(final.layer_norm, width), out=leaves.linear(final.linear),
    )
    leaves.refuse_unclaimed()
    refuse_biases(network)
    return layout


def read_axes(embedder: Any) -> RotaryAxes:
    """The axes (time, height, width) of the host's rotary embedding. The exponents of its frequencies are buffers,
    which the host may have cast together with the weights; our exponents are rounded to the same dtype. Raises Refusal
    for exponents that no such cast explains. embedder: the host's module (pos_embedder)."""
    time = embedder.dim_temporal_range
    space = embedder.dim_spatial_range
    widths = 2 * len(time), 2 * len(space), 2 * len(space)
    for rounded in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if all(is_range(buffer, rounded) for buffer in (time, space)):
            return rotary_axes(embedder, widths, rounded, torch.float16)
    raise unsupported_model("its positions have unusual frequencies")


def is_range(buffer: Tensor, rounded: torch.dtype) -> bool:
    """Whether a buffer has the exponents of a rotary embedding after a cast to the dtype `rounded`: 0, 2, 4, ... up to
    its width, divided by the width, which is twice the buffer's length."""
    width = 2 * len(buffer)
    exact = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return torch.equal(buffer.float().cpu(), exact.to(rounded).float())


def read_block(block: Any, leaves: LeafReader) -> AdaptiveBlock:
    """The layout of one transformer block. Raises Refusal for a block that computes anything else than our forward.
    leaves: the reader of the network, which notes the parameters that are read."""
    width = block.self_attn.output_proj.weight.shape[0]
    norms = {leaves.adaptive_norm(getattr(block, f"layer_norm_{place}"), width) for place in PLACES}
    if leaves.kind(block) != "Block" or len(norms) != 1 or not isinstance(block.mlp.activation, nn.GELU):
        raise leaves.unknown(block)
    if block.mlp.activation.approximate != "none":
        raise leaves.unknown(block.mlp.activation)
    return AdaptiveBlock(
        *read_attentions(block.self_attn, block.cross_attn, PARTS, leaves),
        leaves.linear(block.mlp.layer1), leaves.linear(block.mlp.layer2), norms.pop(),
    )


def anima_call(network: Any, given: HostCall, *how: Any) -> Call:
    """Our Call for a call of the host's network. Raises Refusal if only the host can compute the call.

    given: the host's call, whose context is (batch, tokens, width) or (batch, 1, tokens, width). how: upcast_attention,
    names_read, image_prompts and changed, in this order, as for transformer_call.
    """
    context = given.context
    if context.dim() == WITH_ANOTHER_DIMENSION:
        context = context.flatten(1, 2)
    return transformer_call(AnimaCall, network, given._replace(context=context), *how)


def refuse_references() -> None:
    """Raise Refusal if the user has given a reference image for the present image: the host's forward of Anima reads it
    from a global variable, and ours does not."""
    if importlib.import_module("backend.args").dynamic_args.ref_latents:
        raise Refusal("a reference image is used ([Anima] Enable Reference)")


FAMILIES.take_reader((is_anima, read_anima))
