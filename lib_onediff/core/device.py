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
from .family import AttentionShapes, Layout
from .key import Lossy
from .layer_weights import Source
from .operators import Operators
from .settings import Settings

Result = TypeVar("Result")
# reader(spans, part) prepares checksums of spans of GPU memory, of which it reads every part-th piece. It returns a
# function that launches the reading and returns int64 (spans,) on the GPU, or None if it cannot read these spans. See
# weights.contents.ContentsReader.
ContentsReader = Callable[[Sequence[Any], int], Callable[[], Tensor] | None]
# Runs work() repeatedly and returns its duration in milliseconds. A backend compares kernel configurations with it.
TimeMs = Callable[[Callable[[], object]], float]


class Memory(Protocol):
    """GPU memory that the runners of one architecture (Layout.architecture) on one torch.device share, such as the pool
    of their CUDA graphs. It is freed with the last reference to this object. bytes: its size now."""

    device: torch.device
    bytes: int


class Runner(Protocol):
    """A forward made ready for one shape with weights at fixed addresses, such as a captured CUDA graph.

    inputs: static tensors, into which run() copies the inputs of each call.
    output: the static tensor that the graph writes.
    own_bytes: bytes of GPU memory of this runner alone, besides `memory`.
    """

    inputs: Call
    output: Tensor
    own_bytes: int

    @property
    def memory(self) -> Memory:
        """The memory shared with other runners. Each backend has a class of its own for it."""

    def run(self, call: Call) -> Tensor:
        """The network's output for a call of this shape, as a new tensor. Launches the work, and does not wait for the
        GPU. Raises core.points.DoesNotFit if the functions of other extensions in this call are at other points than at
        the capture, or return another shape."""


class GraphMaker(Protocol):
    """Captures CUDA graphs, in one memory pool for each architecture and torch.device, and measures memory and time.
    Tests without a GPU replace it."""

    def prepare(self, architecture: str, source: Source, ops: Operators, inputs: Call, needs: int = 0) -> Runner:
        """A runner for calls of one shape: the forward of `source`, captured as a CUDA graph.

        A call of this shape must have been computed without a graph before, in the same thread. inputs: a call of this
        shape, whose tensors the runner keeps as its static inputs, so they must be copies (cloned_inputs). needs: an
        estimate of the bytes that the graph takes of the shared memory, which may be allocated at once; 0 if unknown.
        Raises RuntimeError if the forward cannot be captured, and torch.cuda.OutOfMemoryError.
        """

    def bytes(self, device: torch.device, architecture: str | None = None) -> int:
        """Bytes of the shared memory on a device: of one architecture, or with None of all. 0 if there is none."""

    def devices(self) -> set[torch.device]:
        """The devices on which graphs have shared memory."""

    def in_one_piece(self, device: torch.device) -> bool:
        """Whether the shared memory of an architecture can be allocated as one block. Otherwise more of it is lost in
        gaps, so a graph is estimated to take more."""

    def peak(self, device: torch.device, work: Callable[[], Result]) -> tuple[Result, int]:
        """Run work(). Returns (its result, the largest number of bytes that it had allocated at one time). A graph of
        the same work will take that much memory. 0 bytes on a CPU."""

    def time_ms(self, device: torch.device, dtype: torch.dtype, work: Callable[[], object]) -> float:
        """The duration of work() in milliseconds, captured as a CUDA graph and replayed, so that launches cost nothing.
        dtype: of its matrix products, whose workspaces are allocated before the capture. Raises RuntimeError if work()
        cannot be captured."""


class CachedRunner(NamedTuple):
    """A runner, and the Epoch.addresses that it was made at."""

    addresses: int
    runner: Runner


class KernelUse(NamedTuple):
    """Everything that decides which kernels a network needs.

    architecture, users: Layout.architecture and Layout.kernel_users of the network.
    dtype, device: what it computes in, and where.
    low_bit: the 8-bit products in use, in words of Settings.low_bit; "" for none.
    stored: a (dtype, QuantizedWeight.rotation) pair for each format of eight bits in which the host stores layers.
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

    has_graphs: whether CUDA graphs can capture its launches.
    serves_ungraphed: whether it can also run a forward without a graph, operator by operator.
    launches_patched: whether it can run a forward without a graph also for calls with functions of other extensions
        (Call.patches).
    channels_last: whether it needs the weights of convolutions in channels-last memory format.
    takes_lossy: whether it can compute the 8-bit products of core.key.Lossy.
    """

    has_graphs: bool = False
    serves_ungraphed: bool = True
    launches_patched: bool = True
    channels_last: bool = False
    takes_lossy: bool = False


class Device(abc.ABC):
    """A backend. Subclasses override the methods below. Their defaults suit a backend that serves everything, and has
    nothing to load, measure or keep.

    name: the backend's name, for users and in a shape's key.
    """

    name: str
    traits = Traits()

    def is_wanted(self, settings: Settings) -> bool:
        """Whether the settings ask for this backend. False: it is skipped without a reason for the user."""
        return True

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal, with the reason for the user, if this machine or the settings rule the backend out.

        device, dtype: those of the network. is_warm_up: True if the call belongs to no image. False: a user waits for
        the call, and the backend refuses instead of running a test that takes seconds.
        """

    def refuse_call(self, call: Call, weight_marks: Sequence[str], layout: Layout) -> None:
        """Raise Refusal, with the reason for the user, if the backend cannot compute this call.

        weight_marks: words for how the host computes with its weights (runtime.network.Network.weight_marks). layout:
        of the network. This is called before each call that no plan answers, so it must not take long.
        """

    def allowed_error(self, dtype: torch.dtype) -> float:
        """The largest relative error against the host's forward at which an output still counts as correct, for a
        backend of lower precision. 0: only the error that rounding explains is allowed. dtype: the network's."""
        return 0.0

    @abc.abstractmethod
    def operators(self, wide_norms: bool = False) -> Operators:
        """The backend's implementation of the operators. wide_norms: whether norms must be computed in float32, because
        the host does so."""

    def prepare(self, use: KernelUse, time_ms: TimeMs | None = None) -> None:
        """Load the kernels that a network needs, and wait until they are loaded. Called before each call that has no
        plan, so it must return at once when they are loaded already.

        time_ms: if given, also find out by measuring which configuration of each kernel is the fastest, which takes
        seconds; None: use the known ones. Raises Refusal if loading fails, and torch.cuda.OutOfMemoryError.
        """

    def tune(self, use: KernelUse, attentions: Sequence[AttentionShapes], call: Call, time_ms: TimeMs) -> bool:
        """Find out by measuring which kernels are the fastest for a call, unless it is known already. They are used
        from then on. attentions: the shapes of the call's attentions (Family.attentions). Returns whether anything was
        measured."""
        return False

    def runner(self, network: Any, key: Any, call: Call, is_warm_up: bool) -> Any:
        """A Runner that the backend makes and keeps itself, such as a graph of its own compiler. None (the default): it
        makes none, and the runtime launches or captures its operators instead.

        network: a runtime.network.Network. key: the call's ShapeKey. is_warm_up: see refuse. Raises Refusal if the
        backend makes runners, but has none for this call now.
        """

    def contents_reader(self, device: torch.device) -> ContentsReader | None:
        """The backend's function that reads checksums of many spans of memory in one launch, by which the runtime
        notices edits of weights. None if the backend has none for this device: torch's operators are then used."""
        return None

    def forget_measurements(self) -> None:
        """Forget all measured choices in memory, when the user purges the cache. Nothing is measured here: later
        warm-ups do so."""


class Candidates(NamedTuple):
    """The backends to try for a call, the fastest first.

    reason: why a faster one, or the one chosen in the settings, is not among them, for the user; "" if none is missing.
    lossy: the 8-bit variants of the first backend, in the order in which they are tried: before all of `devices`.
    """

    devices: tuple[Device, ...]
    reason: str
    lossy: tuple[Lossy, ...] = ()
