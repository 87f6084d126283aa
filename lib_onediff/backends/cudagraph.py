"""One CUDA graph per shape: the launches of a whole UNet are recorded once and replayed as one.

All graphs of a device share one memory pool, so their intermediates lie over each other; this is safe because one
replay ends before the next begins and outputs are copied out. A graph holds addresses, not tensors: whoever replays
it must know that weights and conditioning still lie where they were.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import Operators
from ..unet.call import Control, UNetCall
from ..unet.forward import Conditioning, forward
from ..unet.weights import Binding

WARM_UP_RUNS = 2
MEBIBYTE = 2**20
SHARE_OF_THE_CARD = 4


class OverBudget(RuntimeError):
    """A graph needs more memory than all graphs may hold; the message is the reason, in one line for the user."""


class CudaGraphs:
    """Makes graphs on one shared memory pool and one capture stream per device.

    One stream, because cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever run on.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(self, binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning) -> GraphRunner:
        """Capture the forward for calls of this shape, on a stream of its own.

        Raises RuntimeError where an operation cannot be captured and torch.cuda.OutOfMemoryError.
        """
        device = call.latent.device
        with torch.cuda.device(device):
            if device not in self._pools:
                self._pools[device] = torch.cuda.graph_pool_handle()
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()
            before = self.bytes(device)
            runner = capture(binding, ops, call, conditioning, self._pools[device], self._streams[device])
            runner.bytes = self.bytes(device) - before
            return runner

    def bytes(self, device: torch.device) -> int:
        """How much memory the pool of a device holds."""
        pool = self._pools.get(device)
        if pool is None:
            return 0
        return sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        )

    def prepare_within(
        self, budget: int, make_room: Callable[[], None], binding: Binding, ops: Operators, call: UNetCall,
        conditioning: Conditioning,
    ) -> GraphRunner:
        """As prepare, with no more than budget MiB in all graphs of the device together; 0: a quarter of the card.

        make_room: drops every other graph, since the pool that they share gives no memory back before. Raises
        OverBudget if the graph does not fit alone.
        """
        device = call.latent.device
        allowed = budget * MEBIBYTE or torch.cuda.get_device_properties(device).total_memory // SHARE_OF_THE_CARD
        for _ in range(2):
            runner = self.prepare(binding, ops, call, conditioning)
            held = self.bytes(device)
            if held <= allowed:
                return runner
            del runner
            make_room()
        raise OverBudget(
            f"its graph needs {held // MEBIBYTE} MiB, and the setting 'Graph memory in MiB' allows "
            f"{allowed // MEBIBYTE}"
        )

    def forget_pools(self) -> None:
        """Start new pools from now on; an old one is freed with its last graph."""
        self._pools.clear()


@dataclass
class GraphRunner:
    graph: torch.cuda.CUDAGraph
    inputs: UNetCall
    output: Tensor
    conditioning: Conditioning
    bytes: int = 0

    def run(self, call: UNetCall) -> Tensor:
        copy_inputs(call, self.inputs)
        self.graph.replay()
        return self.output.clone()


def capture(
    binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning, pool: Any, stream: torch.cuda.Stream
) -> GraphRunner:
    inputs = own_inputs(call)
    weights = binding.weights()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first runs allocate workspaces and choose algorithms, which a capture must not do.
        for _ in range(WARM_UP_RUNS):
            forward(binding.layout, weights, ops, inputs, conditioning)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads of the WebUI (previews, the API) may use the GPU meanwhile.
    with random_numbers_survive(call.latent.device), torch.cuda.graph(
        graph, pool=pool, stream=stream, capture_error_mode="thread_local"
    ):
        output = forward(binding.layout, weights, ops, inputs, conditioning)
    return GraphRunner(graph, inputs, output, conditioning)


@contextlib.contextmanager
def random_numbers_survive(device: torch.device) -> Iterator[None]:
    """Give the device's random generator a sound state back if a capture inside fails.

    A failed capture leaves the generator believing that it is still being captured, and every later torch.randn on
    the GPU raises. torch 2.3 has no way to put that right.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state() if hasattr(generator, "clone_state") else None
    try:
        yield
    except BaseException:
        if spare is not None:
            generator.graphsafe_set_state(spare.graphsafe_get_state())
        raise


def own_inputs(call: UNetCall) -> UNetCall:
    """The call with inputs that belong to the graph. The context is not among them: the conditioning stands for it.

    The timestep becomes a float, whole or not, so that samplers of either kind share a graph.
    """
    copy = lambda tensor: None if tensor is None else tensor.detach().clone()  # noqa: E731
    parts = (getattr(call.control, part.name) for part in fields(Control)) if call.control else ()
    control = Control(*(tuple(map(copy, part)) for part in parts)) if call.control else None
    return replace(
        call, latent=copy(call.latent), timestep=copy(call.timestep).float(),
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
