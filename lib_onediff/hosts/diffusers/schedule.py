"""When the samplings of a diffusers pipeline begin and end, and at which timesteps their steps begin: its progress bar
and its scheduler say so."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...core.attempt import HostFunction
from ...core.origins import package
from ...core.sampling import Sampling, time_of
from ...families.leaf_reader import is_genuine
from ...runtime.runtime import runtime
from ..hooks import Replacement, TablePatch
from ..schedule import HostMethod, replace_next_call, why_no_line
from .module_forward import stay_on

BAR = "progress_bar"
# These go on from one output, and add no noise between their steps as the pipelines call them (eta 0).
FIRST_ORDER = ("EulerDiscreteScheduler", "DDIMScheduler", "FlowMatchEulerDiscreteScheduler")


class LoopAnnouncer:
    """Announces the samplings of one pipeline: each of diffusers' pipelines runs its steps within its progress_bar, so
    its samplings begin and end with that. A hooks.StandIn; keeps neither pipeline nor UNet alive."""

    def __init__(self, pipe: Any, unet: nn.Module) -> None:
        self._pipe, self._unet = reference_to(pipe), reference_to(unet)

    def look_up(self, one: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]]:
        """See hooks.StandIn."""
        return self._announce, original

    def _announce(self, host: HostFunction, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        bar = host(pipe, *args, **kwargs)
        runtime.guard.attempt("following a pipeline's steps", partial(self._follow, bar))
        return bar

    def _follow(self, bar: Any) -> None:
        """A loop begins. It ends when its bar is closed: by the loop itself, or where nobody holds the bar."""
        from tqdm import tqdm

        if not isinstance(bar, tqdm):
            # A pipeline of somebody's own: nobody would say when it ends.
            return

        def close(original: HostMethod) -> None:
            runtime.guard.attempt("noting that a sampling ends", self._end)
            original()

        replace_next_call(bar, "close", close)
        self._begin()

    def _begin(self) -> None:
        pipe, unet = self._pipe(), self._unet()
        if pipe is not None and unet is not None:
            stay_on(unet)
            # Now: callbacks may end the guidance in mid-sampling.
            scheduler = pipe.scheduler
            runtime.begin_sampling(unet, sampling_of(lambda: scheduler, guidance_scale_of(pipe)), of_all=False)

    def _end(self) -> None:
        unet = self._unet()
        if unet is not None:
            runtime.end_sampling(unet)


def announce_samplings(pipe: Any, unet: nn.Module) -> None:
    """Have this pipeline's samplings announced. A pipeline that never calls diffusers' progress_bar announces none."""
    owner = owner_of_bar(pipe)
    if owner is None:
        return
    patch = runtime.patches.get((owner, BAR))
    if patch is None:
        patch = runtime.patches[owner, BAR] = TablePatch(
            owner, BAR, runtime.guard, "a pipeline's progress bar", lambda pipe, reason: None
        )
    patch.put(pipe, LoopAnnouncer(pipe, unet))


def no_longer_announce(pipe: Any) -> None:
    """Undo announce_samplings."""
    owner = owner_of_bar(pipe)
    patch = None if owner is None else runtime.patches.get((owner, BAR))
    if patch is not None:
        patch.take(pipe)


def owner_of_bar(pipe: Any) -> type | None:
    """The class of diffusers that defines a pipeline's progress_bar; None for a pipeline that is none of diffusers'."""
    return next((
        kind for kind in type(pipe).__mro__
        if BAR in vars(kind) and package(kind.__module__) == "diffusers" and is_genuine(kind)
    ), None)


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


def sampling_of(scheduler: Callable[[], Any], guidance_scale: float | None = None) -> Sampling:
    """The sampling that the timesteps of a diffusers scheduler are for. scheduler: returns it, from the first UNet call
    on; None where there is none."""
    clock = Clock(scheduler)
    return Sampling(
        times=clock.times, read=clock.read, guidance_scale=guidance_scale,
        why_no_forecast=lambda: why_no_line(type(scheduler()).__name__, is_first_order(scheduler())),
    )


def is_first_order(scheduler: Any) -> bool:
    """Whether this is one of diffusers' own schedulers whose steps use one output and add no noise."""
    kind = type(scheduler)
    adds_noise = getattr(getattr(scheduler, "config", None), "stochastic_sampling", False)
    is_known = kind.__name__ in FIRST_ORDER and package(kind.__module__) == "diffusers" and is_genuine(kind)
    return is_known and not adds_noise


class Clock:
    """A scheduler's timesteps, whose values are asked for once."""

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._values: list[float] = []

    def times(self) -> list[float] | None:
        """Where steps begin. Of two calls a step, the second is at a place between or where the next one begins."""
        scheduler = self._scheduler()
        return None if scheduler is None else self._all(scheduler)[::max(1, int(getattr(scheduler, "order", 1)))]

    def read(self, timestep: Tensor) -> float | None:
        """The timestep of a call: a pipeline hands over a view of one of the scheduler's, so where it lies tells which,
        and the GPU need not be waited for."""
        ours: Any = getattr(self._scheduler(), "timesteps", None)
        same_memory = ours is not None and (timestep.dtype, timestep.device) == (ours.dtype, ours.device) and (
            timestep.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )
        if not same_memory or not ours.is_contiguous() or (timestep.numel() > 1 and timestep.stride(0) != 0):
            return time_of(timestep)
        return self._all(self._scheduler())[timestep.storage_offset() - ours.storage_offset()]

    def _all(self, scheduler: Any) -> list[float]:
        self._values = self._values or [float(value) for value in scheduler.timesteps.tolist()]
        return self._values
