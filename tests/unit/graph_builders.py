"""CUDA graphs without a GPU: only the capture is simulated. A replay computes the forward again from the graph's static
inputs. A graph takes memory in proportion to its pixels. Fragmentation is not simulated."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from builders import compute
from tape import TapeRecording
from torch import Tensor

from lib_onediff.core.device_memory import Card
from lib_onediff.core.inputs import bytes_of, copy_inputs
from lib_onediff.core.layer_weights import Weights
from lib_onediff.core.operators import Operators
from lib_onediff.devices.cuda.graphs.capture import CudaGraphs
from lib_onediff.devices.cuda.graphs.segments import GraphRunner, record
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.graphs.accounting import needs_of
from lib_onediff.weights.binding import Binding

MEBIBYTE = 2**20
PAGE = 2 * MEBIBYTE
# The tests' networks count as if they were large: 64 MiB for two latents of 8x8.
BYTES_OF_A_PIXEL = MEBIBYTE // 2


class PretendedPool:
    """A memory pool. Its size is the peak of its largest graph plus the bytes that each graph keeps, in pages."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_fresh = True
        self.bytes = PAGE
        self._most = self._left = 0

    def hold(self, most: int, left: int) -> None:
        """Count a new graph. most: the peak bytes of its forward. left: the bytes that it keeps afterwards."""
        self._most = max(self._most, most)
        self._left = self._left + left
        self.bytes = max(self.bytes, -(-(self._most + self._left) // PAGE) * PAGE)


def most_in_use(latent: Tensor) -> int:
    """The peak bytes of a forward with this latent, or this output."""
    return latent.shape[0] * latent.shape[2] * latent.shape[3] * BYTES_OF_A_PIXEL


class PretendedGraph:
    """A Runner that computes the forward again at each replay."""

    def __init__(
        self, graphs: PretendedGraphs, compute: Callable[[], Tensor], inputs: UNetCall, memory: PretendedPool
    ) -> None:
        self.inputs = inputs
        self.memory = memory
        self.own_bytes = bytes_of(inputs)
        self._graphs = graphs
        self._compute = compute

    def run(self, call: UNetCall) -> Tensor:
        self._graphs.before_replay()
        copy_inputs(call, self.inputs)
        return self._compute()


class PretendedGraphs(CudaGraphs):
    """A GraphMaker without a GPU. before_replay, before_capture: called before each replay and capture; a test may set
    functions that raise. captured: the resolutions of the graphs, in the order of their captures. most: the largest
    size that all pools together have had, in bytes."""

    def __init__(self) -> None:
        super().__init__(compute)
        self.card = PretendedCard(self)
        self.before_replay: Callable[[], None] = lambda: None
        self.before_capture: Callable[[UNetCall], None] = lambda inputs: None
        self.captured: list[str] = []
        self.most = 0

    def prepare(
        self, architecture: str, binding: Binding, ops: Operators, inputs: UNetCall,
        needs: int = 0,
    ) -> Any:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        device = inputs.latent.device
        pool = self._pools.get((device, architecture))
        if pool is None:
            pool = self._pools[device, architecture] = PretendedPool(device)
            self._alive[pool] = None
        self.before_capture(inputs)
        runner: GraphRunner | None = None
        if inputs.patches is not None:
            weights = binding.weights()
            runner = record(TapeRecording(), inputs, pool, lambda call: compute(binding.layout, weights, ops, call))
        most = most_in_use(inputs.latent)
        pool.hold(max(needs if pool.is_fresh else 0, needs_of(most)), most // 1024)
        pool.is_fresh = False
        if self.card.used() > self.card.size:
            del self._pools[device, architecture]
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        height, width = inputs.latent.shape[-2:]
        self.captured.append(f"{width * 8}x{height * 8}")
        self.most = max(self.most, self.bytes(device))
        if runner is not None:
            return runner
        weights_now = self.weights_of(binding)
        again = lambda: compute(binding.layout, weights_now(), ops, inputs)  # noqa: E731
        return PretendedGraph(self, again, inputs, pool)

    def weights_of(self, binding: Binding) -> Callable[[], Weights]:
        """A function that returns the weights that a replay reads: here the layers' weights at the time of the
        replay."""
        return binding.weights

    def peak(self, device: torch.device, work: Callable[[], Any]) -> tuple[Any, int]:
        output = work()
        return output, most_in_use(output)


class PretendedCard(Card):
    """The memory of a GPU of `size` bytes, of which other programs use `others` bytes. torch's cache holds nothing.
    emptied: how often empty_cache() was called."""

    def __init__(self, graphs: PretendedGraphs, size: int = 1 << 40) -> None:
        self.size = size
        self.others = 0
        self.emptied = 0
        self._graphs = graphs

    def used(self) -> int:
        return self.others + sum(map(self._graphs.bytes, self._graphs.devices()))

    def total(self, device: torch.device | None = None) -> int:
        return self.size

    def free(self, device: torch.device) -> int:
        return self.size - self.used()

    def unused(self, device: torch.device) -> int:
        # As in torch, the graphs' memory is reserved and not allocated.
        return self._graphs.bytes(device)

    def reserved(self) -> int:
        return self.used()

    def empty_cache(self) -> None:
        self.emptied += 1
