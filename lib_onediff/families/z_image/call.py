"""The inputs of one call of a Z-Image network."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.call import Call
from ...core.fields import ANY_DTYPE


@dataclass(frozen=True)
class ZImageCall(Call):
    """A call of a Z-Image or Lumina 2 network. timestep and the other common fields are Call's.

    latent: (batch, channels, height, width).
    context: (batch, tokens, width), the prompts' embeddings, each padded to a multiple of ZImageLayout.multiple tokens.
        The network replaces this padding by a learned token, to which attentions do attend.
    lengths: int64 (batch,), the number of tokens of each prompt before it is padded to that multiple.
    is_ragged: whether some prompts, padded to that multiple, are shorter than the longest. Attentions do not attend to
        the tokens after a prompt's own padding.
    image_share: float32 (batch,), 1 - timestep, if the host passes this number and not the timestep: the timestep,
        computed from it, is rounded, so 1 - timestep would be rounded twice. None if the host passes the timestep.
    """

    context: Tensor
    lengths: Tensor = field(metadata=ANY_DTYPE)
    is_ragged: bool = False
    image_share: Tensor | None = field(default=None, metadata=ANY_DTYPE)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The tensors by which the prompts of two calls differ: the context, and the lengths."""
        return self.context, self.lengths


def joined_prompts(prompts: Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor, bool]:
    """The context, lengths and is_ragged of a ZImageCall for these prompts. The context is a new tensor, in which the
    prompts are padded with zeros to the longest one's length, raised to a multiple of `multiple`.

    prompts: one tensor (tokens, width) for each row of the batch, at least one. multiple: see ZImageLayout.
    """
    lengths = [len(prompt) for prompt in prompts]
    filled = [length + -length % multiple for length in lengths]
    longest = max(filled)
    context = prompts[0].new_zeros((len(prompts), longest, prompts[0].shape[1]))
    for row, prompt in zip(context, prompts, strict=True):
        row[:len(prompt)] = prompt
    device = context.device
    if len(set(lengths)) == 1:
        return context, torch.full((len(lengths),), lengths[0], dtype=torch.int64, device=device), False
    return context, torch.tensor(lengths, dtype=torch.int64, device=device), len(set(filled)) > 1
