"""What one call of a Krea 2 network is."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...core.call import Call
from ...core.fields import ANY_DTYPE

# To which multiple a host's prompts are filled up that has them as long as they are.
MULTIPLE = 64


@dataclass(frozen=True)
class Krea2Call(Call):
    """The inputs of one call. latent: (batch, channels, height, width), or with one image more, (batch, channels, 1,
    height, width).

    context: (batch, tokens, text layers * text width), what several layers of the text encoder give for each token of
    the prompt. mask: (batch, tokens), in bool, True where a token belongs to the prompt; None if all do. positions: (1,
    tokens of prompt and image, 3), by which queries and keys are rotated; None if the prompt's are zero and the image's
    are its rows and columns of patches.
    """

    context: Tensor
    mask: Tensor | None = field(default=None, metadata=ANY_DTYPE)
    positions: Tensor | None = field(default=None, metadata=ANY_DTYPE)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return (self.context,) if self.mask is None else (self.context, self.mask)


def filled_prompt(context: Tensor) -> tuple[Tensor, Tensor]:
    """The context of prompts of one length, filled up to a multiple of MULTIPLE tokens, and its mask: prompts of most
    lengths make calls of one shape."""
    batch, length, _ = context.shape
    tokens = length + -length % MULTIPLE
    mask = torch.arange(tokens, dtype=torch.int64, device=context.device) < length
    return functional.pad(context, (0, 0, 0, tokens - length)), mask.expand(batch, -1).contiguous()
