"""At which timesteps the steps of a WebUI's sampler (A1111's, Forge's) will begin: its own next request is followed.

The sampler object lives for one sampling.
"""
from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

from ..core.sampling import Sampling
from ..runtime.runtime import runtime
from .schedule import HostMethod, replace_next_call, why_no_line

# These call the UNet at every timestep but the lowest.
ALL_BUT_THE_LOWEST = ("ddim", "ddim_cfgpp", "plms")
# These go on from one output, and add no noise between their steps, at eta 0 where they take one.
FIRST_ORDER = ("sample_euler", "ddim")
# Of Forge's DDIM and PLMS with a flow model, such as Anima.
OTHER_TIMESTEPS = "DDIM and PLMS do not count in this model's timesteps (Euler does)"


def listen(sampler: Any, method: str) -> list[float]:
    """The numbers that a method of the sampler will return when it is called next; empty until then. They keep neither
    the sampler nor its model alive."""
    heard: list[float] = []

    def listening(original: HostMethod, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        runtime.guard.attempt("reading the sampler's schedule", lambda: hear(answer, heard))
        return answer

    replace_next_call(sampler, method, listening)
    return heard


def hear(answer: Tensor, heard: list[float]) -> None:
    heard[:] = [float(value) for value in answer.flatten().tolist()]


def sampling_of(p: Any) -> Sampling:
    """The sampling that the generation p is about to begin."""
    sampler, second_pass = getattr(p, "sampler", None), bool(getattr(p, "is_hr_pass", False))
    function = getattr(sampler, "func", None)
    name = getattr(function, "__name__", "")
    takes = inspect.signature(function).parameters if callable(function) else ()
    adds_noise = "eta" in takes and eta_of(p) != 0
    no_line = why_no_line(name, name in FIRST_ORDER and not adds_noise)
    known: dict[str, Any] = {"why_no_forecast": lambda: no_line, "guidance_scale": guidance_scale_of(p, second_pass)}
    if "sigmas" in takes and hasattr(sampler, "get_sigmas"):
        if "s_churn" in takes and churn_of(p):
            return Sampling(why_not="the sampler's churn moves its steps")
        sigmas, speaker = listen(sampler, "get_sigmas"), weakref.ref(sampler)
        return Sampling(lambda: timesteps_of(speaker(), sigmas[:-1]), **known)
    if name in ALL_BUT_THE_LOWEST and hasattr(sampler, "get_timesteps"):
        if not counts_in_timesteps(sampler):
            return Sampling(why_not=OTHER_TIMESTEPS)
        timesteps = listen(sampler, "get_timesteps")
        return Sampling(lambda: sorted(timesteps)[1:] or None, **known)
    return Sampling(why_not="this sampler chooses its steps while it runs" if sampler is not None else "")


def counts_in_timesteps(sampler: Any) -> bool:
    """Whether the network is called at the very timesteps that a sampler counts in.

    Forge turns DDIM's timesteps, 0 to 999, into noise levels, and its predictor turns these into the network's. For
    SD and SDXL these are the same again. For flow models they are the noise level, or a multiple of it.
    """
    engine: Any = getattr(getattr(sampler, "model_wrap", None), "inner_model", None)
    try:
        predictor = engine.forge_objects.unet.model.predictor
        middle = len(predictor.sigmas) // 2
        return float(predictor.timestep(predictor.sigmas[middle:middle + 1])) == middle
    except AttributeError:
        return True  # A1111 and reForge: the sampler's timesteps go to the network as they are.


def eta_of(p: Any) -> float:
    """How much noise DDIM adds between its steps."""
    from modules import shared

    own = getattr(p, "eta", None)
    return float(getattr(shared.opts, "eta_ddim", 0.0) if own is None else own)


def churn_of(p: Any) -> float:
    from modules import shared

    return float(getattr(shared.opts, "s_churn", getattr(p, "s_churn", 0.0)))


def guidance_scale_of(p: Any, second_pass: bool) -> float | None:
    """The CFG scale that the checkpoint is used with. The Forge family's second pass has one of its own, which tells of
    the checkpoint only where the pass has one of its own too: it is 1 unless somebody sets it."""
    own = second_pass and getattr(p, "hr_checkpoint_info", None) is not None
    scale = getattr(p, "hr_cfg", None) if own else None
    scale = getattr(p, "cfg_scale", None) if scale is None else scale
    return None if scale is None else float(scale)


def timesteps_of(sampler: Any, sigmas: list[float]) -> list[float] | None:
    """Noise levels as the timesteps that the UNet gets; None where the sampler has not asked for any."""
    if not sigmas or sampler is None:
        return None
    wrapped = sampler.model_wrap
    levels = torch.tensor(sigmas, device=wrapped.log_sigmas.device, dtype=wrapped.log_sigmas.dtype)
    with torch.no_grad():
        return [float(time) for time in wrapped.sigma_to_t(levels).flatten().tolist()]
