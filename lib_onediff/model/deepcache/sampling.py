"""What a host says of a sampling before its first UNet call: each adapter says it, and knows no more of DeepCache."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...weak_dictionary import WeakDictionary
from .timeline import Timeline, timeline_of

UNANNOUNCED = "nobody says when a sampling begins and ends (own loops: with lib_onediff.sampling(unet): ...)"
UNEQUAL_TIMES = "the images of this batch are at different steps"
OTHER_SAMPLER = "it is for the samplers Euler and DDIM (without added noise)"
UNKNOWN_SAMPLER = "the caller does not say which sampler it uses"


def nothing_known() -> None:
    return None


def unknown_sampler() -> str:
    return UNKNOWN_SAMPLER


def time_of(timestep: Tensor) -> float | None:
    """The timestep of a call, (batch,), as a number; None where the batch has several. Waits for a GPU."""
    if timestep.dim() and timestep.stride(0) == 0:
        return float(timestep[0])
    times = timestep.flatten().tolist()
    return float(times[0]) if times and min(times) == max(times) else None


class Sampling:
    """One sampling. Another object: another sampling.

    times: called at the first UNet call. Returns the timesteps, as the UNet gets them, at which the steps begin, in any
        order; None where nobody knows.
    count: called likewise. Returns how many different timesteps will come, where times are not known and each step has
        one; else None.
    why_not: why none of its steps may be cut short, in one line for the user.
    why_no_forecast: called at each UNet call. Returns why an output does not follow from those before it, in one line;
        "" for samplers of the first order without added noise.
    read: reads the timestep of a call as time_of does, without asking the GPU.
    guidance_scale: its CFG scale; 1 where the network has that built in; None where nobody knows.
    """

    def __init__(
        self, times: Callable[[], Sequence[float] | None] = nothing_known,
        count: Callable[[], int | None] = nothing_known, why_not: str = "",
        read: Callable[[Tensor], float | None] = time_of, why_no_forecast: Callable[[], str] = unknown_sampler,
        guidance_scale: float | None = None,
    ) -> None:
        self.times = times
        self.count = count
        self.why_not = why_not
        self.read = read
        self.why_no_forecast = why_no_forecast
        self.guidance_scale = guidance_scale


class Timelines:
    """A timeline for each sampling, which goes with it. A refiner goes on where the first UNet of its sampling was."""

    def __init__(self) -> None:
        self._known: WeakDictionary[Sampling, Timeline] = WeakDictionary()

    def of(self, sampling: Sampling) -> Timeline:
        found = self._known.get(sampling)
        if found is None:
            found = self._known[sampling] = timeline_of(sampling.times(), sampling.count())
        return found
