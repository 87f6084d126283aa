"""A1111's samplers by name, as diffusers schedulers; each has the noise schedule that "Automatic" stands for there."""
from __future__ import annotations

from typing import Any, NamedTuple

from ...core.refusal import Refusal


class Sampler(NamedTuple):
    """A diffusers class and its arguments. own_noise: it draws its noise from seeds."""

    scheduler: str
    arguments: dict[str, Any] = {}
    own_noise: bool = False


MULTISTEP, KARRAS = "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}
KNOWN = {
    "Euler": Sampler("EulerDiscreteScheduler"),
    "Euler a": Sampler("EulerAncestralDiscreteScheduler"),
    "DPM++ 2M": Sampler(MULTISTEP, {"algorithm_type": "dpmsolver++", **KARRAS}),
    "DPM++ SDE": Sampler("DPMSolverSDEScheduler", KARRAS, own_noise=True),
    "DPM++ 2M SDE": Sampler(MULTISTEP, {"algorithm_type": "sde-dpmsolver++", **KARRAS}),
    "LMS": Sampler("LMSDiscreteScheduler"),
    "Heun": Sampler("HeunDiscreteScheduler"),
    "DDIM": Sampler("DDIMScheduler"),
    "PLMS": Sampler("PNDMScheduler", {"skip_prk_steps": True}),
    "UniPC": Sampler("UniPCMultistepScheduler"),
    "LCM": Sampler("LCMScheduler"),
}


def visible_sampler_names() -> list[str]:
    """What the page offers."""
    return list(KNOWN)


def make_scheduler(name: str, base_config: dict[str, Any], seeds: list[int]) -> Any:
    """A fresh diffusers scheduler for a sampler, with the model's own training schedule and prediction type. Raises
    Refusal when there is no such sampler.

    base_config: the configuration of the scheduler that the model came with. seeds: one per image of the batch.
    """
    import diffusers

    if name not in KNOWN:
        raise Refusal(f"There is no sampler {name!r} here; there are {', '.join(KNOWN)}.")
    sampler = KNOWN[name]
    own_noise = {"noise_sampler_seed": seeds} if sampler.own_noise else {}
    arguments = {"use_karras_sigmas": False, **sampler.arguments, **own_noise}
    return getattr(diffusers, sampler.scheduler).from_config(base_config, **arguments)
