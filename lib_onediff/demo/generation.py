"""Running a diffusers pipeline for a generation: noise, sampling and decoding."""
from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .modules import shared
from .modules.sd_samplers import make_scheduler
from .prompts import EncodedPrompts, is_sdxl


def generators(seeds: list[int]) -> list[torch.Generator]:
    """One random generator per image, on the CPU: a seed means the same image on every device and in any batch."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def noise(p: Any, generators: list[torch.Generator]) -> Tensor:
    """The start of the sampling, (batch, 4, height / 8, width / 8), unit noise on the model's device."""
    unet = p.sd_model.unet
    shape = (unet.config.out_channels, p.height // 8, p.width // 8)
    rows = [torch.randn(shape, generator=generator) for generator in generators]
    return torch.stack(rows).to(unet.device, unet.dtype)


def from_text(
    p: Any, positive: EncodedPrompts, negative: EncodedPrompts, start: Tensor, generators: list[torch.Generator]
) -> Tensor:
    """Latents of a batch of txt2img images."""
    inputs = {"latents": start, "width": p.width, "height": p.height}
    return run(p, p.sd_model.text_to_image(), positive, negative, generators, **inputs)


def from_image(p: Any, positive: EncodedPrompts, negative: EncodedPrompts, generators: list[torch.Generator]) -> Tensor:
    """Latents of a batch of img2img images; with p.mask only what is white in it is repainted."""
    count = len(generators)
    images = (p.init_images * count)[:count]
    inputs = {"image": images, "strength": p.denoising_strength}
    if p.mask is None:
        return run(p, p.sd_model.image_to_image(), positive, negative, generators, **inputs)
    inputs.update(mask_image=[p.mask] * count, width=p.width, height=p.height)
    return run(p, p.sd_model.inpaint(), positive, negative, generators, **inputs)


def run(
    p: Any,
    pipeline: Any,
    positive: EncodedPrompts,
    negative: EncodedPrompts,
    generators: list[torch.Generator],
    **inputs: Any,
) -> Tensor:
    """Call a diffusers pipeline and return its latents; progress and interrupt go through shared.state."""
    pipeline.scheduler = make_scheduler(p.sampler_name, p.scheduler, p.sd_model.scheduler_config, p.seeds)
    p.pipeline, p.sampler = pipeline, pipeline.scheduler
    pipeline.set_progress_bar_config(disable=True)
    shared.state.sampling_step, shared.state.sampling_steps = 0, p.steps
    if is_sdxl(pipeline):
        inputs.update(pooled_prompt_embeds=positive.pooled, negative_pooled_prompt_embeds=negative.pooled)
    return pipeline(
        prompt_embeds=positive.context,
        negative_prompt_embeds=negative.context,
        num_inference_steps=p.steps,
        guidance_scale=p.cfg_scale,
        generator=generators,
        output_type="latent",
        callback_on_step_end=note_step,
        **inputs,
    ).images


def note_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tell the progress endpoint where the sampling is, and stop it when the user asked for that."""
    state = shared.state
    state.sampling_step, state.sampling_steps = step + 1, pipeline.num_timesteps
    if state.interrupted or state.skipped:
        pipeline._interrupt = True
    return tensors


def decode(model: Any, latents: Tensor) -> Tensor:
    """(batch, 3, height, width) pixels from 0 to 1 in float32 on the CPU, decoded one image at a time."""
    vae = model.pipeline.vae
    if vae.config.force_upcast and vae.dtype == torch.float16:
        vae.to(torch.float32)
    latents = latents.to(vae.dtype) / vae.config.scaling_factor
    mean, deviation = getattr(vae.config, "latents_mean", None), getattr(vae.config, "latents_std", None)
    if mean is not None and deviation is not None:
        deviation, mean = (latents.new_tensor(values).view(1, -1, 1, 1) for values in (deviation, mean))
        latents = latents * deviation + mean
    decoded = torch.cat([vae.decode(latent[None]).sample for latent in latents])
    return (decoded.float().cpu() / 2 + 0.5).clamp(0, 1)


def to_image(p: Any, pixels: Tensor) -> Image.Image:
    """A PIL image of (3, height, width) pixels; around an inpainting mask the given image stays as it was."""
    image = Image.fromarray((pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    mask = getattr(p, "mask", None)
    return image if mask is None else Image.composite(image, p.init_images[0], mask)
