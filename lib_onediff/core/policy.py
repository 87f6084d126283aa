"""The protocol of step policies: what of a network a sampling step computes, whichever network and device it is."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .call import Call, CutMemory, PromptRows
from .epoch import Epoch
from .refusal import Refusal
from .sampling import Position, Sampling
from .settings import Settings
from .table import Entry, Stopwatch

# The host's own forward of a call.
Host = Callable[[], Tensor]
# Which rows of a call are the prompt's. Raises Refusal where nobody knows. Asked only where it matters.
Guidance = Callable[[], PromptRows]
FAILED = "a fault of OneDiff"


class Served(NamedTuple):
    """A call that we have computed.

    output: (batch, channels, height, width). entry: of its shape. epoch: of the network. route: by
    a graph or not, see call_stats. reason: why it did not go by a faster route. call: as it was computed. rewind: lets
    functions of other extensions draw the same random numbers again.
    """

    output: Tensor
    entry: Entry
    epoch: Epoch
    route: str
    reason: str
    call: Call
    rewind: Callable[[], None] | None = None


class Answer(NamedTuple):
    """The output of a call, (batch, channels, height, width). served: how we have computed it; None where the host has,
    or nobody. host_times: the times of the host's own forward of such a call; None where they are not known."""

    output: Tensor
    served: Served | None = None
    host_times: Stopwatch | None = None


class Compute(Protocol):
    """What a policy has calls computed by: the next policy, or the runtime itself."""

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The output of a call, which need not be the one that the host has made. host: the host's own forward of the
        same, with which a first use is compared. With None, only what was checked before serves.

        Raises Refusal where OneDiff does not serve the call, torch.cuda.OutOfMemoryError, and what the host raises.
        """

    def check(self, call: Call, served: Served) -> None:
        """Prove a call that no forward of the host corresponds to, such as a cached pass: compute it once, and compare
        the output with that of the full pass, served. From then on calls of its shape are computed with host=None.

        Raises Refusal, now and at each later use, where the two differ by more than rounding.
        """


class StepMemory:
    """What a policy keeps of a network's calls within one run through a sampling.

    keeps_tensors: whether it is dropped when the host takes the network off the GPU before the run is over. is_broken:
    whether the policy has failed, and is inactive for the rest of this run. sampling_run: the Position.sampling_run
    that it belongs to, set by StepContext.memory_of.
    """

    keeps_tensors = False
    is_broken = False
    sampling_run: object = None


Memory = TypeVar("Memory", bound=StepMemory)


@dataclass(frozen=True)
class StepContext:
    """Everything that a policy may ask about one call and its sampling.

    host: the host's own forward of the call. settings, sampling: that hold for it. guidance: says which of its rows are
    the prompt's; None where nobody can. call_stats: the runtime.call_stats.CallStats that counts the steps of the
    image. memories: what each policy keeps for this network, by its name; the runtime drops it with the sampling, and
    where the memory is needed. position: see Sampling.position. deepest: the largest depth at which this network can be
    cut in two, 0 where it cannot. schedule: of its family; see Family.schedule. cut_memory: the memory of a cut for a
    shape, the same as long as anybody holds it. values: looks for edits of the weights now, and returns the version of
    their values (Epoch.values). ordered: makes a context manager inside of which this thread alone launches work on the
    call's device, and may write memory that calls share (Services.computing). is_warm_up: the call makes a shape ready,
    and belongs to no image. is_counted: False for a part of a call that is counted as a whole.
    """

    call: Call
    host: Host
    settings: Settings
    sampling: Sampling
    guidance: Guidance | None
    call_stats: Any
    memories: dict[str, StepMemory]
    position: Callable[[], Position]
    deepest: Callable[[], int]
    schedule: Callable[[], str]
    cut_memory: Callable[[Hashable], CutMemory]
    values: Callable[[], int]
    ordered: Callable[[], contextlib.AbstractContextManager[object]]
    is_warm_up: bool = False
    is_counted: bool = True

    def memory_of(self, name: str, make: Callable[[], Memory]) -> Memory:
        """A policy's memory for this network, made anew at every new run of a sampling. Raises Refusal if the policy
        failed in this run."""
        memory: Any = self.memories.get(name)
        sampling_run = self.position().sampling_run
        if memory is None or memory.sampling_run != sampling_run:
            memory = self.memories[name] = make()
            memory.sampling_run = sampling_run
        if memory.is_broken:
            raise Refusal(FAILED)
        return memory


class StepPolicy(Protocol):
    """One way to compute less than the whole network at some steps. It holds counts and words for the user, and
    nothing of any network: that is in StepContext.memories.

    name: of its part of the status. title: for people. status: what it did, in plain values: counts, and as "reason"
    why the last call was computed as without it; "" where it was not, or it is off. whole_batch: whether it decides for
    a call's whole batch. False: it decides for each GPU's part of a batch by itself, so that its memory is on that GPU.
    """

    name: str
    title: str
    status: dict[str, Any]
    whole_batch: bool

    def is_on(self, settings: Settings) -> bool:
        """Whether the user wants it."""

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """A function that answers this one call, with the next Compute as its argument. It raises what compute raises.

        Raises Refusal with the reason if the call is to be computed as without this policy; the caller puts it into the
        status.
        """
