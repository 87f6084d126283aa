"""Converts a call of diffusers' ZImageTransformer2DModel to ours, and our output to the host's sample."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.call import Call
from ...core.refusal import Refusal, unsupported_inputs
from ...families.z_image.call import ZImageCall, joined_prompts
from .read_z_image import MULTIPLE, PATCH


def z_image_call(
    network: Any, x: Any, t: Tensor, cap_feats: Any, patch_size: int = PATCH, f_patch_size: int = 1, **others: Any
) -> ZImageCall:
    """Our Call for these arguments of ZImageTransformer2DModel.forward. Raises Refusal for arguments that our
    forward does not compute.

    network: the host's, whose table of rotary embeddings limits the sizes.
    x: a list of latents, (channels, 1, height, width) each, all of one size and dtype.
    t: (batch,) in float32, from 0 for noise to 1 for the image; the timestep of our Call is 1 - t.
    cap_feats: a list of as many prompts, (tokens, width) each, all of one width and dtype. Their lengths may differ;
        the Call has the prompts padded to one length.
    patch_size, f_patch_size: a patch's side in latent pixels, and its frames; refused unless PATCH and 1.
    others: refused unless None or {}.
    """
    passed = [name for name, value in others.items() if value is not None and value != {}]
    if passed:
        raise Refusal(f"the diffusers pipeline passes {', '.join(passed)}, which OneDiff does not support")
    if (patch_size, f_patch_size) != (PATCH, 1):
        raise unsupported_inputs(
            f"patches have {f_patch_size} frames and {patch_size} latent pixels a side, instead of 1 and {PATCH}"
        )
    for inputs in (x, cap_feats):
        if not (isinstance(inputs, list) and inputs and all(isinstance(one, Tensor) for one in inputs)):
            raise unsupported_inputs("the latents or the prompts are not lists of tensors (maybe images as prompts)")
    if len({(one.shape, one.dtype) for one in x}) > 1:
        raise unsupported_inputs("the latents of one call have several sizes")
    if any(one.dim() != 2 for one in cap_feats) or len({(one.shape[1], one.dtype) for one in cap_feats}) > 1:
        raise unsupported_inputs("the prompts of one call have several widths or dtypes")
    size = x[0].shape
    if len(size) != 4 or size[1] != 1 or any(side % PATCH for side in size[2:]):
        raise unsupported_inputs(
            f"the latents (shape {tuple(size)}) are not one frame in patches of {PATCH} latent pixels a side"
        )
    if not isinstance(t, Tensor) or t.shape != (len(x),) or t.dtype != torch.float32:
        raise unsupported_inputs("the timestep is not one float32 number for each image")
    context, lengths, is_ragged = joined_prompts(cap_feats, MULTIPLE)
    refuse_positions(network, (context.shape[1] + 1, size[2] // PATCH - 1, size[3] // PATCH - 1))
    return ZImageCall(torch.stack(x).squeeze(2), 1.0 - t, context, lengths, is_ragged, t)


def refuse_positions(network: Any, last: tuple[int, int, int]) -> None:
    """Raise Refusal if the host's table of rotary embeddings has no entry for one of these positions. The host then
    computes the call, and raises its own error.

    last: the largest position along each axis of the rotary embedding: (the image's on the axis of the prompt's tokens,
        which comes after all tokens; the row; the column of a patch).
    """
    most = network.rope_embedder.axes_lens
    if any(position >= length for position, length in zip(last, most, strict=True)):
        tokens, rows, columns = most
        raise Refusal(
            f"the prompt or the image is larger than this model allows (about {tokens} tokens, and a latent of "
            f"{rows * PATCH} x {columns * PATCH}; the image's sides are 8 times as large)"
        )


def tensor_of(sample: list[Tensor], call: Call) -> Tensor:
    """The sample that the host's forward has returned, as one tensor in the shape of our output, (batch, channels,
    height, width), so that the two can be compared. sample: a list of (channels, 1, height, width). call: not used."""
    return torch.stack(sample).squeeze(2)


def sample_of(output: Tensor) -> list[Tensor]:
    """Our output, (batch, channels, height, width), in the form of the host's sample: a list of (channels, 1, height,
    width)."""
    return list(output.unsqueeze(2).unbind(0))
