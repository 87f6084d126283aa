"""What every backend offers."""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..ops import Operators
from ..unet.call import UNetCall
from ..unet.forward import Conditioning
from ..unet.weights import Binding


class Runner(Protocol):
    """A forward made ready for one shape, one set of weight addresses and one held conditioning."""

    def run(self, call: UNetCall) -> Tensor:
        """The UNet's output as a new tensor. The conditioning is read from where it was when this was made."""


class Backend(Protocol):
    def prepare(self, binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning) -> Runner:
        """A runner for calls of this shape. Raises RuntimeError (or its CUDA subclasses) where it cannot be made."""
