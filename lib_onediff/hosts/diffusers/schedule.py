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
from ...core.sampling import Sampling, Solver, time_of
from ...families.leaf_reader import is_genuine
from ...runtime.runtime import runtime
from ..hooks import Replacement, TablePatch
from ..schedule import HostMethod, replace_next_call
from .module_forward import keep_replaced

# The name of a pipeline's method that LoopAnnouncer serves.
BAR = "progress_bar"
# The Solver of schedulers that add no noise as pipelines call them (eta 0), unless their configuration says so.
SOLVERS = {
    "EulerDiscreteScheduler": Solver.FIRST_ORDER, "DDIMScheduler": Solver.FIRST_ORDER,
    "FlowMatchEulerDiscreteScheduler": Solver.FIRST_ORDER, "DPMSolverMultistepScheduler": Solver.MULTISTEP,
}


class LoopAnnouncer:
    """Tells the runtime when a pipeline's samplings of a network begin and end. It serves the pipeline's progress_bar
    as a hooks.StandIn: pipelines of diffusers run all their steps inside of the progress bar.

    Keeps neither the pipeline nor the network alive. unet: the network, which need not be a UNet.
    """

    def __init__(self, pipe: Any, unet: nn.Module) -> None:
        self._pipe = reference_to(pipe)
        self._unet = reference_to(unet)

    def look_up(self, one: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]]:
        """(our function for a call of progress_bar, the host's); see ClassPatch.look_up. one: the pipeline."""
        return self._announce, original

    def _announce(self, host: HostFunction, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The host's progress bar for this call of progress_bar, after _follow. A failure of ours is logged, and the
        bar is returned in any case. host: the pipeline's own progress_bar."""
        bar = host(pipe, *args, **kwargs)
        runtime.guard.attempt("following a pipeline's steps", partial(self._follow, bar))
        return bar

    def _follow(self, bar: Any) -> None:
        """Tell the runtime that a sampling begins now, and replace the bar's next close() by one that also tells the
        runtime that the sampling has ended. The pipeline's loop closes the bar; if the loop fails, Python closes the
        bar at the latest when it deletes it. Does nothing for a bar that is not tqdm's."""
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
        """Tell the runtime that a sampling of this network begins, with the pipeline's scheduler and guidance scale.
        Before that, sets our forward on the network's class again if other code has removed it. Does nothing if the
        pipeline or the network is gone."""
        pipe = self._pipe()
        unet = self._unet()
        if pipe is not None and unet is not None:
            keep_replaced(unet)
            # guidance_scale_of is read now, because a callback may switch the guidance off during the sampling.
            scheduler = pipe.scheduler
            runtime.begin_sampling(unet, sampling_of(lambda: scheduler, guidance_scale_of(pipe)), of_all=False)

    def _end(self) -> None:
        """Tell the runtime that the sampling has ended. Does nothing if the network is gone."""
        unet = self._unet()
        if unet is not None:
            runtime.end_sampling(unet)


def announce_samplings(pipe: Any, unet: nn.Module) -> None:
    """Tell the runtime from now on when this pipeline's samplings of this network begin and end; see LoopAnnouncer.
    Replaces a network that was announced for this pipeline before. Does nothing if the pipeline has no progress_bar of
    diffusers (owner_of_bar): step policies are then inactive, because the runtime does not learn of any sampling."""
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
    """Undo announce_samplings for this pipeline. Does nothing if it was not called."""
    owner = owner_of_bar(pipe)
    patch = None if owner is None else runtime.patches.get((owner, BAR))
    if patch is not None:
        patch.take(pipe)


def owner_of_bar(pipe: Any) -> type | None:
    """The class of diffusers that defines a progress_bar, the pipeline's own class or the nearest of its bases; None if
    there is no such class. A class of other code that calls itself diffusers' does not count."""
    return next((
        kind for kind in type(pipe).__mro__
        if BAR in vars(kind) and package(kind.__module__) == "diffusers" and is_genuine(kind)
    ), None)


def reference_to(one: Any) -> Callable[[], Any]:
    """A function that returns this object, a pipeline or network, as long as other code keeps the object alive; then
    None. For an object that does not support weak references, the function always returns None."""
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: None


def guidance_scale_of(pipe: Any) -> float | None:
    """The CFG scale of the image that a pipeline is making now; None if unknown. If the pipeline computes no negative
    prompt, the scale but at most 1. (LCM pipelines have larger scales, and guidance built into the UNet.)"""
    scale = getattr(pipe, "_guidance_scale", None)
    if not isinstance(scale, (int, float)):
        return None
    return float(scale) if getattr(pipe, "do_classifier_free_guidance", True) else min(1.0, float(scale))


def sampling_of(scheduler: Callable[[], Any], guidance_scale: float | None = None) -> Sampling:
    """A Sampling whose timesteps are read from a diffusers scheduler at the network's first call in this sampling. The
    scheduler need not have set its timesteps before.

    scheduler: returns the scheduler; None if it is gone. guidance_scale: the CFG scale; None if unknown.
    """
    clock = Clock(scheduler)
    return Sampling(
        times=clock.times, read=clock.read, guidance_scale=guidance_scale,
        solver=lambda: solver_of(scheduler()),
    )


def solver_of(scheduler: Any) -> Solver:
    """The Solver of a scheduler; UNKNOWN for None. OTHER for a scheduler that adds noise, has an order above 2, which
    was not measured, or is not one of diffusers' in SOLVERS."""
    if scheduler is None:
        return Solver.UNKNOWN
    kind = type(scheduler)
    if package(kind.__module__) != "diffusers" or not is_genuine(kind):
        return Solver.OTHER
    config = getattr(scheduler, "config", None)
    adds_noise = getattr(config, "stochastic_sampling", False) or "sde" in str(getattr(config, "algorithm_type", ""))
    if adds_noise or getattr(config, "solver_order", 1) > 2:
        return Solver.OTHER
    return SOLVERS.get(kind.__name__, Solver.OTHER)


class Clock:
    """The timesteps of a scheduler during one sampling, as numbers. They are read from the GPU once, at first use.
    scheduler: returns the scheduler; None if it is gone."""

    def __init__(self, scheduler: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._values: list[float] = []

    def times(self) -> list[float] | None:
        """The timesteps at which the sampling's steps begin, in the scheduler's order; None if the scheduler is gone.
        A scheduler of order 2 has two timesteps for each step: the first of the two. See Sampling.times."""
        scheduler = self._scheduler()
        return None if scheduler is None else self._all(scheduler)[::max(1, int(getattr(scheduler, "order", 1)))]

    def read(self, timestep: Tensor) -> float | None:
        """The number in a call's timestep, (batch,) or (); None if its rows differ. A pipeline passes a view of an
        element of scheduler.timesteps: the view's offset in memory is the element's index, and nothing waits for the
        GPU. Any other tensor is read from the GPU. See Sampling.read."""
        ours: Any = getattr(self._scheduler(), "timesteps", None)
        same_memory = ours is not None and (timestep.dtype, timestep.device) == (ours.dtype, ours.device) and (
            timestep.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )
        if not same_memory or not ours.is_contiguous() or (timestep.numel() > 1 and timestep.stride(0) != 0):
            return time_of(timestep)
        return self._all(self._scheduler())[timestep.storage_offset() - ours.storage_offset()]

    def _all(self, scheduler: Any) -> list[float]:
        """All values of scheduler.timesteps, in their order. Waits for the GPU the first time, and keeps the values."""
        self._values = self._values or [float(value) for value in scheduler.timesteps.tolist()]
        return self._values
