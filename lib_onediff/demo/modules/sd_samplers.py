"""A1111's samplers and noise schedules by name, as diffusers schedulers."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from ..refusal import Refusal

AUTOMATIC, UNIFORM, KARRAS = "Automatic", "Uniform", "Karras"
SCHEDULES = (AUTOMATIC, UNIFORM, KARRAS)


@dataclass(frozen=True)
class Sampler:
    """A sampler: the diffusers class, its arguments, and which noise schedule "Automatic" stands for.

    needs: a package that the diffusers class imports. own_noise: it draws noise from seeds rather than generators.
    """

    name: str
    scheduler: str
    arguments: dict[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    automatic: str = UNIFORM
    takes_karras: bool = True
    needs: str | None = None
    own_noise: bool = False


MULTISTEP = "DPMSolverMultistepScheduler"
KNOWN = (
    Sampler("DPM++ 2M", MULTISTEP, {"algorithm_type": "dpmsolver++"}, ("k_dpmpp_2m",), KARRAS),
    Sampler("DPM++ SDE", "DPMSolverSDEScheduler", {}, ("k_dpmpp_sde",), KARRAS, needs="torchsde", own_noise=True),
    Sampler("DPM++ 2M SDE", MULTISTEP, {"algorithm_type": "sde-dpmsolver++"}, ("k_dpmpp_2m_sde",), KARRAS),
    Sampler("Euler a", "EulerAncestralDiscreteScheduler", {}, ("k_euler_a", "k_euler_ancestral"), takes_karras=False),
    Sampler("Euler", "EulerDiscreteScheduler", {}, ("k_euler",)),
    Sampler("LMS", "LMSDiscreteScheduler", {}, ("k_lms",), needs="scipy"),
    Sampler("Heun", "HeunDiscreteScheduler", {}, ("k_heun",)),
    Sampler("DDIM", "DDIMScheduler", {}, ("ddim",), takes_karras=False),
    Sampler("PLMS", "PNDMScheduler", {"skip_prk_steps": True}, ("plms", "PNDM"), takes_karras=False),
    Sampler("UniPC", "UniPCMultistepScheduler", {}, ("unipc",)),
    Sampler("LCM", "LCMScheduler", {}, ("k_lcm",), takes_karras=False),
)


def available() -> list[Sampler]:
    """The samplers whose needs are installed."""
    return [sampler for sampler in KNOWN if sampler.needs is None or importlib.util.find_spec(sampler.needs)]


def find(name: str, schedule: str | None) -> tuple[Sampler, str]:
    """The sampler and the schedule that name and schedule ask for; old names such as "DPM++ 2M Karras" work too.

    Raises Refusal when there is no such sampler or schedule, or they do not go together.
    """
    schedule = schedule or AUTOMATIC
    if name.lower().endswith(" karras"):
        name, schedule = name[: -len(" karras")], KARRAS
    for sampler in available():
        if name.lower() in (spelling.lower() for spelling in (sampler.name, *sampler.aliases)):
            break
    else:
        names = ", ".join(sampler.name for sampler in available())
        raise Refusal(f"There is no sampler {name!r} here; there are {names}.", status=400)
    for known in SCHEDULES:
        if schedule.lower() == known.lower():
            break
    else:
        raise Refusal(f"There is no schedule type {schedule!r} here; there are {', '.join(SCHEDULES)}.", status=400)
    if known == KARRAS and not sampler.takes_karras:
        raise Refusal(f"The sampler {sampler.name} does not take the schedule type Karras.", status=400)
    return sampler, known


def make_scheduler(name: str, schedule: str, base_config: dict[str, Any], seeds: list[int]) -> Any:
    """A fresh diffusers scheduler for a sampler, with the model's own training schedule and prediction type.

    base_config: the configuration of the scheduler that the model came with. seeds: one per image of the batch.
    """
    import diffusers

    sampler, schedule = find(name, schedule)
    arguments = dict(sampler.arguments)
    if sampler.takes_karras:
        arguments["use_karras_sigmas"] = (sampler.automatic if schedule == AUTOMATIC else schedule) == KARRAS
    if sampler.own_noise:
        arguments["noise_sampler_seed"] = seeds
    return getattr(diffusers, sampler.scheduler).from_config(base_config, **arguments)


def visible_sampler_names() -> list[str]:
    """What the sampler list of the page offers."""
    return [sampler.name for sampler in available()]
