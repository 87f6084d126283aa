"""The inputs of one call of a Krea 2 network."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...core.call import Call
from ...core.fields import ANY_DTYPE

# Prompts are padded to a multiple of this number of tokens: see filled_prompt.
MULTIPLE = 64


@dataclass(frozen=True)
class Krea2Call(Call):
    """A call of a Krea 2 network. timestep and the other common fields are Call's.

    latent: (batch, channels, height, width) or (batch, channels, 1, height, width).
    context: (batch, tokens, text layers * text width), the outputs of several layers of the text encoder for each token
        of the prompt, concatenated.
    mask: bool (batch, tokens), True where a token belongs to the prompt, False where it is padding; None if there is no
        padding.
    positions: (1, tokens, 3), the positions of the rotary embedding, of the prompt's tokens first, then of the image's.
        None: (0, 0, 0) for the prompt's tokens, and (0, row, column) for the image's patches.
    """

    context: Tensor
    mask: Tensor | None = field(default=None, metadata=ANY_DTYPE)
    positions: Tensor | None = field(default=None, metadata=ANY_DTYPE)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The tensors by which the prompts of two calls differ: the context, and the mask if there is one. See
        Call.prompt."""
        return (self.context,) if self.mask is None else (self.context, self.mask)


def filled_prompt(context: Tensor) -> tuple[Tensor, Tensor]:
    """The context and the mask of a Krea2Call for a prompt: the given context, with zeros appended up to a multiple of
    MULTIPLE tokens, and False in the mask for these zeros. Every length of context has to be checked and captured for
    itself; padded, most prompts have the same length.

    context: (batch, tokens, values), without padding. The mask is made also if nothing is appended.
    """
    batch, length, _ = context.shape
    tokens = length + -length % MULTIPLE
    mask = torch.arange(tokens, dtype=torch.int64, device=context.device) < length
    return functional.pad(context, (0, 0, 0, tokens - length)), mask.expand(batch, -1).contiguous()
