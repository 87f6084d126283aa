"""What one call of a Z-Image network is."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.call import Call
from ...core.fields import ANY_DTYPE


@dataclass(frozen=True)
class ZImageCall(Call):
    """The inputs of one call.

    context: (batch, tokens, width). lengths: (batch,), how many of each row's tokens are the prompt's: the network
    fills them up to a multiple of its layout's, with a token of its own. is_ragged: whether some rows have fewer tokens
    than others even then; what is beyond theirs is no part of them. image_share: (batch,), in float32, 1 - timestep,
    where that is what the host gives: rounding it twice would show. None elsewhere.
    """

    context: Tensor
    lengths: Tensor = field(metadata=ANY_DTYPE)
    is_ragged: bool = False
    image_share: Tensor | None = field(default=None, metadata=ANY_DTYPE)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return self.context, self.lengths


def joined_prompts(prompts: Sequence[Tensor], multiple: int) -> tuple[Tensor, Tensor, bool]:
    """Context, lengths and is_ragged of a call, of one prompt (tokens, width) for each row."""
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
