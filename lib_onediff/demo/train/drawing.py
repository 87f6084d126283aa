"""Drawing with the model in its folder, many captions at once."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .networks import LATENT_CHANNELS, REDUCTION, make_schedule
from .setup import Setup
from .vae_stage import decoded
from .vocabulary import read_tokenizer, tokens_of

STEPS, GUIDANCE = 20, 4.0


class Painter:
    """The model in float32, under autocast on a GPU."""

    def __init__(self, setup: Setup) -> None:
        from diffusers import AutoencoderKL, UNet2DConditionModel
        from transformers import CLIPTextModel

        self._setup = setup
        kinds: dict[str, Any] = {"unet": UNet2DConditionModel, "text_encoder": CLIPTextModel, "vae": AutoencoderKL}
        parts = {
            name: kind.from_pretrained(setup.model / name, local_files_only=True).to(setup.device, torch.float32).eval()
            for name, kind in kinds.items()
        }
        self._unet, self._text, self._vae = parts["unet"], parts["text_encoder"], parts["vae"]
        self._tokenizer = read_tokenizer(setup.model / "tokenizer")

    @torch.no_grad()
    def draw(
        self, captions: list[str], seeds: list[int], height: int = 256, width: int = 256, steps: int = STEPS,
        guidance: float = GUIDANCE, at_once: int = 64,
    ) -> Tensor:
        """(n, 3, height, width) from -1 to 1: each caption with its seed, by DDIM."""
        found = [
            self._draw(captions[part : part + at_once], seeds[part : part + at_once], height, width, steps, guidance)
            for part in range(0, len(captions), at_once)
        ]
        return torch.cat(found)

    def _draw(
        self, captions: list[str], seeds: list[int], height: int, width: int, steps: int, guidance: float
    ) -> Tensor:
        device = self._setup.device
        tokens = torch.tensor(tokens_of(self._tokenizer, [""] * len(captions) + captions), device=device)
        shape = (LATENT_CHANNELS, height // REDUCTION, width // REDUCTION)
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        with self._setup.autocast():
            context = self._text(tokens).last_hidden_state
            latents = denoised(self._unet, noise.to(device), context, steps, guidance)
        return decoded(self._setup, self._vae, latents)


@torch.no_grad()
def denoised(unet: Any, latents: Tensor, context: Tensor, steps: int, guidance: float) -> Tensor:
    """What DDIM makes of noise. context: of the empty captions, then of the others."""
    schedule = make_schedule()
    schedule.set_timesteps(steps)
    for step in schedule.timesteps:
        times = step.to(latents.device).expand(2 * len(latents))
        both = unet(torch.cat([latents, latents]), times, context, return_dict=False)[0]
        without, with_caption = both.float().chunk(2)
        latents = schedule.step(without + guidance * (with_caption - without), step, latents).prev_sample
    return latents
