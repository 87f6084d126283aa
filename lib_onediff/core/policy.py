"""The protocol of step policies: how much of a network a sampling step computes, for any network and device."""
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

# Computes a call with the host's own forward, and returns the output.
Host = Callable[[], Tensor]
# Returns which rows of a call belong to the prompt, not to the negative prompt. Raises Refusal if that is unknown.
# Called only if a policy needs it.
Guidance = Callable[[], PromptRows]
# The reason, for users, why a policy is inactive after an exception of its code.
FAILED = "it failed in this image (a fault of OneDiff: please report it with the console's log)"


class Served(NamedTuple):
    """A call that OneDiff has computed.

    output: of the latent's shape; the number of channels may differ. entry: the entry of the call's shape. epoch: the
        network's epoch at the call.
    route: GRAPH or PLAIN of core.image. reason: why the call did not take a faster route, for users; "" if no route is
        faster.
    call: the call as it was computed.
    rewind: restores the random states, and the state of other extensions' functions, to what they were before the call,
        so that a capture may call these functions again; None without such functions, or if no graph is to be captured.
    """

    output: Tensor
    entry: Entry
    epoch: Epoch
    route: str
    reason: str
    call: Call
    rewind: Callable[[], None] | None = None


class Answer(NamedTuple):
    """The output of a call, and how it was made.

    output: of the latent's shape; the number of channels may differ.
    served: how OneDiff computed it; None if the host did, or if it was extrapolated.
    host_times: the stopwatch of the host's own forward for calls of this shape; None if there is none.
    """

    output: Tensor
    served: Served | None = None
    host_times: Stopwatch | None = None


class Compute(Protocol):
    """Computes calls for a policy. It is the next policy that is on; for the last one, the runtime itself."""

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The output of a call: of the policy's own call (StepContext.call), or of a changed one, such as with a cut.

        host: the host's own forward of this call, with which the first output of a shape is compared. None if the host
            cannot compute the call; then only a shape that was checked before is served.
        Raises Refusal if OneDiff does not serve the call, torch.cuda.OutOfMemoryError, and any exception of the host.
        """

    def check(self, call: Call, served: Served) -> None:
        """Check a shape that the host cannot compute, such as a cached pass: compute `call` once, and compare its
        output with the output of a full pass with the same inputs (`served`). Policies call this right after the full
        pass. If the outputs agree, calls of the shape can be computed with host=None.

        Raises Refusal if the outputs differ by more than rounding explains; check() then raises it for each later call
        of the shape, too.
        """


class StepMemory:
    """What a policy remembers of a network's calls within one sampling run. Each policy has a class derived from this.

    keeps_tensors: whether it has tensors on the GPU; the runtime then drops the memory when the host moves the network
        off the GPU during the run.
    is_broken: whether the policy's code has failed; the policy is then inactive for the rest of this run.
    sampling_run: the Position.sampling_run to which the memory belongs, set by StepContext.memory_of.
    """

    keeps_tensors = False
    is_broken = False
    sampling_run: object = None


Memory = TypeVar("Memory", bound=StepMemory)


@dataclass(frozen=True)
class StepContext:
    """Everything that a policy needs to decide about one call. Several fields are functions, because their answers take
    time and only some policies need them.

    host: computes the call with the host's own forward. settings, sampling: valid for the call.
    guidance: see Guidance; None if the host never knows which rows are the prompt's.
    call_stats: the runtime.call_stats.CallStats that counts the image's steps.
    memories: each policy's memory for this network, by the policy's name. The runtime drops them at the end of the
        sampling, or when GPU memory is short.
    position: returns the call's position in its sampling, or raises Refusal; see Sampling.position. May be called any
        number of times.
    deepest: returns the largest depth at which this network can be cut; 0 if it cannot be cut.
    schedule: returns Family.schedule of the network's family.
    cut_memory: given a hashable that identifies a shape, returns the memory of the shape's cut: the same object as long
        as there is a reference to it.
    values: looks for edits of the weights now, and returns the version of their values (Epoch.values).
    ordered: returns a context manager within which only this thread launches work on the call's device, and may write
        memory that calls share (Services.computing).
    is_warm_up: whether the call only makes a shape ready, and belongs to no image.
    is_counted: False for a part of a call, such as one GPU's rows, whose caller counts the call.
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
        """The memory of the policy of this name for this network and the call's sampling run. If there is none (the
        first call of a run, or the runtime has dropped the memory), make() returns a new one, which replaces that of an
        earlier run. Raises Refusal if the call's position is unknown (see position), or the policy has failed in this
        run (StepMemory.is_broken)."""
        memory: Any = self.memories.get(name)
        sampling_run = self.position().sampling_run
        if memory is None or memory.sampling_run != sampling_run:
            memory = self.memories[name] = make()
            memory.sampling_run = sampling_run
        if memory.is_broken:
            raise Refusal(FAILED)
        return memory


class StepPolicy(Protocol):
    """A way to compute less than the whole network at some steps. The object has what users see of the policy; what it
    remembers of a network is in StepContext.memories.

    name: the key of the policy's part of the runtime's status, and of its memory. title: the policy's name for users.
    status: plain values by name: counts, and under "reason" why the last call was computed as without the policy, or
        "".
    whole_batch: whether the policy decides for a call's whole batch. False: it decides for each GPU's rows separately,
        so that what it remembers of these rows is on their GPU.
    """

    name: str
    title: str
    status: dict[str, Any]
    whole_batch: bool

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings turn this policy on."""

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """Decide about a call. Returns a function that answers the call: given the next Compute, which it may call, it
        returns the Answer. The function raises what the Compute raises.

        Raises Refusal if the call is to be computed as without this policy; the caller shows its reason in the status.
        With the reason "", the policy counts as off for this call, and nothing is shown.
        """
