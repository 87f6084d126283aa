"""Converts a call of diffusers' CosmosTransformer3DModel to ours."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.refusal import Refusal, unsupported_inputs
from ...families.anima.call import AnimaCall


def cosmos_call(
    network: Any, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor,
    condition_mask: Tensor | None = None, padding_mask: Any = None, **others: Any,
) -> AnimaCall:
    """Our Call for these arguments of CosmosTransformer3DModel.forward. The latent of the Call has the masks as
    additional channels, as the host's forward concatenates them.

    network: the host's; its config tells the patch size, and whether the network takes a padding mask.
    hidden_states: the latent, (batch, channels, frames, height, width).
    timestep: (1,) or (batch,); (batch,) in the Call.
    encoder_hidden_states: the prompt, (batch, tokens, width).
    condition_mask: (batch, 1, frames, height, width); None adds no channel.
    padding_mask: (1, 1, height, width) in any resolution; resized to the latent. Ignored, as by the host, if the
        network takes none.
    others: refused unless None.

    Raises Refusal for arguments that our forward does not compute. For a missing padding mask or masks of wrong shapes
    it raises other exceptions, as the host does.
    """
    passed = [name for name, value in others.items() if value is not None]
    if passed:
        raise Refusal(f"the diffusers pipeline passes {', '.join(passed)}, which OneDiff does not support")
    if isinstance(encoder_hidden_states, (tuple, list)):
        raise unsupported_inputs("the prompt's embedding has several parts")
    if not all(isinstance(one, Tensor) for one in (hidden_states, timestep, encoder_hidden_states)):
        raise unsupported_inputs("the latent, the timestep or the prompt is not a tensor")
    batch, _, frames, *size = hidden_states.shape
    if timestep.dim() != 1:
        raise unsupported_inputs(f"the timestep (shape {tuple(timestep.shape)}) is not one number for each image")
    patch = network.config.patch_size[-1]
    most = max(network.rope.max_size)
    if any(side % patch or side > patch * most for side in size):
        raise Refusal(
            f"the latent's height and width ({size[0]} and {size[1]}; the image's are 8 times as large) must be "
            f"multiples of {patch}, up to {most * patch}"
        )
    parts = [hidden_states] if condition_mask is None else [hidden_states, condition_mask]
    if network.config.concat_padding_mask:
        parts.append(functional.interpolate(padding_mask, size).unsqueeze(2).repeat(batch, 1, frames, 1, 1))
    return AnimaCall(torch.cat(parts, dim=1), timestep.expand(batch), encoder_hidden_states)
