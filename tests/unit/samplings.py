"""Samplings of a UNet in the care of a runtime of its own, as a WebUI announces them."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from builders import SMALL, diffusers_output, diffusers_unet, our_output
from deepcache_builders import STEPS, WEBUI, call_of
from torch import Tensor

from lib_onediff.core.call import Call
from lib_onediff.core.rows import PromptRows, half_of, take_rows
from lib_onediff.core.sampling import Sampling
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import Runtime

# What answers a call: a forecast, the prompt's rows alone, or the whole UNet.
FORECAST, ALONE, WHOLE = "forecast", "prompt alone", "whole"
ON: dict[str, dict[str, Any]] = {
    "forecast": {"deepcache_interval": 3, "deepcache_depth": 0}, "guidance": {"guidance_end": 0.5},
}


@dataclass
class Samplings:
    """host_rows: of the calls that the host's own UNet has made."""

    policy: str
    config: dict[str, Any]
    runtime: Runtime
    unet: Any
    prompt_first: bool = False
    host_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, policy: str, config: dict[str, Any] = SMALL, prompt_first: bool = False, **options: Any) -> Samplings:
        """policy: that is on, unless options say otherwise."""
        runtime, unet = Runtime(), diffusers_unet(**config)
        runtime.configure(Settings(**{**ON[policy], **options}))
        runtime.adopt(unet, host_traits=WEBUI)
        return cls(policy, config, runtime, unet, prompt_first)

    def begin(self, times: Any = STEPS, **more: Any) -> None:
        known = {"why_no_forecast": lambda: "", **more}
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: times, **known))

    def call(self, time: float, images: int = 1, **more: Any) -> Call:
        """Of a step: the same latents for the prompt and for the negative prompt, or as more says, see call_of."""
        if more:
            return call_of(self.unet, time, **more)
        call = call_of(self.unet, time, ["cat", "dog", "ugly", "bad"][:images] + ["ugly", "bad"][:images])
        return replace(call, latent=call.latent[:images].repeat(2, 1, 1, 1))

    def host(self, call: Call) -> Tensor:
        """diffusers' own forward; for what it takes in other ways, ours by a UNet of its own."""
        self.host_rows.append(call.latent.shape[0])
        if call.control is None:
            return diffusers_output(self.unet, call)
        return our_output(diffusers_unet(**self.config), call)

    def rows(self, call: Call) -> PromptRows:
        rows = half_of(call.latent.shape[0], self.prompt_first)
        return PromptRows(rows, lambda: self.host(take_rows(call, rows)))

    @torch.no_grad()
    def run(self, call: Call, guidance: Callable[[], PromptRows | str] | None = None) -> tuple[str, Tensor]:
        before = self.runtime.status()
        output = self.runtime.run(
            self.unet, call, lambda: self.host(call), guidance=guidance or (lambda: self.rows(call))
        )
        after = self.runtime.status()
        assert after["route"] != "host", after["reason"]
        if after["forecast"]["calls"] > before["forecast"]["calls"]:
            return FORECAST, output
        is_alone = after["guidance"]["without_negative"] > before["guidance"]["without_negative"]
        return ALONE if is_alone else WHOLE, output

    def sample(self, times: Iterable[float] = STEPS, **more: Any) -> list[str]:
        return [self.run(self.call(time, **more))[0] for time in times]

    @property
    def reason(self) -> str:
        return str(self.runtime.status()[self.policy]["reason"])
