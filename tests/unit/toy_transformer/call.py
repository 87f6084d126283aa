"""The arguments of one call of a toy transformer."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lib_onediff.core.call import Call


@dataclass(frozen=True)
class ToyTransformerCall(Call):
    """context: (batch, tokens, width) of the prompt. mask: (batch, tokens), True where a token belongs to the prompt;
    None if all do."""

    context: Tensor
    mask: Tensor | None = None

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return (self.context,) if self.mask is None else (self.context, self.mask)
