"""What one call of an Anima network is."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...core.call import Call


@dataclass(frozen=True)
class AnimaCall(Call):
    """The inputs of one call. latent: (batch, channels, 1, height, width). context: (batch, tokens, width), the prompt
    as the network gets it."""

    context: Tensor

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return (self.context,)
