"""One CUDA graph per shape: the launches of a whole UNet are recorded once and replayed as one.

All graphs of a device share one memory pool, so their intermediates lie over each other; this is safe because one
replay ends before the next begins and outputs are copied out. A graph holds addresses, not tensors: whoever replays
it must know that weights and conditioning still lie where they were.
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import Operators
from ..unet.call import Control, UNetCall
from ..unet.forward import Conditioning, forward
from ..unet.weights import Binding

MEBIBYTE = 2**20
SHARE_OF_THE_CARD = 4


class OverBudget(RuntimeError):
    """A graph needs more memory than all graphs may hold; the message is the reason, in one line for the user."""


class Pool:
    """The memory that the graphs of one device share.

    It lives as long as this does, with or without graphs in it: what a graph leaves, the next one takes.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.bytes = 0
        # torch gives a pool up with its last graph, so there is one that stays.
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), no_garbage_collected():
            self._anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            self._anchored = torch.zeros(1, device=device)
            self._anchor.capture_end()


class CudaGraphs:
    """Makes graphs on one shared memory pool and one capture stream per device.

    One stream, because cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever run on.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, Pool] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(self, binding: Binding, ops: Operators, call: UNetCall, conditioning: Conditioning) -> GraphRunner:
        """Capture the forward for calls of this shape. One such call must have been made in this thread before, by the
        same operators: it compiled kernels and chose algorithms, which a capture must not do.

        Raises RuntimeError where an operation cannot be captured and torch.cuda.OutOfMemoryError.
        """
        device = call.latent.device
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()
                give_workspaces(self._streams[device], binding.dtype)
            if device not in self._pools:
                self._pools[device] = Pool(device, self._streams[device])
            pool = self._pools[device]
            before = torch.cuda.memory_reserved(device)
            try:
                runner = capture(binding, ops, call, conditioning, pool.handle, self._streams[device])
            except BaseException:
                # torch believes that this pool is still being recorded to, and would refuse every further capture.
                del self._pools[device]
                raise
            runner.bytes = max(0, torch.cuda.memory_reserved(device) - before)
            pool.bytes += runner.bytes
            return runner

    def bytes(self, device: torch.device) -> int:
        """How much memory the pool of a device holds."""
        pool = self._pools.get(device)
        return 0 if pool is None else pool.bytes

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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), random_numbers_survive(call.latent.device), no_garbage_collected():
        # Not torch.cuda.graph: it waits for the GPU and empties torch's cache, and the picture's step is still running.
        # thread_local: other threads of the WebUI (previews, the API) may use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = forward(binding.layout, weights, ops, inputs, conditioning)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return GraphRunner(graph, inputs, output, conditioning)


def give_workspaces(stream: torch.cuda.Stream, dtype: torch.dtype) -> None:
    """Let the matrix libraries allocate what they keep for a stream now, and not in the memory of the first graph."""
    with torch.cuda.stream(stream):
        square = torch.ones((64, 64), device=stream.device, dtype=dtype)
        torch.nn.functional.linear(square, square, square[0])
        torch.bmm(square[None], square[None])
    stream.synchronize()


@contextlib.contextmanager
def no_garbage_collected() -> Iterator[None]:
    """A graph or an event that is destroyed during a capture would spoil it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
