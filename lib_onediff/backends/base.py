"""What a prepared backend offers."""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..unet.call import UNetCall


class Runner(Protocol):
    """A forward made ready for one shape, one set of weight addresses and one held conditioning.

    bytes: how much GPU memory it added.
    """

    bytes: int

    def run(self, call: UNetCall) -> Tensor:
        """The UNet's output as a new tensor. The conditioning is read from where it was when this was made."""
