"""Compute a call: the whole UNet, or the half of it that the call names."""
from __future__ import annotations

from torch import Tensor

from ..ops import Operators
from .call import UNetCall
from .deepcache import full, shallow
from .forward import Conditioning, forward
from .layout import UNetLayout
from .weights import Weights


def deepest(layout: UNetLayout) -> int:
    """The largest depth that leaves something to skip."""
    return len(layout.input_stages) - 1


def compute(
    layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, conditioning: Conditioning
) -> Tensor:
    """The UNet's output, (batch, out channels, height, width) in the latent's dtype: see forward.forward.

    A full half also writes the call's deep feature, a shallow one reads it. Raises ValueError for a depth that this
    UNet does not have.
    """
    half = call.half
    if half is None:
        return forward(layout, weights, ops, call, conditioning)
    if half.is_shallow:
        return shallow(layout, weights, ops, call, conditioning, half.depth, half.feature.read())
    output, deep = full(layout, weights, ops, call, conditioning, half.depth)
    half.feature.write(deep)
    return output
