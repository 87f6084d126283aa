"""One image's sampling by Neo's own functions, and how long each part of it takes. No text encoder, no VAE."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..clock import synchronize
from .host import Checkpoint, Size

CFG_SCALE = 7.0
LAST_TIMESTEP = 999
PROMPT_SEED, NEGATIVE_SEED, NOISE_SEED = 11, 12, 100
# Where one call is compared: both noise and image are in the latent.
COMPARED_SIGMA = 2.0


class Hooks:
    """What a variant does around a sampling."""

    def before(self, p: Any) -> None:
        """The host's scripts are called: before the model is loaded to the device."""

    def after(self, p: Any) -> None:
        """The generation is over."""


@dataclass
class Image:
    """latent: in float32 on the CPU."""

    latent: Tensor
    seconds: float
    step_ms: list[float] = field(default_factory=list)


class StepClock:
    """Milliseconds between marks: by events on a GPU, without waiting for it, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Known once the device is done."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [begin.elapsed_time(end) if self._gpu else (end - begin) * 1e3 for begin, end in pairs]


@torch.inference_mode()
def generate(
    checkpoint: Checkpoint, hooks: Hooks, size: Size, steps: int, seed: int = NOISE_SEED,
    first: Callable[[], None] | None = None,
) -> Image:
    """An image of so many Euler steps with guidance. first: what the user has changed, done within its time."""
    from backend.sampling.sampling_function import sampling_function_inner

    noise, prompts = checkpoint.noise(size, seed), conditions(checkpoint)
    synchronize(checkpoint.device)
    began = time.perf_counter()
    if first is not None:
        first()
    with sampling(checkpoint, hooks, noise) as patcher:
        sigmas = schedule(checkpoint, steps)
        x, clock = noise * (sigmas[0] ** 2 + 1) ** 0.5, StepClock(checkpoint.device)
        clock.mark()
        for step in range(steps):
            sigma = sigmas[step]
            denoised = sampling_function_inner(
                patcher.model, x, sigma.expand(1), prompts[1], prompts[0], CFG_SCALE, patcher.model_options
            )
            x = x + (x - denoised) / sigma * (sigmas[step + 1] - sigma)
            clock.mark()
    synchronize(checkpoint.device)
    seconds = time.perf_counter() - began
    return Image(x.float().cpu().clone(), seconds, clock.milliseconds())


@contextlib.contextmanager
def sampling(checkpoint: Checkpoint, hooks: Hooks, noise: Tensor) -> Iterator[Any]:
    """The UNet's patcher inside a sampling as the host begins and ends every one: its objects are copied again, the
    scripts are called, and the model is loaded."""
    from backend.sampling.sampling_function import sampling_cleanup, sampling_prepare

    checkpoint.forge_objects = checkpoint.forge_objects_after_applying_lora.shallow_copy()
    p = SimpleNamespace(sd_model=checkpoint, is_hr_pass=False)
    hooks.before(p)
    patcher = checkpoint.forge_objects.unet
    sampling_prepare(patcher, noise)
    yield patcher
    sampling_cleanup(patcher)
    hooks.after(p)


def conditions(checkpoint: Checkpoint) -> list[Any]:
    from backend.sampling.condition import compile_conditions

    return [compile_conditions(checkpoint.condition(seed)) for seed in (PROMPT_SEED, NEGATIVE_SEED)]


def schedule(checkpoint: Checkpoint, steps: int) -> Tensor:
    """Noise levels from the highest to none, as many as there are steps and one more."""
    predictor = checkpoint.forge_objects.unet.model.predictor
    levels = predictor.sigma(torch.linspace(LAST_TIMESTEP, 0, steps)).to(checkpoint.device)
    return torch.cat([levels, levels.new_zeros(1)])


@torch.inference_mode()
def one_call(checkpoint: Checkpoint, hooks: Hooks, size: Size) -> Tensor:
    """The UNet's own output, for the prompt and for the negative prompt, in a sampling of one call."""
    from backend.sampling.sampling_function import calc_cond_uncond_batch

    x, prompts = COMPARED_SIGMA * checkpoint.noise(size, NOISE_SEED), conditions(checkpoint)
    sigma = torch.full((1,), COMPARED_SIGMA, device=checkpoint.device)
    with sampling(checkpoint, hooks, x) as patcher:
        predictions = calc_cond_uncond_batch(patcher.model, *prompts, x, sigma, patcher.model_options)
        return torch.cat([(x - denoised) / COMPARED_SIGMA for denoised in predictions]).float().cpu().clone()


@torch.inference_mode()
def exact_call(checkpoint: Checkpoint, size: Size) -> Tensor:
    """The same call by the host's forward in float32, from inputs and from the loaded weights as they are rounded."""
    model = checkpoint.forge_objects.unet.model
    x = COMPARED_SIGMA * checkpoint.noise(size, NOISE_SEED)
    sigma = torch.full((1,), COMPARED_SIGMA, device=checkpoint.device)
    unet = checkpoint.new_unet(checkpoint.device, torch.float32)
    unet.load_state_dict(model.diffusion_model.state_dict())
    inputs = model.predictor.calculate_input(sigma, x).to(checkpoint.dtype).float().repeat(2, 1, 1, 1)
    found = [checkpoint.condition(seed) for seed in (PROMPT_SEED, NEGATIVE_SEED)]
    arguments: dict[str, Tensor] = {}
    if isinstance(found[0], dict):
        arguments["y"] = torch.cat([each["vector"] for each in found]).float()
        found = [each["crossattn"] for each in found]
    timesteps = model.predictor.timestep(sigma).float().repeat(2)
    output = unet(inputs, timesteps, context=torch.cat(found).float(), transformer_options={}, **arguments)
    return output.float().cpu().clone()
