"""One lazy graph of OneFlow (nn.Graph) per shape, over the host's own weights.

OneFlow compiles for seconds, and a process that has compiled does not get that memory back, so a graph outlives
prompts: what depends on the prompt is among its inputs. Like a CUDA graph it holds addresses of weights, not tensors,
and serves as long as they lie where they lay. OneFlow itself is imported by the first graph, not by this module.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...model.binding import Binding
from ...model.call import UNetCall
from ...model.cuts import cached_pass, full_pass
from ...model.forward import forward
from ...model.layout import UNetLayout
from ...model.weights import Affine, Weights
from ...ops.precision import environment
from ..graphs.inputs import bytes_of, copy_inputs, mapped, own_inputs
from .gate import brief

log = logging.getLogger("onediff")

# Each keeps its intermediates and its plan for as long as the process lives.
MOST_GRAPHS = 8
TOO_MANY = (
    "OneFlow has compiled {} graphs, the most that OneDiff lets it, because it does not give their memory back: "
    "restart the WebUI to use it for others"
)
FAILED = "OneFlow failed to compile ({}), and a second try could end the WebUI: restart it to use OneFlow"
COMPILING = "OneFlow is compiling for this shape, in the background"
STRIDED = "OneFlow reads weights in their usual order alone, and {} lies channels-last"

# The forward as a function of OneFlow's tensors: the weights, then what tensors_of names.
Forward = Callable[..., Any]


@dataclass
class OutsideMemory:
    """engines.managed_unet.Memory. What OneFlow holds is not torch's, and nobody can ask how much it is."""

    device: torch.device
    bytes: int = 0


class Compiled(NamedTuple):
    """A graph of OneFlow, and how long it took to make."""

    graph: Any
    seconds: float


class OneFlowGraphs:
    """Every graph that this process has compiled, by what it was compiled for. Not to be used before oneflow_gate has
    found nothing in the way.

    failure: what the compiler said when it failed; after that nothing is compiled any more.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self.failure = ""
        self.most = most
        self._compiled: dict[Hashable, Compiled] = {}
        self._pending: dict[Hashable, Future[None]] = {}
        self._worker = ThreadPoolExecutor(1, "onediff-oneflow")
        self._lock = threading.Lock()
        # OneFlow ends the process where one thread runs a graph while another compiles one.
        self._running = threading.Lock()

    @property
    def is_compiling(self) -> bool:
        """Whether a graph is being made, for which every run of another would wait."""
        return bool(self._pending)

    def __len__(self) -> int:
        """How many graphs there are, and are being made."""
        return len({*self._compiled, *self._pending})

    def runner(
        self, key: Hashable, binding: Binding, call: UNetCall,
        variables: Mapping[str, str] | None = None, fused_attention: bool = False, waits_for_compile: bool = False,
    ) -> OneFlowRunner | str:
        """A runner for calls of this shape, or why there is none, in one line for the user:
        COMPILING as long as its graph is made in another thread, seconds where the shape or the address of a weight is
        new.

        key: what decides which graph a call needs, weights aside: shapes.key.ShapeKey without its precision.
        variables: the environment that OneFlow is to see at every run; see precision.oneflow_variables.
        fused_attention: see operators.OneFlowOperators. waits_for_compile: wait for the graph.
        """
        weights = present(binding.weights())
        identity = key, addresses(weights)
        inputs = own_inputs(call, torch.contiguous_format)
        given = tensors_of(inputs)
        with self._lock:
            if identity not in self._compiled and identity not in self._pending:
                refusal = self._why_no_other(weights)
                if refusal is not None:
                    return refusal
                forward = forward_of(binding.layout, inputs, fused_attention)
                self._pending[identity] = self._worker.submit(self._compile, identity, forward, weights, given)
            pending = self._pending.get(identity)
        if pending is not None:
            if not waits_for_compile:
                return COMPILING
            pending.result()
        compiled = self._compiled.get(identity)
        if compiled is None:
            return FAILED.format(self.failure)
        return OneFlowRunner(
            compiled.graph, inputs, OutsideMemory(inputs.latent.device), bytes_of(inputs),
            compiled.seconds, given, dict(variables or {}), self._running,
        )

    def _why_no_other(self, weights: Weights) -> str | None:
        """Why no further graph is compiled, or None."""
        if self.failure:
            return FAILED.format(self.failure)
        if len(self) >= self.most:
            return TOO_MANY.format(len(self))
        # A graph would read its numbers in the wrong order, without an error.
        strided = next((path for path, affine in weights.items() if not affine.weight.is_contiguous()), None)
        return None if strided is None else STRIDED.format(strided)

    def _compile(self, identity: Hashable, forward: Forward, weights: Weights, given: list[Tensor]) -> None:
        """In the worker's thread. weights: alive until this ends, because the first run reads them."""
        began = time.perf_counter()
        try:
            if not self.failure:
                # The first run compiles.
                with self._running:
                    graph = graph_of(forward, weights)
                    run_graph(graph, given)
                self._compiled[identity] = Compiled(graph, time.perf_counter() - began)
        except Exception as error:
            self.failure = brief(str(error))
            log.debug("OneFlow failed to compile", exc_info=error)
        finally:
            with self._lock:
                del self._pending[identity]


@dataclass
class OneFlowRunner:
    """engines.managed_unet.Runner by a graph of OneFlow. given: what the graph takes, see tensors_of. running: held
    while OneFlow runs or compiles anything."""

    graph: Any
    inputs: UNetCall
    memory: OutsideMemory
    own_bytes: int
    seconds: float
    given: list[Tensor]
    variables: Mapping[str, str]
    running: threading.Lock

    def run(self, call: UNetCall) -> Tensor:
        copy_inputs(call, self.inputs)
        with self.running, environment(self.variables):
            output, *deep = run_graph(self.graph, self.given)
        cut = self.inputs.cut
        if cut is not None and deep:
            cut.memory.write(deep[0])
        return output


def forward_of(layout: UNetLayout, inputs: UNetCall, fused_attention: bool) -> Forward:
    """The forward for inputs like these."""
    cut = inputs.cut

    def build(weights: Weights, *given: Any) -> tuple[Any, ...]:
        from .operators import OneFlowOperators

        ops, rest = OneFlowOperators(fused_attention), iter(given)
        call = mapped(inputs, lambda _: next(rest))
        if cut is None:
            return (forward(layout, weights, ops, call),)
        if cut.reads:
            return (cached_pass(layout, weights, ops, call, cut.depth, next(rest)),)
        return full_pass(layout, weights, ops, call, cut.depth)

    return build


def tensors_of(inputs: UNetCall) -> list[Tensor]:
    """What a graph takes: the inputs, and the deep feature where it is read."""
    tensors: list[Tensor] = []
    mapped(inputs, tensors.append)
    if inputs.cut is not None and inputs.cut.reads:
        tensors.append(inputs.cut.memory.read())
    return tensors


def present(weights: Weights) -> Weights:
    """The weights as tensors that keep their memory alive, also where a host gives its parameters other memory."""
    return {
        path: Affine(affine.weight.detach(), None if affine.bias is None else affine.bias.detach())
        for path, affine in weights.items()
    }


def addresses(weights: Weights) -> tuple[int, ...]:
    return tuple(part.data_ptr() for affine in weights.values() for part in affine[:2] if part is not None)


def graph_of(forward: Forward, weights: Weights) -> Any:
    """An nn.Graph of OneFlow over a forward and these weights; nothing is compiled yet."""
    import oneflow as flow
    from oneflow.utils.tensor import from_torch

    share: Callable[[Tensor | None], Any] = lambda part: None if part is None else from_torch(unowned(part))  # noqa: E731
    shared = {path: Affine(share(affine.weight), share(affine.bias)) for path, affine in weights.items()}

    # Here, because its base class comes with OneFlow.
    class UNetGraph(flow.nn.Graph):
        def build(self, *given: Any) -> Any:
            return forward(shared, *given)

    return UNetGraph()


def unowned(tensor: Tensor) -> Tensor:
    """A contiguous tensor's values as another one in the same memory, which it does not keep alive."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    # What torch says of the types of set_ leaves out that it makes the stride itself.
    empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape)


def run_graph(graph: Any, given: list[Tensor]) -> list[Tensor]:
    """What a graph makes of tensors, as new tensors in memory of OneFlow's: it copies them out of the graph itself."""
    from oneflow import _oneflow_internal
    from oneflow.utils.tensor import from_torch, to_torch

    if given[0].is_cuda:
        # OneFlow launches on streams of its own, which know nothing of torch's.
        torch.cuda.current_stream(given[0].device).synchronize()
    results = graph(*map(from_torch, given))
    # Its threads read the environment when they launch, so they must be done before that is put back.
    _oneflow_internal.eager.Sync()
    return [to_torch(result) for result in results]
