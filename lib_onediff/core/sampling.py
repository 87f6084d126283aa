"""A sampling, as a host announces it before its first call, and where in it a call is."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .refusal import Refusal
from .timeline import Step, Timeline

UNANNOUNCED = "nobody says when a sampling begins and ends (own loops: with lib_onediff.sampling(unet): ...)"
UNKNOWN_TIMES = (
    "nobody says at which timesteps the steps begin (own loops: with lib_onediff.sampling(unet, timesteps=...): ...)"
)
UNEQUAL_TIMES = "the images of this batch are at different steps"
OTHER_SAMPLER = "it is for the samplers Euler and DDIM (without added noise)"
UNKNOWN_SAMPLER = "the caller does not say which sampler it uses"
# A call that makes a shape ready is a step of a sampling that is long enough for anything.
WARM_UP_TIMES = range(1000, 0, -1)


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
