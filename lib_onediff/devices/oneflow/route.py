"""The OneFlow backend: one lazy graph (nn.Graph) for each shape, over the host's own weights.

OneFlow compiles a graph for seconds, and never frees its memory. Like a CUDA graph, it contains addresses of weights,
and is valid until they move. OneFlow itself is imported with the first graph, not by this module.
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
from ...core.family import Layout, Output
from ...core.fields import mapped, tensors_of
from ...core.inputs import cloned_inputs
from ...core.key import ShapeKey
from ...core.layer_weights import LayerWeights, Weights
from ...core.leaves import AdaptiveNorm, NormedHeads, RMSNorm, SigmoidGate
from ...core.operators import Operators
from ...core.precision import HALF, ROUNDING_HALF_SUMS
from ...core.refusal import Refusal
from ...core.settings import Settings
from ..torch import operators as torch_ops
from .gate import OneFlowGate, brief

log = logging.getLogger("onediff")

# Layers that OneFlowOperators cannot compute.
NO_OPERATOR = (RMSNorm, AdaptiveNorm, NormedHeads, SigmoidGate)
# The largest number of graphs: a graph's memory is kept until the process ends.
MOST_GRAPHS = 8
# Reasons of Refusals. TOO_MANY: with the number of graphs; FAILED: with the compiler's message; STRIDED: with the path
# of a layer.
TOO_MANY = (
    "OneFlow has compiled {} graphs, which is OneDiff's limit, because their memory is never freed: restart the WebUI "
    "to use OneFlow at other sizes"
)
FAILED = "OneFlow failed to compile ({}), and a second try could crash the WebUI: restart it to use OneFlow"
COMPILING = "OneFlow is compiling for this size in the background"
COMPILING_ANOTHER = "OneFlow is compiling for another size in the background, and can run nothing until it is done"
NOT_A_UNET = (
    "OneFlow supports only models with a UNet, such as SD 1.5 and SDXL: for this model, set 'Backend' to auto"
)
STRIDED = "OneFlow cannot use {}, whose weights the WebUI keeps in channels-last memory order"
# Environment variables that OneFlow reads.
ONEFLOW_MATMUL = "ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION"
ONEFLOW_CONVOLUTION = "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION"


@dataclass
class OneFlowRunner:
    """A graph for the calls of one shape, as the runtime replays it.

    graph: the compiled graph of OneFlow.
    variables: environment variables that are set before each run; see oneflow_variables.
    running: the lock of the OneFlow object, which is held while OneFlow runs or compiles.
    """

    graph: Any
    variables: Mapping[str, str]
    running: threading.Lock

    def run(self, call: Call) -> Tensor:
        """The output for a call of the graph's shape, as a new tensor. Waits until OneFlow has computed it, and before
        that while OneFlow compiles in another thread. Sets environment variables of this process."""
        from .operators import run_graph

        with self.running:
            os.environ.update(self.variables)
            return run_graph(self.graph, contiguous(call))[0]


class OneFlow(Device):
    """The OneFlow backend; one object for the process. Callers hold the runtime's lock (Services.lock).

    output: computes a call; see Families.output.
    most: the largest number of graphs, because their memory is never freed.
    failure: the compiler's message after it has failed; "" before. After a failure, nothing is compiled any more.
    """

    name = "oneflow"
    traits = Traits(serves_ungraphed=False)

    def __init__(self, output: Output, most: int = MOST_GRAPHS) -> None:
        self.most = most
        self.failure = ""
        self._output = output
        self._gate = OneFlowGate()
        self._variables: Mapping[str, str] = {}
        # By shape and addresses of weights. None: OneFlow failed.
        self._graphs: dict[Hashable, Future[Any | None]] = {}
        # The device of all graphs; None before the first.
        self._card: torch.device | None = None
        self._worker = ThreadPoolExecutor(1, "onediff-oneflow")
        # OneFlow crashes the process if one thread runs a graph while another compiles one.
        self._running = threading.Lock()

    @property
    def count(self) -> int:
        """The number of graphs that are compiled or being compiled; failed ones do not count. Waits for nothing."""
        return sum(not graph.done() or graph.result() is not None for graph in self._graphs.values())

    def is_wanted(self, settings: Settings) -> bool:
        """Whether the user has chosen this backend in the settings. It is not chosen automatically, because compiling
        takes seconds, and the memory of a compiled graph is never freed."""
        return settings.backend == self.name

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal, with the reason, if OneFlow does not work on this device with this dtype, or if the test of
        that has not ended yet. is_warm_up: wait for the test. If OneFlow works, the environment variables that these
        settings need are kept for the runners that are made next."""
        lack = self._gate.why_not(device, dtype, is_warm_up)
        if lack is not None:
            raise Refusal(lack)
        self._variables = oneflow_variables(settings)

    def refuse_call(self, call: Call, weight_marks: Sequence[str], layout: Layout) -> None:
        """Raise Refusal, with the reason, if OneFlow cannot compute this call. It serves whole UNets with plain
        weights, on the device of its first graph. weight_marks, layout: see Device.refuse_call."""
        if weight_marks:
            # Its graphs contain the addresses of the stored weights, and read these as they are.
            raise Refusal(f"the backend {self.name} does not support {' and '.join(weight_marks)}")
        if self._card not in (None, call.latent.device):
            raise Refusal(f"OneFlow uses one device only, and is in use on {self._card}")
        if call.patches is not None:
            raise Refusal("OneFlow does not support extensions that run functions inside the model")
        if call.cut is not None:
            raise Refusal("OneFlow does not support DeepCache")
        if call.additions:
            raise Refusal(f"OneFlow does not support {', '.join(call.additions)}")
        # One failed graph would switch OneFlow off for all networks (failure), so none is tried for a transformer.
        if any(isinstance(layer, NO_OPERATOR) for layer in layout.kernel_users):
            raise Refusal(NOT_A_UNET)

    def allowed_error(self, dtype: torch.dtype) -> float:
        """The relative error up to which OneFlow's output counts as correct: that of float16 sums for float16,
        otherwise 0.0 (no more than rounding explains). For float16 it applies even if the settings allow no such sums,
        because the same graph also serves calls with such sums: an environment variable switches them at each run."""
        return ROUNDING_HALF_SUMS if dtype == torch.float16 else 0.0

    def operators(self, wide_norms: bool = False) -> Operators:
        """PyTorch's operators, for work outside of graphs. Graphs use OneFlow's."""
        return torch_ops

    def runner(self, network: Any, key: ShapeKey, call: Call, is_warm_up: bool) -> OneFlowRunner:
        """A runner with the graph for a call. A new shape, or a moved weight, needs a new graph: the first call starts
        to compile it in another thread, which takes seconds.

        Raises Refusal while any graph is being compiled, even if this call's graph is ready, because OneFlow runs
        nothing meanwhile. With is_warm_up, waits for this call's graph instead. Raises Refusal also if this call's
        graph has failed, or if it would be a new one that may not be compiled (_refuse_another).

        network: the call's runtime.network.Network. key: the call's shape and settings.
        """
        binding = network.bound.binding
        weights = binding.weights()
        # Without the switches for precision, which environment variables set at each run.
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
        """Raise Refusal, with the reason, if no further graph may be compiled: after a failure, at the limit `most`, or
        for weights that are not contiguous."""
        if self.failure:
            raise Refusal(FAILED.format(self.failure))
        if self.count >= self.most:
            raise Refusal(TOO_MANY.format(self.count))
        # A graph would read such a weight in the wrong order, without an error.
        strided = next((path for path, layer in weights.items() if not layer.weight.is_contiguous()), None)
        if strided is not None:
            raise Refusal(STRIDED.format(strided))

    def _compile(self, build: Callable[..., Any], weights: Weights, given: list[Tensor]) -> Any | None:
        """The compiled graph; None if compiling fails, or if an earlier graph has failed: then `failure` has the
        reason. Raises nothing. Runs in the worker's thread, for seconds.

        build: see operators.graph_of. weights: keeps them alive for the first run, which compiles the graph and reads
        them. given: the inputs of that run.
        """
        if self.failure:
            return None
        try:
            from .operators import graph_of, run_graph

            # The first run compiles the graph.
            with self._running:
                graph = graph_of(build, weights)
                run_graph(graph, given)
            return graph
        except Exception as error:
            self.failure = brief(str(error))
            log.debug("OneFlow failed to compile", exc_info=error)
            return None


def oneflow_variables(settings: Settings) -> dict[str, str]:
    """The environment variables that switch OneFlow's float16 sums on or off, as Settings.accumulation asks. OneFlow
    reads them at each launch."""
    return dict.fromkeys((ONEFLOW_MATMUL, ONEFLOW_CONVOLUTION), str(int(settings.accumulation == HALF)))


def forward_of(output: Output, layout: Any, call: Call) -> Callable[..., Any]:
    """The forward of calls like this one, as a function for operators.graph_of: forward(weights, *tensors), where the
    tensors are those of contiguous(call), as separate arguments. Weights and tensors are OneFlow's. It returns a tuple
    with the output."""
    # The call's structure without its tensors, so that the graph does not keep them alive.
    nothing: Any = torch.empty(0, dtype=torch.float32, device="cpu")
    like = mapped(call, lambda tensor: nothing)

    def build(weights: Weights, *given: Any) -> tuple[Any]:
        from .operators import OneFlowOperators

        rest = iter(given)
        ops = cast("Operators", OneFlowOperators())
        return (output(layout, weights, ops, mapped(like, lambda _: next(rest))),)

    return build


def contiguous(call: Call) -> list[Tensor]:
    """Contiguous copies of a call's tensors, in a fixed order: the inputs of a graph."""
    return tensors_of(cloned_inputs(call, torch.contiguous_format))


def present(weights: Weights) -> Weights:
    """The weights and biases of these layers as new tensors over the same memory, which keep that memory alive even if
    the host moves its parameters elsewhere. Nothing is copied."""
    return {
        path: LayerWeights(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        for path, layer in weights.items()
    }


def addresses(weights: Weights) -> tuple[int, ...]:
    """The addresses of all weights and biases, in the order of the mapping. A graph is valid while they are the same.
    """
    return tuple(part.data_ptr() for layer in weights.values() for part in layer[:2] if part is not None)
