"""A text-to-image pipeline for a transformer that was trained by flow matching (CosmosTransformer3DModel), with CLIP's
text encoder and Stable Diffusion's VAE: emoji-dit. diffusers has no pipeline with these parts."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import CosmosTransformer3DModel, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from ..hosts.diffusers.model_files import read_json
from ..hosts.diffusers.model_folder import load_folder, load_network
from . import EMOJI_DIT, SHIPPED

# The text encoder's tokens of a prompt.
MOST_TOKENS = 77
# The pixels of an image's side for each number of a latent's side.
LATENT_PIXEL = 8


class FlowPipeline(DiffusionPipeline):
    """emoji-dit's pipeline; it is called like diffusers' own pipelines. The transformer gets the scheduler's timesteps
    unscaled: noise levels from 1 to 0.

    default_side: the width and height in pixels that the transformer was trained for.
    """

    default_side = 256

    def __init__(self, vae: Any, text_encoder: Any, tokenizer: Any, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer, scheduler=scheduler
        )
        self._guidance_scale = 1.0
        self._interrupt = False
        self.num_timesteps = 0

    @property
    def side_step(self) -> int:
        """The width and height of images must be multiples of this number of pixels."""
        return LATENT_PIXEL * int(self.transformer.config.patch_size[-1])

    @torch.no_grad()
    def __call__(
        self, prompt: Sequence[str], negative_prompt: Sequence[str] | None = None, *, width: int, height: int,
        num_inference_steps: int, guidance_scale: float, generator: Sequence[torch.Generator] = (),
        latents: Tensor | None = None, output_type: str = "pt", callback_on_step_end: Callable[..., Any] | None = None,
    ) -> Any:
        """Makes an image for each prompt. Returns an object whose attribute `images` is a tensor (prompts, 3, height,
        width) from 0 to 1; with output_type "latent", the latents.

        negative_prompt: one for each prompt, or None for empty ones; used only if guidance_scale is above 1. width,
        height: in pixels, multiples of side_step. generator: for each image a generator on the CPU, which draws its
        noise; not used if `latents` is given: the noise itself, (prompts, channels, height / 8, width / 8).
        callback_on_step_end: called with (pipeline, step index, noise level, {}); its result is ignored. It may set
        pipeline._interrupt, so that the remaining steps are skipped.
        """
        device = self._execution_device
        transformer = self.transformer
        self._guidance_scale = guidance_scale
        self._interrupt = False
        if latents is None:
            shape = transformer.config.in_channels, height // LATENT_PIXEL, width // LATENT_PIXEL
            noise = [torch.randn(shape, generator=one, dtype=torch.float32, device="cpu") for one in generator]
            latents = torch.stack(noise)
        latents = latents.to(device, torch.float32)
        is_guided = guidance_scale > 1
        context = self.context(list(prompt), list(negative_prompt or [""] * len(prompt)) if is_guided else [])
        # Noise levels at equal distances, from 1 (noise alone), as in diffusers' pipelines for flow matching.
        shares = torch.linspace(1, 1 / num_inference_steps, num_inference_steps, dtype=torch.float64, device="cpu")
        self.scheduler.set_timesteps(sigmas=shares.tolist(), device=device)
        self.num_timesteps = num_inference_steps
        with self.progress_bar(total=num_inference_steps) as bar:
            for index, share in enumerate(self.scheduler.timesteps):
                if self._interrupt:
                    continue
                velocity = self.velocity(latents, share, context, guidance_scale)
                latents = self.scheduler.step(velocity, share, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    callback_on_step_end(self, index, share, {})
                bar.update()
        return SimpleNamespace(images=latents if output_type == "latent" else self.decode(latents))

    def velocity(self, latents: Tensor, share: Tensor, context: Tensor, guidance_scale: float) -> Tensor:
        """The velocity that the transformer predicts, (batch, channels, height, width) in float32.

        latents: of this shape. share: the noise level, from 0 to 1, a tensor with one number. context: see context().
        If the context has rows for negative prompts, the prediction is guided by guidance_scale; otherwise
        guidance_scale is not used.
        """
        is_guided = len(context) > len(latents)
        rows = torch.cat([latents, latents]) if is_guided else latents
        output = self.transformer(
            hidden_states=rows[:, :, None].to(self.transformer.dtype), timestep=share.expand(len(rows)),
            encoder_hidden_states=context, return_dict=False,
        )[0]
        found = output[:, :, 0].float()
        if not is_guided:
            return found
        negative, positive = found.chunk(2)
        return negative + guidance_scale * (positive - negative)

    def context(self, prompts: list[str], negative: list[str]) -> Tensor:
        """The text encoder's output, (rows, tokens, width) in the transformer's dtype: a row for each negative prompt
        ([] for none), then one for each prompt. Always MOST_TOKENS tokens; longer prompts are cut."""
        tokens = self.tokenizer(
            negative + prompts, padding="max_length", truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        )
        encoded = self.text_encoder(tokens["input_ids"].to(self._execution_device)).last_hidden_state
        context: Tensor = encoded.to(self.transformer.dtype)
        return context

    def decode(self, latents: Tensor) -> Tensor:
        """The images of latents as the transformer computes them, (batch, 3, height, width) in float32 from 0 to 1."""
        vae = self.vae
        images = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor).sample
        return (images.float() / 2 + 0.5).clamp(0, 1)


def load_emoji_dit(dtype: torch.dtype) -> FlowPipeline:
    """A pipeline of emoji-dit from this checkout, with the text encoder and the VAE of emoji-sd; all weights in dtype,
    on the CPU."""
    parts = load_folder(SHIPPED, dtype)
    transformer = load_network(EMOJI_DIT / "transformer", CosmosTransformer3DModel, dtype)
    config = read_json(EMOJI_DIT / "scheduler" / "scheduler_config.json")
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    return FlowPipeline(parts.vae, parts.text_encoder, parts.tokenizer, transformer, scheduler)
