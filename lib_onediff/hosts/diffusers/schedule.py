"""At which timesteps the steps of a diffusers pipeline begin: its scheduler says so."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...model.deepcache.sampling import OTHER_SAMPLER, Sampling, time_of
from ...runtime.runtime import runtime

# These go on from one output, and add no noise between their steps as the pipelines call them (eta 0).
FIRST_ORDER = ("EulerDiscreteScheduler", "DDIMScheduler")


class PipelineSchedule:
    """Follows the scheduler of a pipeline without keeping the pipeline alive. Every set_timesteps is a new sampling."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = reference_to(pipe)
        self._timesteps: weakref.ref[Tensor] | None = None
        self._sampling = Sampling()

    def sampling(self) -> Sampling:
        """The sampling that the pipeline is in."""
        pipe = self._pipe()
        scheduler = getattr(pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if isinstance(timesteps, Tensor) and (self._timesteps is None or self._timesteps() is not timesteps):
            self._timesteps = weakref.ref(timesteps)
            # Now: callbacks may end the guidance in mid-sampling.
            scale = runtime.guard.attempt("reading the guidance scale", lambda: guidance_scale_of(pipe))
            self._sampling = sampling_of(scheduler, scale)
        return self._sampling


def reference_to(pipe: Any) -> Callable[[], Any]:
    """A weak reference; to nothing where there can be none, as to what only stands for a pipe."""
    try:
        return weakref.ref(pipe)
    except TypeError:
        return lambda: None


def guidance_scale_of(pipe: Any) -> float | None:
    """The guidance scale of the image that a pipeline is making: 1 where it is built into the UNet, as LCM's."""
    scale = getattr(pipe, "_guidance_scale", None)
    if not isinstance(scale, (int, float)):
        return None
    return float(scale) if getattr(pipe, "do_classifier_free_guidance", True) else min(1.0, float(scale))


def sampling_of(scheduler: Any, guidance_scale: float | None = None) -> Sampling:
    """The sampling that a diffusers scheduler's timesteps are for."""
    clock, no_line = Clock(scheduler.timesteps, getattr(scheduler, "order", 1)), why_no_line(scheduler)
    return Sampling(
        times=clock.times, read=clock.read, why_no_forecast=lambda: no_line, guidance_scale=guidance_scale
    )


def sampling_to_come(p: Any) -> Sampling:
    """The sampling of the standalone host's generation p, which gets its scheduler only when the pipeline runs."""
    generation = weakref.ref(p)

    def times() -> list[float] | None:
        scheduler = getattr(generation(), "sampler", None)
        return None if scheduler is None else Clock(scheduler.timesteps, scheduler.order).times()

    def why_no_forecast() -> str:
        return why_no_line(getattr(generation(), "sampler", None))

    scale = getattr(p, "cfg_scale", None)
    return Sampling(
        bool(p.is_hr_pass), times, why_no_forecast=why_no_forecast,
        guidance_scale=None if scale is None else float(scale),
    )


def why_no_line(scheduler: Any) -> str:
    """Why outputs do not follow from those before with this scheduler, in one line for the user; or ""."""
    return "" if type(scheduler).__name__ in FIRST_ORDER else OTHER_SAMPLER


class Clock:
    """Timesteps whose values are asked for once. order: how many of them one step has."""

    def __init__(self, timesteps: Tensor, order: int) -> None:
        self._timesteps = timesteps
        self._order = max(1, int(order))
        self._values: list[float] | None = None

    def times(self) -> list[float]:
        """Where steps begin. Of two calls a step, the second is at a place between or where the next one begins."""
        return self._all()[::self._order]

    def read(self, timestep: Tensor) -> float | None:
        """The timestep of a call: a pipeline hands over a view of one of the scheduler's, so where it lies tells which,
        and the GPU need not be waited for."""
        ours = self._timesteps
        same_memory = (timestep.dtype, timestep.device) == (ours.dtype, ours.device) and (
            timestep.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )
        if not same_memory or not ours.is_contiguous() or (timestep.numel() > 1 and timestep.stride(0) != 0):
            return time_of(timestep)
        return self._all()[timestep.storage_offset() - ours.storage_offset()]

    def _all(self) -> list[float]:
        if self._values is None:
            self._values = [float(value) for value in self._timesteps.tolist()]
        return self._values
