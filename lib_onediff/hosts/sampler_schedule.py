"""Finds the timesteps at which the steps of a WebUI's sampler (A1111's, Forge's) begin, by recording the result of the
sampler's own call for its schedule.

A WebUI makes a new sampler object for each sampling.
"""
from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

from ..core.sampling import Sampling, Solver
from ..runtime.runtime import runtime
from .schedule import HostMethod, replace_next_call

# Samplers that call the UNet at every timestep except the lowest.
ALL_BUT_THE_LOWEST = ("ddim", "ddim_cfgpp", "plms")
# The Solver of samplers that add no noise between steps (DDIM: at eta 0), by the names of their functions.
SOLVERS = {
    "sample_euler": Solver.FIRST_ORDER, "ddim": Solver.FIRST_ORDER, "sample_dpmpp_2m": Solver.MULTISTEP,
    "": Solver.UNKNOWN,
}
# Why step policies are inactive with Forge's DDIM and PLMS and a flow model, such as Anima: a reason for users.
OTHER_TIMESTEPS = "OneDiff cannot follow the steps of DDIM and PLMS with this model: use another sampler, such as Euler"


def record_next_call(sampler: Any, method: str) -> list[float]:
    """A list of numbers, empty at first. When the WebUI next calls this method of the sampler, the list is filled with
    the numbers of the tensor that the method returns; later calls do not change it.

    Replaces the method of this one object until that next call. Does not keep the sampler or its model alive. If the
    recording fails, the failure is logged, the list stays empty, and the WebUI gets the method's result.
    """
    numbers: list[float] = []

    def recording(original: HostMethod, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        runtime.guard.attempt("reading the sampler's schedule", lambda: record(answer, numbers))
        return answer

    replace_next_call(sampler, method, recording)
    return numbers


def record(answer: Tensor, numbers: list[float]) -> None:
    """Replace the content of the list `numbers`, in place, with the values of the tensor `answer`, flattened."""
    numbers[:] = [float(value) for value in answer.flatten().tolist()]


def sampling_of(p: Any) -> Sampling:
    """A Sampling for the sampling that the generation p, the WebUI's processing object, is about to begin. Call it
    before p.sampler computes its schedule: the method that computes it is replaced for one call, which records it. Only
    after that call are the Sampling's timesteps known.

    If this sampler's timesteps cannot be known, returns a Sampling with why_not, the reason for the user. Without a
    p.sampler, why_not is "" and the timesteps stay unknown.
    """
    sampler = getattr(p, "sampler", None)
    second_pass = bool(getattr(p, "is_hr_pass", False))
    function = getattr(sampler, "func", None)
    name = getattr(function, "__name__", "")
    takes = inspect.signature(function).parameters if callable(function) else ()
    adds_noise = "eta" in takes and eta_of(p) != 0
    solver = Solver.OTHER if adds_noise else SOLVERS.get(name, Solver.OTHER)
    known: dict[str, Any] = {"solver": lambda: solver, "guidance_scale": guidance_scale_of(p, second_pass)}
    if "sigmas" in takes and hasattr(sampler, "get_sigmas"):
        if "s_churn" in takes and churn_of(p):
            return Sampling(why_not="the sampler's setting 'sigma churn' changes its timesteps")
        sigmas = record_next_call(sampler, "get_sigmas")
        reference = weakref.ref(sampler)
        return Sampling(lambda: timesteps_of(reference(), sigmas[:-1]), **known)
    if name in ALL_BUT_THE_LOWEST and hasattr(sampler, "get_timesteps"):
        if not counts_in_timesteps(sampler):
            return Sampling(why_not=OTHER_TIMESTEPS)
        timesteps = record_next_call(sampler, "get_timesteps")
        return Sampling(lambda: sorted(timesteps)[1:] or None, **known)
    return Sampling(why_not="this sampler chooses its timesteps while it runs" if sampler is not None else "")


def counts_in_timesteps(sampler: Any) -> bool:
    """Whether this sampler, DDIM or PLMS, calls the network with the timesteps of its own schedule. If not, a call's
    timestep does not tell which step the call belongs to. True for A1111 and reForge.

    Forge converts DDIM's timesteps, 0 to 999, to noise levels, and its predictor converts the levels to the network's
    timesteps. For SD and SDXL, the network's timesteps are DDIM's; for flow models they are the noise level, or a
    multiple of it.
    """
    engine: Any = getattr(getattr(sampler, "model_wrap", None), "inner_model", None)
    try:
        predictor = engine.forge_objects.unet.model.predictor
        middle = len(predictor.sigmas) // 2
        return float(predictor.timestep(predictor.sigmas[middle:middle + 1])) == middle
    except AttributeError:
        return True  # A1111 and reForge call the network with the sampler's timesteps.


def eta_of(p: Any) -> float:
    """DDIM's eta for the generation p, the WebUI's processing object: the amount of noise that is added between steps.
    It is p.eta, or the WebUI's setting if p.eta is None, or 0 if the WebUI has no such setting."""
    from modules import shared

    own = getattr(p, "eta", None)
    return float(getattr(shared.opts, "eta_ddim", 0.0) if own is None else own)


def churn_of(p: Any) -> float:
    """The sigma churn for the generation p, the WebUI's processing object: above 0, the sampler adds noise and changes
    its timesteps. It is the WebUI's setting, or p.s_churn if the WebUI has no such setting, or 0 without either."""
    from modules import shared

    return float(getattr(shared.opts, "s_churn", getattr(p, "s_churn", 0.0)))


def guidance_scale_of(p: Any, second_pass: bool) -> float | None:
    """The CFG scale that step policies use for a sampling of the generation p; None if unknown. second_pass: whether it
    is the second pass of hires fix.

    Returns p.cfg_scale, with one exception: for a second pass that has a checkpoint of its own, p.hr_cfg (of the Forge
    family), if p has it. With the first pass's checkpoint, hr_cfg is not used: it is 1 by default, and at a
    scale of 1 step policies would take every model for a few-step model.
    """
    own = second_pass and getattr(p, "hr_checkpoint_info", None) is not None
    scale = getattr(p, "hr_cfg", None) if own else None
    scale = getattr(p, "cfg_scale", None) if scale is None else scale
    return None if scale is None else float(scale)


def timesteps_of(sampler: Any, sigmas: list[float]) -> list[float] | None:
    """The timesteps with which the sampler calls the UNet at these noise levels (sigmas), in the levels' order. None if
    no levels are recorded yet (sigmas is empty), or if the sampler is None because it was deleted."""
    if not sigmas or sampler is None:
        return None
    wrapped = sampler.model_wrap
    levels = torch.tensor(sigmas, device=wrapped.log_sigmas.device, dtype=wrapped.log_sigmas.dtype)
    with torch.no_grad():
        return [float(time) for time in wrapped.sigma_to_t(levels).flatten().tolist()]
