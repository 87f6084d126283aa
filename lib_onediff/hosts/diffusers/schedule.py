"""Announces the samplings of diffusers pipelines to the runtime: they begin and end with the progress bar. Reads the
timesteps of their steps from the scheduler."""
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
from ..schedule import HostMethod, replace_next_call, why_no_forecast
from .module_forward import keep_replaced

BAR = "progress_bar"
# Schedulers whose steps use one output of the network, and add no noise as pipelines call them (eta 0).
FIRST_ORDER = ("EulerDiscreteScheduler", "DDIMScheduler", "FlowMatchEulerDiscreteScheduler")


class LoopAnnouncer:
    """Announces the samplings of one pipeline to the runtime, as a hooks.StandIn of its progress_bar: pipelines of
    diffusers run all their steps inside of the progress bar. Keeps neither the pipeline nor the UNet alive.

    unet: the network whose samplings these are.
    """

    def __init__(self, pipe: Any, unet: nn.Module) -> None:
        self._pipe = reference_to(pipe)
        self._unet = reference_to(unet)

    def look_up(self, one: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]]:
        """See hooks.StandIn."""
        return self._announce, original

    def _announce(self, host: HostFunction, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Serves a call of progress_bar: returns the host's bar, and follows it. A failure of ours leaves the bar as it
        is."""
        bar = host(pipe, *args, **kwargs)
        runtime.guard.attempt("following a pipeline's steps", partial(self._follow, bar))
        return bar

    def _follow(self, bar: Any) -> None:
        """Announce that a sampling begins now, and its end when this progress bar is closed. The loop closes it; if the
        loop fails, Python does when it deletes the bar."""
        from tqdm import tqdm

        if not isinstance(bar, tqdm):
            # A pipeline's own kind of bar may never be closed, so that the end would be unknown.
            return

        def close(original: HostMethod) -> None:
            runtime.guard.attempt("noting that a sampling ends", self._end)
            original()

        replace_next_call(bar, "close", close)
        self._begin()

    def _begin(self) -> None:
        """Tell the runtime that a sampling begins. Does nothing if the pipeline or the UNet is gone."""
        pipe = self._pipe()
        unet = self._unet()
        if pipe is not None and unet is not None:
            keep_replaced(unet)
            # guidance_scale_of is read now, because a callback may switch the guidance off during the sampling.
            scheduler = pipe.scheduler
            runtime.begin_sampling(unet, sampling_of(lambda: scheduler, guidance_scale_of(pipe)), of_all=False)

    def _end(self) -> None:
        """Tell the runtime that the sampling has ended."""
        unet = self._unet()
        if unet is not None:
            runtime.end_sampling(unet)


def announce_samplings(pipe: Any, unet: nn.Module) -> None:
    """Announce this pipeline's samplings of this UNet from now on. Does nothing if its progress_bar is not diffusers':
    step policies are then inactive, because no sampling begins."""
    owner = owner_of_bar(pipe)
    if owner is None:
        return
    patch = runtime.patches.get((owner, BAR))
    if patch is None:
        patch = runtime.patches[owner, BAR] = TablePatch(
            owner, BAR, runtime.guard, "a pipeline's progress bar", lambda pipe, reason: None
        )
    patch.put(pipe, LoopAnnouncer(pipe, unet))


def stop_announcing(pipe: Any) -> None:
    """Undo announce_samplings. Does nothing if it was not called."""
    owner = owner_of_bar(pipe)
    patch = None if owner is None else runtime.patches.get((owner, BAR))
    if patch is not None:
        patch.take(pipe)


def owner_of_bar(pipe: Any) -> type | None:
    """The class of diffusers that defines a pipeline's progress_bar; None if diffusers does not define it."""
    return next((
        kind for kind in type(pipe).__mro__
        if BAR in vars(kind) and package(kind.__module__) == "diffusers" and is_genuine(kind)
    ), None)


def reference_to(pipe: Any) -> Callable[[], Any]:
    """A weak reference to a pipeline or network; a function that returns None if the object supports none."""
    try:
        return weakref.ref(pipe)
    except TypeError:
        return lambda: None


def guidance_scale_of(pipe: Any) -> float | None:
    """The guidance scale of the image that a pipeline is making; None if unknown. If the guidance is built into the
    UNet, as in LCM, it is at most 1: each step then has one prediction, as at a scale of 1."""
    scale = getattr(pipe, "_guidance_scale", None)
    if not isinstance(scale, (int, float)):
        return None
    return float(scale) if getattr(pipe, "do_classifier_free_guidance", True) else min(1.0, float(scale))


def sampling_of(scheduler: Callable[[], Any], guidance_scale: float | None = None) -> Sampling:
    """The Sampling of a diffusers scheduler. The scheduler must have set its timesteps when the UNet is first called,
    and not before. scheduler: returns the scheduler, or None if there is none."""
    clock = Clock(scheduler)
    return Sampling(
        times=clock.times, read=clock.read, guidance_scale=guidance_scale,
        why_no_forecast=lambda: why_no_forecast(type(scheduler()).__name__, is_first_order(scheduler())),
    )


def is_first_order(scheduler: Any) -> bool:
    """Whether this is a scheduler of diffusers whose steps use one output of the network and add no noise."""
    kind = type(scheduler)
    adds_noise = getattr(getattr(scheduler, "config", None), "stochastic_sampling", False)
    is_known = kind.__name__ in FIRST_ORDER and package(kind.__module__) == "diffusers" and is_genuine(kind)
    return is_known and not adds_noise


class Clock:
    """The timesteps of a scheduler, as numbers. Their values are read from the GPU once. scheduler: returns the
    scheduler; None if it is gone."""

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._values: list[float] = []

    def times(self) -> list[float] | None:
        """See Sampling.times. A scheduler of order 2 has two timesteps for each step; the first one begins it."""
        scheduler = self._scheduler()
        return None if scheduler is None else self._all(scheduler)[::max(1, int(getattr(scheduler, "order", 1)))]

    def read(self, timestep: Tensor) -> float | None:
        """See Sampling.read. A pipeline passes a view of one of the scheduler's timesteps, so its offset in memory is
        the index of that one, and we need not wait for the GPU."""
        ours: Any = getattr(self._scheduler(), "timesteps", None)
        same_memory = ours is not None and (timestep.dtype, timestep.device) == (ours.dtype, ours.device) and (
            timestep.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )
        if not same_memory or not ours.is_contiguous() or (timestep.numel() > 1 and timestep.stride(0) != 0):
            return time_of(timestep)
        return self._all(self._scheduler())[timestep.storage_offset() - ours.storage_offset()]

    def _all(self, scheduler: Any) -> list[float]:
        """All timesteps of the scheduler. Waits for the GPU the first time."""
        self._values = self._values or [float(value) for value in scheduler.timesteps.tolist()]
        return self._values
