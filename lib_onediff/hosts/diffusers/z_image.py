"""Converts a call of diffusers' ZImageTransformer2DModel to ours, and our output to the host's sample."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.call import Call
from ...core.refusal import Refusal
from ...families.z_image.call import ZImageCall, joined_prompts
from .read_z_image import MULTIPLE, PATCH


def z_image_call(
    network: Any, x: Any, t: Tensor, cap_feats: Any, patch_size: int = PATCH, f_patch_size: int = 1, **others: Any
) -> ZImageCall:
    """Our call for these arguments of the host's forward. Raises Refusal for those that our forward does not compute.

    x: a list of latents, (channels, 1, height, width) each.
    t: (batch,), from 0 for noise to 1 for the image; our timestep is 1 - t.
    cap_feats: a list of prompts, (tokens, width) each.
    """
    passed = [name for name, value in others.items() if value is not None and value != {}]
    if passed:
        raise Refusal(f"the diffusers pipeline passes {', '.join(passed)}, which OneDiff does not support")
    if (patch_size, f_patch_size) != (PATCH, 1):
        raise Refusal(f"the diffusers pipeline passes patches of {f_patch_size} frames and {patch_size} a side")
    for inputs in (x, cap_feats):
        if not (isinstance(inputs, list) and inputs and all(isinstance(one, Tensor) for one in inputs)):
            raise Refusal("the latents or the prompts are not a list of tensors (omni?)")
    if len({(one.shape, one.dtype) for one in x}) > 1:
        raise Refusal("the latents have several sizes")
    if any(one.dim() != 2 for one in cap_feats) or len({(one.shape[1], one.dtype) for one in cap_feats}) > 1:
        raise Refusal("the prompts have several widths or dtypes")
    size = x[0].shape
    if len(size) != 4 or size[1] != 1 or any(side % PATCH for side in size[2:]):
        raise Refusal(f"the latents are {tuple(size)} instead of one frame in patches of {PATCH} a side")
    if not isinstance(t, Tensor) or t.shape != (len(x),) or t.dtype != torch.float32:
        raise Refusal("the timestep is not one for each image, in float32")
    context, lengths, is_ragged = joined_prompts(cap_feats, MULTIPLE)
    refuse_places(network, (context.shape[1] + 1, size[2] // PATCH - 1, size[3] // PATCH - 1))
    return ZImageCall(torch.stack(x).squeeze(2), 1.0 - t, context, lengths, is_ragged, t)


def refuse_places(network: Any, last: tuple[int, int, int]) -> None:
    """Raise Refusal if the host's table of rotary embeddings ends before the last position along an axis: the host
    raises an error then, and must raise it itself. last: the last position along each axis."""
    most = network.rope_embedder.axes_lens
    if any(place >= length for place, length in zip(last, most, strict=True)):
        raise Refusal(f"the prompt or the latent is longer than the {most} positions of this model")


def tensor_of(sample: list[Tensor], call: Call) -> Tensor:
    """The sample that the host's forward has returned, a list of (channels, 1, height, width), as one tensor in the
    shape of our output, so that both can be compared."""
    return torch.stack(sample).squeeze(2)


def sample_of(output: Tensor) -> list[Tensor]:
    """Our output, (batch, channels, height, width), in the form of the host's sample: a list."""
    return list(output.unsqueeze(2).unbind(0))
