"""The result of a generation and its infotext."""
from __future__ import annotations

import json
from typing import Any

from . import shared
from .infotext_utils import quote


class Processed:
    """Pictures and everything that says how they were made."""

    def __init__(
        self, p: Any, images_list: list[Any], seed: int = -1, info: str = "", subseed: int | None = None,
        infotexts: list[str] | None = None, comments: str = "",
    ) -> None:
        self.images = images_list
        self.infotexts = infotexts or [info]
        self.info = info or self.infotexts[0]
        self.seed, self.subseed = seed, subseed
        self.comments = comments or "\n".join(p.comments)
        self.prompt, self.negative_prompt = p.prompt, p.negative_prompt
        self.all_prompts, self.all_negative_prompts = p.all_prompts, p.all_negative_prompts
        self.all_seeds, self.all_subseeds = p.all_seeds, p.all_subseeds
        self.width, self.height = p.width, p.height
        self.sampler_name, self.cfg_scale, self.steps = p.sampler_name, p.cfg_scale, p.steps
        self.batch_size = p.batch_size
        self.sd_model_name = p.sd_model.name
        self.sd_model_hash = p.sd_model.sd_model_hash
        self.denoising_strength = p.denoising_strength
        self.extra_generation_params = p.extra_generation_params
        self.job_timestamp = shared.state.job_timestamp
        self.index_of_first_image = 0
        self.subseed_strength = p.subseed_strength

    def js(self) -> str:
        """The result without its pictures as JSON, as the API's `info`."""
        shown = {name: value for name, value in vars(self).items() if name not in ("images", "info")}
        return json.dumps(shown, default=lambda value: None)


def create_infotext(
    p: Any, prompts: list[str], seeds: list[int], negative_prompts: list[str], index: int = 0
) -> str:
    """The infotext of one picture of the batch."""
    parameters = {
        "Steps": p.steps,
        "Sampler": p.sampler_name,
        "Schedule type": p.scheduler,
        "CFG scale": p.cfg_scale,
        "Seed": seeds[index],
        "Size": f"{p.width}x{p.height}",
        "Model": p.sd_model.name,
        **p.extra_generation_params,
    }
    named = ", ".join(f"{name}: {quote(value)}" for name, value in parameters.items() if value is not None)
    negative = f"\nNegative prompt: {negative_prompts[index]}" if negative_prompts[index] else ""
    return f"{prompts[index]}{negative}\n{named}".strip()
