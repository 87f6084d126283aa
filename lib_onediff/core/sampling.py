"""A sampling (the steps from noise to latent), as a host announces it before its first call, and a call's position in
it."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import neg
from typing import NamedTuple

from torch import Tensor

from .refusal import Refusal

# With fewer steps, each one changes the whole image too much to skip a part of it.
FEWEST_STEPS = 10
FEW_STEPS = f"the sampling has fewer than {FEWEST_STEPS} steps (in img2img: steps times denoising strength)"
# Models and LoRAs that are distilled for few steps are published with 1 to 8 of them and a guidance scale of 0 to 2
# (LCM 1 to 2; Lightning, Turbo, Hyper-SD and DMD2 0 to 1). Users often run them with some more steps.
FEWEST_UNGUIDED_STEPS = 16
LITTLE_GUIDANCE = 2.0
FEW_STEP_MODEL = (
    f"the sampling has fewer than {FEWEST_UNGUIDED_STEPS} steps at a CFG scale of {LITTLE_GUIDANCE:g} or less, "
    "as few-step models have (LCM, Lightning, Turbo, Hyper, DMD2)"
)
# A timestep just above the one at which a step begins, by at most this part of the interval before that step, belongs
# to the step: the difference is taken for rounding.
NEAR = 0.05
# Reasons, for users, why step policies are inactive.
UNANNOUNCED = "the beginning and end of the sampling are unknown (in your own loop, use lib_onediff.sampling(unet))"
UNKNOWN_TIMES = (
    "the timesteps of the sampling are unknown (in your own loop, use lib_onediff.sampling(unet, timesteps=...))"
)
FOREIGN_TIMES = (
    "the current step is unknown, because an extension or the pipeline gives the model other timesteps than the "
    "sampler's"
)
UNEQUAL_TIMES = "the images of this batch are at different steps (by an extension or a script?)"
# The timesteps of the sampling of a warm-up: enough steps for every policy to be active.
WARM_UP_TIMES = range(1000, 0, -1)


@dataclass(frozen=True)
class Step:
    """A step of a sampling.

    index: from 0, for the first step that is computed (in img2img not the first of the schedule).
    total: the number of steps from the step with index 0 on.
    fraction: index / total, the part of the sampling that was done before this step.
    is_last: whether this is the last step.
    """

    index: int
    total: int
    fraction: float
    is_last: bool

    def why_too_few(self, guidance_scale: float | None) -> str:
        """Why this step's sampling has too few steps for a policy to skip work, in one line for the user; "" if it has
        enough. guidance_scale: the sampling's CFG scale; None if unknown."""
        if self.total >= FEWEST_UNGUIDED_STEPS:
            return ""
        if self.total < FEWEST_STEPS:
            return FEW_STEPS
        return FEW_STEP_MODEL if guidance_scale is not None and guidance_scale <= LITTLE_GUIDANCE else ""


class Timeline:
    """The timesteps at which the steps of a sampling begin. Timesteps fall from noise to image.

    A step is found by its timestep, not by counting calls: a host may call the UNet once for the prompt and once for
    the negative prompt, second-order samplers (Heun, DPM2, DPM++ SDE) call it twice a step, and some calls of an
    extension do not reach OneDiff. A timestep between two steps belongs to the earlier one, whose second call it is.
    """

    def __init__(self, times: Sequence[float]) -> None:
        """times: the timesteps, at least one, in any order. Equal ones are one step."""
        self._times = sorted({float(time) for time in times}, reverse=True)
        self._first: int | None = None
        self._last: int = -1

    def is_foreign(self, time: float) -> bool:
        """Whether the timestep of the first call has another unit than this timeline, so that steps cannot be found: a
        network may get fractions of noise, from 1 to 0, where the sampler counts from 1000 to 0. False after the first
        call of step(). time: the call's timestep. It is taken for foreign if it is below half of the smallest timestep
        of this timeline; so nothing is foreign if the smallest is 0.
        """
        return self._first is None and time < self._times[-1] / 2

    def step(self, time: float) -> tuple[Step, bool]:
        """The step to which a call with this timestep belongs, and whether it comes before the step of the last call (a
        jump back to noise, as in samplers with restarts). To be called once for each call, in their order: it remembers
        the last step.

        img2img begins in the middle of the timesteps: the earliest step that was called gets index 0.
        """
        number = self._number(time)
        jumped = number < self._last
        self._last = number
        if self._first is None or number < self._first:
            self._first = number
        index = number - self._first
        total = len(self._times) - self._first
        is_last = number == len(self._times) - 1
        return Step(index, total, index / total, is_last), jumped

    def _number(self, time: float) -> int:
        """The index of the step to which a timestep belongs, among all timesteps from the largest to the smallest. See
        NEAR; a timestep above all of them belongs to the first step."""
        after = bisect_right(self._times, -time, key=neg)
        before = max(after - 1, 0)
        if after < len(self._times):
            gap = self._times[before] - self._times[after]
            if abs(self._times[after] - time) <= NEAR * gap and time < self._times[before]:
                return after
        return before


def time_of(timestep: Tensor) -> float | None:
    """The timestep of a call, a tensor (batch,) on any device, as a number; None if the rows differ, or there are none.
    Waits until the GPU has computed the tensor."""
    if timestep.dim() and timestep.stride(0) == 0:
        return float(timestep[0])
    times = timestep.flatten().tolist()
    return float(times[0]) if times and min(times) == max(times) else None


class Solver(Enum):
    """How a sampler gets from one step to the next. Policies decide by it whether values of the network that change
    from step to step may be extrapolated.

    FIRST_ORDER: by one output of the network, without added noise (Euler; DDIM at eta 0).
    MULTISTEP: by one new output and those of the steps before, without added noise (DPM++ 2M).
    OTHER: with added noise, or with more than one call of the network a step, or in a way that was not measured.
    UNKNOWN: the sampler is unknown.
    """

    FIRST_ORDER = "first order"
    MULTISTEP = "multistep"
    OTHER = "other"
    UNKNOWN = "unknown"


class Position(NamedTuple):
    """The position of a call in its sampling.

    step: the step that the call belongs to.
    time: the call's own timestep, which may lie between two steps.
    sampling_run: an object that identifies one pass through the steps. A new object means another sampling or a jump
        back in this one, so policies must not use what they kept from earlier calls.
    """

    step: Step
    time: float
    sampling_run: object


@dataclass(eq=False)
class Sampling:
    """One sampling, identified by this object.

    times: returns the timesteps at which the steps begin, as the UNet gets them, in any order; None or empty if
        unknown. Called by position() until it has returned some.
    why_not: why every step must compute the whole network, in one line for the user; "" if policies may decide.
    read: returns the timestep of a call as a number, given its tensor (batch,); None if the rows differ. A host that
        knows the number passes a function that does not wait for the GPU. The default, time_of, waits.
    solver: returns how the sampler gets from step to step. The answer may change from call to call.
    guidance_scale: the CFG scale; 1 if the guidance is built into the network; None if unknown.
    """

    times: Callable[[], Sequence[float] | None] = lambda: None
    why_not: str = ""
    read: Callable[[Tensor], float | None] = time_of
    solver: Callable[[], Solver] = lambda: Solver.UNKNOWN
    guidance_scale: float | None = None
    _timeline: Timeline | None = field(default=None, init=False)
    _sampling_run: object = field(default_factory=object, init=False)

    def position(self, timestep: Tensor) -> Position:
        """The position of a call, given its timestep, a tensor (batch,). To be called once for each call, in their
        order: a step before the last call's step begins a new sampling_run. A refiner's calls continue the sampling_run
        of the base model.

        May wait for the GPU: see read. Raises Refusal, with a reason for the user, if the step is unknown, or if every
        step must compute the whole network: for why_not, or because there are too few steps.
        """
        if self.why_not:
            raise Refusal(self.why_not)
        if self._timeline is None:
            times = self.times()
            if not times:
                raise Refusal(UNKNOWN_TIMES)
            self._timeline = Timeline(times)
        time = self.read(timestep)
        if time is None:
            raise Refusal(UNEQUAL_TIMES)
        if self._timeline.is_foreign(time):
            raise Refusal(FOREIGN_TIMES)
        step, jumped = self._timeline.step(time)
        if jumped:
            self._sampling_run = object()
        too_few = step.why_too_few(self.guidance_scale)
        if too_few:
            raise Refusal(too_few)
        return Position(step, time, self._sampling_run)
