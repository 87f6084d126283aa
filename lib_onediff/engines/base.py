"""What a prepared backend offers."""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..model.call import UNetCall
from ..model.deepcache.forward import compute
from ..model.forward import Conditioning
from ..model.operators import Operators
from ..model.weights import Binding


class Memory(Protocol):
    """What the runners of one architecture share. It goes when nobody holds it any more.

    bytes: how much GPU memory it is.
    """

    device: torch.device
    bytes: int


class Runner(Protocol):
    """A forward made ready for one shape, one set of weight addresses and one held conditioning.

    inputs: its own, into which each call's are copied. own_bytes: the GPU memory that it has for itself alone. seconds:
    how long it took to make.
    """

    inputs: UNetCall
    memory: Memory
    own_bytes: int
    seconds: float

    def run(self, call: UNetCall) -> Tensor:
        """The UNet's output as a new tensor. The conditioning is read from where it was when this was made."""


def run(binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning | None) -> Tensor:
    """The UNet's output; see model.deepcache.forward.compute."""
    return compute(binding.layout, binding.weights(), ops, call, conditioning)
