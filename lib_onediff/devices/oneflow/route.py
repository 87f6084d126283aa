"""How calls come to OneFlow: one lazy graph (nn.Graph) a shape, over the host's own weights.

OneFlow compiles for seconds, and a process that has compiled does not get that memory back. Like a CUDA graph it holds
addresses of weights, not tensors, and serves as long as they lie where they lay. OneFlow itself is imported by the
first graph, not by this module.
"""
from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ...core.call import Call
from ...core.device import Device, Traits
from ...core.family import Output
from ...core.fields import mapped, tensors_of
from ...core.inputs import cloned_inputs
from ...core.key import ShapeKey
from ...core.layer_weights import LayerWeights, Weights
from ...core.operators import Operators
from ...core.precision import HALF, ROUNDING_HALF_SUMS
from ...core.refusal import Refusal
from ...core.settings import Settings
from ..torch import operators as torch_ops
from .gate import OneFlowGate, brief

log = logging.getLogger("onediff")

# Batch, channels, height, width.
IMAGE_DIMENSIONS = 4
# Each keeps its intermediates and its plan for as long as the process lives.
MOST_GRAPHS = 8
TOO_MANY = (
    "OneFlow has compiled {} graphs, the most that OneDiff lets it, because it does not give their memory back: "
    "restart the WebUI to use it for others"
)
FAILED = "OneFlow failed to compile ({}), and a second try could end the WebUI: restart it to use OneFlow"
COMPILING = "OneFlow is compiling for this shape, in the background"
COMPILING_ANOTHER = "OneFlow is compiling for another shape, in the background, and runs nothing meanwhile"
STRIDED = "OneFlow needs weights in their usual order, and {} is channels-last"
# What OneFlow reads.
ONEFLOW_MATMUL = "ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION"
ONEFLOW_CONVOLUTION = "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION"


@dataclass
class OneFlowRunner:
    """A graph for the calls of one shape. variables: the environment that OneFlow is to see, see oneflow_variables.
    running: held while OneFlow runs."""

    graph: Any
    variables: Mapping[str, str]
    running: threading.Lock

    def run(self, call: Call) -> Tensor:
        from .operators import run_graph

        with self.running:
            os.environ.update(self.variables)
            return run_graph(self.graph, contiguous(call))[0]


class OneFlow(Device):
    """One for the process. Whoever calls holds the runtime's lock.

    failure: what the compiler said when it failed; after that nothing is compiled any more.
    """

    name = "oneflow"
    traits = Traits(serves_ungraphed=False)

    def __init__(self, output: Output, most: int = MOST_GRAPHS) -> None:
        """output: computes a call; see Families.output."""
        self.most, self.failure = most, ""
        self._output = output
        self._gate = OneFlowGate()
        self._variables: Mapping[str, str] = {}
        # By shape and addresses of weights. None: OneFlow failed.
        self._graphs: dict[Hashable, Future[Any | None]] = {}
        # Of its graphs; None before the first.
        self._card: torch.device | None = None
        self._worker = ThreadPoolExecutor(1, "onediff-oneflow")
        # OneFlow ends the process where one thread runs a graph while another compiles one.
        self._running = threading.Lock()

    @property
    def count(self) -> int:
        """How many graphs there are, those in the making included."""
        return sum(not graph.done() or graph.result() is not None for graph in self._graphs.values())

    def is_wanted(self, settings: Settings) -> bool:
        """It compiles for seconds and keeps that memory: only on request."""
        return settings.backend == self.name

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Calls by these settings follow."""
        lack = self._gate.why_not(device, dtype, is_warm_up)
        if lack is not None:
            raise Refusal(lack)
        self._variables = oneflow_variables(settings)

    def refuse_call(self, call: Call, weight_marks: Sequence[str]) -> None:
        if weight_marks:
            # Its graphs hold the addresses of the stored weights.
            raise Refusal(f"the backend {self.name} does not compute with {' and '.join(weight_marks)}")
        if self._card not in (None, call.latent.device):
            raise Refusal(f"OneFlow computes on one device, and has begun on {self._card}")
        if call.patches is not None:
            raise Refusal("OneFlow runs no functions of other extensions")
        if call.cut is not None:
            raise Refusal("OneFlow computes only whole UNets, no cached passes")
        if call.additions:
            raise Refusal(f"OneFlow does not compute {', '.join(call.additions)}")
        if call.latent.dim() != IMAGE_DIMENSIONS:
            raise Refusal("OneFlow computes only UNets")

    def allowed_error(self, dtype: torch.dtype) -> float:
        """A graph checked once also serves with sums in half precision, which OneFlow is told of at each run."""
        return ROUNDING_HALF_SUMS if dtype == torch.float16 else 0.0

    def operators(self, wide_norms: bool = False) -> Operators:
        """A graph has its own; what is launched beside it is PyTorch's."""
        return torch_ops

    def runner(self, network: Any, key: ShapeKey, call: Call, is_warm_up: bool) -> OneFlowRunner:
        """What runs a call. Raises Refusal where OneFlow does not: COMPILING as long as its graph is made in another
        thread, seconds where the shape or the address of a weight is new. is_warm_up: wait for it."""
        binding = network.bound.binding
        weights = binding.weights()
        # Graphs do not know what is summed in half precision.
        identity = replace(key, precision=()), addresses(weights)
        if identity not in self._graphs:
            self._refuse_another(weights)
            self._card = call.latent.device
            build = forward_of(self._output, binding.layout, call)
            self._graphs[identity] = self._worker.submit(self._compile, build, present(weights), contiguous(call))
        making = self._graphs[identity]
        if not (is_warm_up or making.done()):
            raise Refusal(COMPILING)
        if not (is_warm_up or all(graph.done() for graph in self._graphs.values())):
            raise Refusal(COMPILING_ANOTHER)
        graph = making.result()
        if graph is None:
            raise Refusal(FAILED.format(self.failure))
        return OneFlowRunner(graph, self._variables, self._running)

    def _refuse_another(self, weights: Weights) -> None:
        """Raise Refusal where no further graph is compiled."""
        if self.failure:
            raise Refusal(FAILED.format(self.failure))
        if self.count >= self.most:
            raise Refusal(TOO_MANY.format(self.count))
        # A graph would read its numbers in the wrong order, without an error.
        strided = next((path for path, layer in weights.items() if not layer.weight.is_contiguous()), None)
        if strided is not None:
            raise Refusal(STRIDED.format(strided))

    def _compile(self, build: Callable[..., Any], weights: Weights, given: list[Tensor]) -> Any | None:
        """In the worker's thread. weights: alive until this ends, because the first run reads them."""
        if self.failure:
            return None
        try:
            from .operators import graph_of, run_graph

            # The first run compiles.
            with self._running:
                graph = graph_of(build, weights)
                run_graph(graph, given)
            return graph
        except Exception as error:
            self.failure = brief(str(error))
            log.debug("OneFlow failed to compile", exc_info=error)
            return None


def oneflow_variables(settings: Settings) -> dict[str, str]:
    """The environment variables by which OneFlow is told what to sum in half precision; read at each launch."""
    return dict.fromkeys((ONEFLOW_MATMUL, ONEFLOW_CONVOLUTION), str(int(settings.accumulation == HALF)))


def forward_of(output: Output, layout: Any, call: Call) -> Callable[..., Any]:
    """The forward for calls like this one, as a function of OneFlow's tensors: the weights, then what contiguous gives.
    """
    # The graph stays, and none of this call's tensors with it.
    nothing: Any = torch.empty(0, dtype=torch.float32, device="cpu")
    like = mapped(call, lambda tensor: nothing)

    def build(weights: Weights, *given: Any) -> tuple[Any]:
        from .operators import OneFlowOperators

        rest, own = iter(given), cast("Operators", OneFlowOperators())
        return (output(layout, weights, own, mapped(like, lambda _: next(rest))),)

    return build


def contiguous(call: Call) -> list[Tensor]:
    """What a graph takes."""
    return tensors_of(cloned_inputs(call, torch.contiguous_format))


def present(weights: Weights) -> Weights:
    """The weights as tensors that keep their memory alive, also where a host gives its parameters other memory."""
    return {
        path: LayerWeights(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        for path, layer in weights.items()
    }


def addresses(weights: Weights) -> tuple[int, ...]:
    return tuple(part.data_ptr() for layer in weights.values() for part in layer[:2] if part is not None)
