"""One CUDA graph per shape: the launches of a whole UNet are recorded once and replayed as one.

All graphs of a device share one memory pool, so their intermediates lie over each other; this is safe because one
replay ends before the next begins and outputs are copied out. A graph holds addresses, not tensors: whoever replays
it must know that weights and conditioning still lie where they were.
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import Operators
from ..unet.call import Control, UNetCall
from ..unet.forward import Conditioning, forward
from ..unet.weights import Binding

WARM_UP_RUNS = 2


class CudaGraphs:
    """Makes graphs on one shared memory pool per device."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}

    def prepare(self, binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning) -> GraphRunner:
        """Capture the forward for calls of this shape, on a stream of its own.

        Raises RuntimeError where an operation cannot be captured and torch.cuda.OutOfMemoryError.
        """
        device = call.latent.device
        pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
        with torch.cuda.device(device):
            return capture(binding, ops, call, conditioning, pool)

    def forget_pools(self) -> None:
        """Start new pools from now on; an old one is freed with its last graph."""
        self._pools.clear()


@dataclass
class GraphRunner:
    graph: torch.cuda.CUDAGraph
    inputs: UNetCall
    output: Tensor
    conditioning: Conditioning

    def run(self, call: UNetCall) -> Tensor:
        copy_inputs(call, self.inputs)
        self.graph.replay()
        return self.output.clone()


def capture(binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning, pool: Any) -> GraphRunner:
    inputs = own_inputs(call)
    weights = binding.weights()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first runs allocate workspaces and choose algorithms, which a capture must not do.
        for _ in range(WARM_UP_RUNS):
            forward(binding.layout, weights, ops, inputs, conditioning)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads of the WebUI (previews, the API) may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = forward(binding.layout, weights, ops, inputs, conditioning)
    return GraphRunner(graph, inputs, output, conditioning)


def own_inputs(call: UNetCall) -> UNetCall:
    """The call with inputs that belong to the graph. The context is not among them: the conditioning stands for it."""
    copy = lambda tensor: None if tensor is None else tensor.detach().clone()  # noqa: E731
    control = call.control and Control(*(tuple(map(copy, getattr(call.control, part.name))) for part in fields(Control)))
    return replace(
        call, latent=copy(call.latent), timestep=copy(call.timestep),
        timestep_condition=copy(call.timestep_condition), control=control, context=call.context.new_empty(0), y=None,
    )


def copy_inputs(source: UNetCall, target: UNetCall) -> None:
    pairs = [(source.latent, target.latent), (source.timestep, target.timestep)]
    pairs.append((source.timestep_condition, target.timestep_condition))
    for part in fields(Control):
        if source.control is not None:
            pairs += zip(getattr(source.control, part.name), getattr(target.control, part.name), strict=True)
    for given, own in pairs:
        if own is not None:
            own.copy_(given)
