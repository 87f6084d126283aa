"""The inputs of one call of an Anima network."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...core.call import Call


@dataclass(frozen=True)
class AnimaCall(Call):
    """A call of an Anima network. timestep and the other common fields are Call's.

    latent: (batch, channels, 1, height, width). If a host passes masks, they are further channels, after the image's.
    context: (batch, tokens, width), the prompt's embedding.
    """

    context: Tensor

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The tensors by which the prompts of two calls differ: the context alone."""
        return (self.context,)
