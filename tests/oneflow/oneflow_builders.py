"""A UNet that OneFlow computes, and a comparison of its outputs."""
from __future__ import annotations

from typing import Any

from builders import relative_error
from torch import Tensor

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.oneflow.route import OneFlow, OneFlowRunner
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.network import Network
from lib_onediff.weights.scan import HostTraits

# The relative error that rounding in float32 explains; 1e-6 was measured.
ROUNDING = 1e-5
# One for all tests, as in a process of a user: a graph that was compiled is not compiled again.
GRAPHS = OneFlow(FAMILIES.output, most=1000)


class Ours:
    """A UNet whose calls OneFlow computes."""

    def __init__(self, unet: Any, graphs: OneFlow = GRAPHS) -> None:
        self.network = Network(unet, None, HostTraits())
        self.bound = self.network.bound
        self.graphs = graphs

    def runner(self, call: UNetCall, is_warm_up: bool = True) -> OneFlowRunner | str:
        """The runner of the graph for this call, or the reason why there is none."""
        self.bound.refresh(call)
        key = ShapeKey.of(self.bound.layout.architecture, self.bound.binding.dtype, call)
        try:
            return self.graphs.runner(self.network, key, call, is_warm_up)
        except Refusal as refusal:
            return str(refusal)

    def output(self, call: UNetCall) -> Tensor:
        return self.runner(call).run(call)


def close(output: Tensor, expected: Tensor) -> bool:
    """Whether two outputs agree to within rounding."""
    return relative_error(output, expected) < ROUNDING
