"""A UNet, a call and OneFlow's graph for it."""
from __future__ import annotations

from typing import Any

from builders import relative_error
from torch import Tensor

from lib_onediff.engines.oneflow.graphs import OneFlowGraphs, OneFlowRunner
from lib_onediff.model.bound import BoundUNet
from lib_onediff.model.call import UNetCall
from lib_onediff.ops.precision import Precision, oneflow_variables
from lib_onediff.shapes.key import ShapeKey

# What float32 explains: seen 1e-6.
ROUNDING = 1e-5
# One for all tests, as for a process: a graph that was compiled is not compiled again.
GRAPHS = OneFlowGraphs(most=1000)


class Ours:
    """A UNet as OneFlow runs it."""

    def __init__(self, unet: Any, graphs: OneFlowGraphs = GRAPHS) -> None:
        self.bound = BoundUNet(unet)
        self.graphs = graphs

    def runner(self, call: UNetCall, waits_for_compile: bool = True) -> OneFlowRunner | str:
        self.bound.refresh(call)
        key = ShapeKey.of(self.bound.architecture, self.bound.binding.dtype, call)
        variables = oneflow_variables(Precision())
        return self.graphs.runner(
            key, self.bound.binding, call, variables, waits_for_compile=waits_for_compile
        )

    def output(self, call: UNetCall) -> Tensor:
        return self.runner(call).run(call)


def agree(output: Tensor, expected: Tensor) -> bool:
    return relative_error(output, expected) < ROUNDING
