"""The protocol of backends. A backend implements the operators, and runs forwards made of them.

The class is called Device: it is a backend ("native", "eager", "oneflow"), not a GPU. The GPU or CPU that it computes
on is a torch.device, and so is every parameter named `device` in this file.
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
# Starts sums over the contents of many tensors in one launch: see weights.contents.ContentsReader.
ContentsReader = Callable[[Sequence[Any], int], Callable[[], Tensor] | None]
# The time of work() in milliseconds, with which a backend measures its kernels' configurations.
TimeMs = Callable[[Callable[[], object]], float]


class Memory(Protocol):
    """GPU memory that the runners of one architecture on one device share. It is freed with the last reference to this
    object. bytes: its size now."""

    device: torch.device
    bytes: int


class Runner(Protocol):
    """A forward made ready for one shape with weights at fixed addresses, such as a captured CUDA graph.

    inputs: static tensors, into which the inputs of each call are copied.
    output: the static tensor that run() writes.
    own_bytes: GPU memory of this runner alone.
    """

    inputs: Call
    output: Tensor
    own_bytes: int

    @property
    def memory(self) -> Memory:
        """The memory shared with other runners. Each backend has a class of its own for it."""

    def run(self, call: Call) -> Tensor:
        """The network's output as a new tensor. Raises core.points.DoesNotFit if the functions of other extensions in
        this call are at other points than at the capture."""


class GraphMaker(Protocol):
    """Captures CUDA graphs, in one memory pool for each architecture and torch.device, and measures that memory."""

    def prepare(self, architecture: str, source: Source, ops: Operators, inputs: Call, needs: int = 0) -> Runner:
        """A runner for calls of this shape. inputs: such a call; its tensors become the runner's static inputs. needs:
        bytes that the runner will take of the shared memory; 0 if unknown. Raises RuntimeError if the forward cannot be
        captured, and torch.cuda.OutOfMemoryError."""

    def bytes(self, device: torch.device, architecture: str | None = None) -> int:
        """Bytes of the shared memory on a device: of one architecture, or of all."""

    def devices(self) -> set[torch.device]:
        """The devices on which there is such memory."""

    def in_one_piece(self, device: torch.device) -> bool:
        """Whether an architecture's memory can be allocated as one contiguous piece."""

    def peak(self, device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
        """The result of work(), and the peak of the bytes that it allocated."""

    def time_ms(self, device: torch.device, dtype: torch.dtype, work: Callable[[], object]) -> float:
        """The time of work() as a graph, in milliseconds. dtype: of its matrix products. Raises RuntimeError if it
        cannot be captured."""


class CachedRunner(NamedTuple):
    """A runner, and the Epoch.addresses that it was made at."""

    addresses: int
    runner: Runner


class KernelUse(NamedTuple):
    """Everything that decides which kernels a network needs.

    users: Layout.kernel_users of the network, descriptions of layers with their sizes.
    low_bit: as Settings.low_bit; "" for none.
    stored: (dtype, QuantizedWeight.rotation) of the layers that the host stores in eight bits.
    """

    architecture: str
    users: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    low_bit: str = ""
    stored: frozenset[tuple[torch.dtype, int]] = frozenset()


@dataclass(frozen=True)
class Traits:
    """Properties of a backend that decide how the runtime uses it.

    has_graphs: CUDA graphs can capture its launches.
    serves_ungraphed: it can also run a forward without a graph, operator by operator.
    launches_patched: it can also do that for calls with functions of other extensions.
    channels_last: it needs the weights of convolutions in channels-last memory format.
    takes_lossy: it computes the 8-bit products of Lossy.
    """

    has_graphs: bool = False
    serves_ungraphed: bool = True
    launches_patched: bool = True
    channels_last: bool = False
    takes_lossy: bool = False


class Device(abc.ABC):
    """A backend. Subclasses override the defaults below.

    name: the backend's name, for users and in a shape's key.
    """

    name: str
    traits = Traits()

    def is_wanted(self, settings: Settings) -> bool:
        """Whether the settings ask for this backend. False: it is skipped without a reason for the user."""
        return True

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal, with the reason, if this machine or the settings rule the backend out.

        is_warm_up: the caller may wait; otherwise a test that takes seconds must be left for later.
        """

    def refuse_call(self, call: Call, weight_marks: Sequence[str]) -> None:
        """Raise Refusal, with the reason, if the backend cannot compute this call. weight_marks: see Network."""

    def allowed_error(self, dtype: torch.dtype) -> float:
        """The relative error against the host's forward up to which a backend of lower precision still counts as
        correct. 0: no more than rounding explains."""
        return 0.0

    @abc.abstractmethod
    def operators(self, wide_norms: bool = False) -> Operators:
        """The backend's implementation of the operators. wide_norms: the host computes norms in float32."""

    def prepare(self, use: KernelUse, time_ms: TimeMs | None = None) -> None:
        """Load the kernels that a network needs. time_ms: also measure the fastest configuration of each, which takes
        seconds.

        Raises Refusal if loading fails, and torch.cuda.OutOfMemoryError.
        """

    def tune(self, use: KernelUse, attentions: Sequence[AttentionShapes], call: Call, time_ms: TimeMs) -> bool:
        """Measure the fastest kernels for a call with these attentions, if they are unknown. Returns whether anything
        was measured."""
        return False

    def runner(self, network: Any, key: Any, call: Call, is_warm_up: bool) -> Any:
        """A runner that the backend makes and keeps itself, such as a compiled graph; None: the runtime launches or
        captures the backend's operators.

        network: a runtime.network.Network. key: the call's ShapeKey. is_warm_up: see refuse. Raises Refusal if the
        backend makes runners, and none for this call.
        """

    def contents_reader(self, device: torch.device) -> ContentsReader | None:
        """A function that sums the contents of many tensors in one launch; None: torch's operators are used."""
        return None

    def measure_anew(self) -> None:
        """Forget all measurements."""


class Candidates(NamedTuple):
    """The backends to try for a call, the fastest first.

    reason: why a faster one, or the one chosen in the settings, is not among them.
    lossy: 8-bit variants of the first backend, which are tried before all exact ones.
    """

    devices: tuple[Device, ...]
    reason: str
    lossy: tuple[Lossy, ...] = ()
