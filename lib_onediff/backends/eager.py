"""Plain launches: no preparation, any device."""
from __future__ import annotations

from torch import Tensor

from ..ops import Operators
from ..unet.call import UNetCall
from ..unet.compute import compute
from ..unet.forward import Conditioning
from ..unet.weights import Binding


def run(binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning) -> Tensor:
    """The UNet's output; see compute.compute."""
    return compute(binding.layout, binding.weights(), ops, call, conditioning)
