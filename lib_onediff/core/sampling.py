"""A sampling, as a host announces it before its first call, and where in it a call is."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import neg
from typing import NamedTuple

from torch import Tensor

from .refusal import Refusal

# With fewer steps, each of them changes the whole image.
FEWEST_STEPS = 10
FEW_STEPS = f"the sampling has fewer than {FEWEST_STEPS} steps"
# Models and LoRAs that are distilled for few steps are published with 1 to 8 of them and a guidance scale of 0 to 2
# (LCM 1 to 2; Lightning, Turbo, Hyper-SD and DMD2 0 to 1). People give them more steps, and they stay what they are.
FEWEST_UNGUIDED_STEPS, LITTLE_GUIDANCE = 16, 2.0
FEW_STEP_MODEL = (
    f"the sampling has fewer than {FEWEST_UNGUIDED_STEPS} steps at a CFG scale of {LITTLE_GUIDANCE:g} or less, "
    "as few-step models have (LCM, Lightning, Turbo, Hyper, DMD2)"
)
# Of the distance to the next step: so far may a timestep be from where its step begins.
NEAR = 0.05
UNANNOUNCED = "nobody says when a sampling begins and ends (in your own loop, use lib_onediff.sampling(unet))"
UNKNOWN_TIMES = (
    "nobody says at which timesteps the steps begin (own loops: with lib_onediff.sampling(unet, timesteps=...): ...)"
)
UNEQUAL_TIMES = "the images of this batch are at different steps"
OTHER_SAMPLER = "it works with the samplers Euler and DDIM (without added noise)"
UNKNOWN_SAMPLER = "the caller does not say which sampler it uses"
# A call that makes a shape ready is a step of a sampling that is long enough for anything.
WARM_UP_TIMES = range(1000, 0, -1)


@dataclass(frozen=True)
class Step:
    """index: from the first step of this sampling. total: how many steps it has. fraction: how much of the sampling was
    done when the step began. is_last: whether the sampling ends with it."""

    index: int
    total: int
    fraction: float
    is_last: bool

    def why_too_few(self, guidance_scale: float | None) -> str:
        """Why its sampling has too few steps to leave anything out, in one line for the user; "" where it has enough.
        guidance_scale: the sampling's CFG scale, or None where that is unknown."""
        if self.total >= FEWEST_UNGUIDED_STEPS:
            return ""
        if self.total < FEWEST_STEPS:
            return FEW_STEPS
        return FEW_STEP_MODEL if guidance_scale is not None and guidance_scale <= LITTLE_GUIDANCE else ""


class Timeline:
    """The timesteps at which the steps of a sampling begin: what lies between two of them belongs to the earlier.

    Timesteps fall while an image is made. The step is never counted in calls: a host may call the UNet once for the
    prompt and once for the negative prompt, a sampler (Heun, DPM2, DPM++ SDE) may call it twice a step, and an
    extension may keep calls to itself.
    """

    def __init__(self, times: Sequence[float]) -> None:
        self._times = sorted({float(time) for time in times}, reverse=True)
        self._first: int | None = None
        self._last: int = -1

    def step(self, time: float) -> tuple[Step, bool]:
        """The step of a timestep, and whether time has jumped back. img2img begins in the middle of the times; then
        its first step is the one that comes first."""
        place = self._place(time)
        jumped = place < self._last
        self._last = place
        if self._first is None or place < self._first:
            self._first = place
        index, total = place - self._first, len(self._times) - self._first
        return Step(index, total, index / total, place == len(self._times) - 1), jumped

    def _place(self, time: float) -> int:
        after = bisect_right(self._times, -time, key=neg)
        before = max(after - 1, 0)
        if after < len(self._times):
            gap = self._times[before] - self._times[after]
            if abs(self._times[after] - time) <= NEAR * gap and time < self._times[before]:
                return after
        return before


def time_of(timestep: Tensor) -> float | None:
    """The timestep of a call, (batch,), as a number; None where the batch has several. Waits for a GPU."""
    if timestep.dim() and timestep.stride(0) == 0:
        return float(timestep[0])
    times = timestep.flatten().tolist()
    return float(times[0]) if times and min(times) == max(times) else None


class Position(NamedTuple):
    """Where in its sampling a call is. time: its timestep. walk: another object where what was kept at earlier calls
    counts no more: another sampling, or a jump back in this one."""

    step: Step
    time: float
    walk: object


@dataclass(eq=False)
class Sampling:
    """One sampling. Another object: another sampling.

    times: called at the first UNet call. Returns the timesteps, as the UNet gets them, at which the steps begin, in any
        order; None where nobody knows.
    why_not: why none of its steps may be cut short, in one line for the user.
    read: reads the timestep of a call as time_of does, without asking the GPU.
    why_no_forecast: called at each UNet call. Returns why an output does not follow from those before it, in one line;
        "" for samplers of the first order without added noise.
    guidance_scale: its CFG scale; 1 where the network has that built in; None where nobody knows.
    """

    times: Callable[[], Sequence[float] | None] = lambda: None
    why_not: str = ""
    read: Callable[[Tensor], float | None] = time_of
    why_no_forecast: Callable[[], str] = lambda: UNKNOWN_SAMPLER
    guidance_scale: float | None = None
    _timeline: Timeline | None = field(default=None, init=False)
    _walk: object = field(default_factory=object, init=False)

    def position(self, timestep: Tensor) -> Position:
        """The position of a call with this timestep, (batch,), of any network: a refiner goes on where the first one
        was. May wait for a GPU: see read.

        Raises Refusal where no step of this sampling may be cut short, or the step cannot be told.
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
        step, jumped = self._timeline.step(time)
        if jumped:
            self._walk = object()
        if too_few := step.why_too_few(self.guidance_scale):
            raise Refusal(too_few)
        return Position(step, time, self._walk)
