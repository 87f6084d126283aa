"""The protocol of backends: one way to compute a network's operators, and to run a forward made of them.

A Device is a backend ("native", "eager", "oneflow"), not a GPU: the GPU or CPU that it computes on is a torch.device,
and is what parameters named `device` are in this file.
"""
from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .call import Call
from .family import AttentionShapes
from .key import Lossy
from .layer_weights import Source
from .operators import Operators
from .settings import Settings

Result = TypeVar("Result")
# Reads the contents of many tensors in one launch: see weights.contents.ContentsReader.
ContentsReader = Callable[[Sequence[Any], int], Callable[[], Tensor] | None]
# Returns the time of work in milliseconds, for a device that measures its fastest configurations.
TimeMs = Callable[[Callable[[], object]], float]


class Memory(Protocol):
    """GPU memory that the runners of one architecture share, of a size in bytes. It is freed with the last reference
    to it."""

    device: torch.device
    bytes: int


class Runner(Protocol):
    """A forward made ready for one shape, and one set of weight addresses.

    inputs: static tensors, into which the inputs of each call are copied. output: the static tensor that a run writes.
    own_bytes: the GPU memory that no other runner shares.
    """

    inputs: Call
    output: Tensor
    own_bytes: int

    @property
    def memory(self) -> Memory:
        """The memory that it shares with other runners; each device has its own class."""

    def run(self, call: Call) -> Tensor:
        """The network's output as a new tensor. Raises core.points.DoesNotFit where functions of other extensions stand
        at other points than when it was made."""


class GraphMaker(Protocol):
    """Captures graphs, on one memory for each architecture and torch device, and accounts for that memory."""

    def prepare(self, architecture: str, source: Source, ops: Operators, inputs: Call, needs: int = 0) -> Runner:
        """A runner for calls of this shape. inputs: such a call, whose tensors become the runner's static inputs.
        needs: bytes of the shared memory that the runner will take; 0 if unknown. Raises RuntimeError and
        torch.cuda.OutOfMemoryError."""

    def bytes(self, device: torch.device, architecture: str | None = None) -> int:
        """The memory of all graphs on a device, or of one architecture's."""

    def devices(self) -> set[torch.device]:
        """Devices with such memory."""

    def in_one_piece(self, device: torch.device) -> bool:
        """Whether the memory of an architecture can be allocated in one piece."""

    def peak(self, device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
        """The result of work(), and the most bytes that it had in use at a time, beside what was in use before."""

    def time_ms(self, device: torch.device, dtype: torch.dtype, work: Callable[[], object]) -> float:
        """The time of work in a graph. dtype: of its matrix products. Raises RuntimeError where it cannot be captured.
        """


class CachedRunner(NamedTuple):
    """A runner, and the addresses of weights that it was made for (Epoch.addresses)."""

    addresses: int
    runner: Runner


class KernelUse(NamedTuple):
    """What decides which kernels are needed. users: Layout.kernel_users of the network, the descriptions whose sizes
    decide. low_bit: as settings.Settings.low_bit, "" for none. stored: of the layers that the host stores in eight
    bits, each type with each QuantizedWeight.rotation."""

    architecture: str
    users: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    low_bit: str = ""
    stored: frozenset[tuple[torch.dtype, int]] = frozenset()


@dataclass(frozen=True)
class Traits:
    """Properties of a device that decide how the runtime uses it.

    has_graphs: CUDA graphs can capture its launches.
    serves_ungraphed: it can run a forward outside of a CUDA graph, each operator launched by itself.
    launches_patched: it does so between functions of other extensions, too.
    channels_last: it needs the weights of convolutions in the channels-last memory format.
    takes_lossy: it computes the 8-bit products that Lossy names.
    """

    has_graphs: bool = False
    serves_ungraphed: bool = True
    launches_patched: bool = True
    channels_last: bool = False
    takes_lossy: bool = False


class Device(abc.ABC):
    """A backend: one way to compute a network. It overrides the defaults below where it differs.

    name: the backend's name, as users choose it and as a shape's key holds it.
    """

    name: str
    traits = Traits()

    def is_wanted(self, settings: Settings) -> bool:
        """Whether these settings ask for this device. False: it is not tried, and nobody is told why."""
        return True

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal with the reason where this machine lacks what the device needs, or settings rule it out.

        is_warm_up: the caller accepts seconds of waiting, where finding out takes as long.
        """

    def refuse_call(self, call: Call, weight_marks: Sequence[str]) -> None:
        """Raise Refusal with the reason for a call that the device does not compute. weight_marks: see Network."""

    def allowed_error(self, dtype: torch.dtype) -> float:
        """The relative error against the host's forward that counts as correct, where it may exceed rounding."""
        return 0.0

    @abc.abstractmethod
    def operators(self, wide_norms: bool = False) -> Operators:
        """The device's implementation of the operators. wide_norms: the host computes norms in float32."""

    def prepare(self, use: KernelUse, time_ms: TimeMs | None = None) -> None:
        """Load the kernels that a network needs. time_ms: also measure the fastest configuration of each, for seconds.

        Raises Refusal where loading fails, and torch.cuda.OutOfMemoryError.
        """

    def tune(self, use: KernelUse, attentions: Sequence[AttentionShapes], call: Call, time_ms: TimeMs) -> bool:
        """Measure the fastest kernels for a call with these attentions, unless they are known. Returns whether anything
        was measured."""
        return False

    def runner(self, network: Any, key: Any, call: Call, is_warm_up: bool) -> Any:
        """A runner that the device makes and keeps by itself; None: the runtime launches or captures its operators.

        Raises Refusal where the device has runners, and none for this call. is_warm_up: see refuse.
        """

    def contents_reader(self, device: torch.device) -> ContentsReader | None:
        """A function that sums the contents of many tensors in one launch; None: torch's operators do."""
        return None

    def measure_anew(self) -> None:
        """Forget every measurement."""


class Candidates(NamedTuple):
    """The devices to try, the fastest first.

    reason: why a faster one, or the one that the settings name, is not among them. lossy: 8-bit variants of the first
    device, tried before all exact ones.
    """

    devices: tuple[Device, ...]
    reason: str
    lossy: tuple[Lossy, ...] = ()
