"""What a device is: one way to compute a network's operators, and how their result is run."""
from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .call import Call
from .family import AttentionShapes
from .key import Lossy
from .operators import Operators
from .settings import Settings

# Reads the contents of many tensors in one launch: see weights.contents.Reader.
Reader = Callable[[Sequence[Any], int], Callable[[], Tensor] | None]
# How long work takes in milliseconds, for a device that measures which of its ways is the fastest.
TimeMs = Callable[[Callable[[], object]], float]


class Memory(Protocol):
    """What the runners of one architecture share. It goes when nobody holds it any more.

    bytes: how much GPU memory it is.
    """

    device: torch.device
    bytes: int


class Runner(Protocol):
    """A forward made ready for one shape, and one set of weight addresses.

    inputs: its own, into which each call's are copied. own_bytes: the GPU memory that it has for itself alone.
    """

    inputs: Call
    own_bytes: int

    @property
    def memory(self) -> Memory:
        """What it shares with others: the device's own kind."""

    def run(self, call: Call) -> Tensor:
        """The UNet's output as a new tensor."""


class CachedRunner(NamedTuple):
    """A runner, and what it was made for: it serves as long as both are the same."""

    generation: int
    runner: Runner


class Network(NamedTuple):
    """What decides which kernels are needed. users: descriptions of its layout. low_bit: as settings.Settings.low_bit,
    "" for none."""

    architecture: str
    users: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    low_bit: str = ""


@dataclass(frozen=True)
class Traits:
    """What the rest has to know of a device.

    has_graphs: a CUDA graph can hold its launches. launches: it also serves where every operator is launched by itself;
    launches_patched: also between functions of other extensions. channels_last: it wants the weights of convolutions
    so. takes_lossy: it computes what Lossy names. casts_weights: it computes with weights that the host casts or
    changes at each use. on_request: it is tried only where the user names it. one_card: it computes on one GPU.
    decides_anew: at every call it is found out anew whether it serves. errors: by the type computed in, what it may
    differ from the host's forward, relative to the output's norm, where that is more than rounding.
    """

    has_graphs: bool = False
    launches: bool = True
    launches_patched: bool = True
    channels_last: bool = False
    takes_lossy: bool = False
    casts_weights: bool = True
    on_request: bool = False
    one_card: bool = False
    decides_anew: bool = False
    errors: Mapping[torch.dtype, float] = field(default_factory=dict)


class Device(abc.ABC):
    """A way to compute: what is said here holds where a device does not say otherwise.

    name: of the backend, as users choose it and as a shape's key holds it.
    """

    name: str
    traits = Traits()

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal with the reason where this machine lacks what it needs, or these settings rule it out.
        is_warm_up: whether the caller waits for what takes long to find out."""

    def refuse_call(self, call: Call) -> None:
        """Raise Refusal with the reason for inputs that it does not compute."""

    @abc.abstractmethod
    def operators(self, wide_norms: bool = False) -> Operators:
        """By which it computes. wide_norms: the host has norms in float32."""

    def prepare(self, network: Network, time_ms: TimeMs | None = None) -> None:
        """Have the kernels that a network needs loaded. time_ms: and measured by it, for seconds. Raises Refusal where
        that fails, and torch.cuda.OutOfMemoryError."""

    def tune(self, network: Network, attentions: Sequence[AttentionShapes], call: Call, time_ms: TimeMs) -> bool:
        """Measure what is the fastest for a call with these attentions, where that is not known. Returns whether it was
        measured."""
        return False

    def runner(self, managed: Any, key: Any, call: Call, is_warm_up: bool) -> Any:
        """A runner of its own for a call (managed_unet.Runner); None where it has none, and calls are launched or
        captured. Raises Refusal."""

    def contents_reader(self, device: torch.device) -> Reader | None:
        """Reads the contents of many tensors in one launch; None where torch's operators do it as well."""
        return None

    def measure_anew(self) -> None:
        """Trust nothing that was measured before."""


class Candidates(NamedTuple):
    """The devices to try, the best first, and why that is not the one that was wanted. lossy: what the first one
    computes less exactly, to be tried before all is exact."""

    devices: tuple[Device, ...]
    reason: str
    lossy: tuple[Lossy, ...] = ()
