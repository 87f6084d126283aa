"""Forge's own ways to the UNet outside of a generation: its queue, its main thread, its memory management."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .webui import PROMPT_NOISE, CannotWarm, Result

LATENT_PIXEL = 8
# A timestep in the middle, where a UNet's output is of the size of its input.
TIMESTEP = 500.0


def exclusively(work: Callable[[], Result]) -> Result:
    """Run work() on Forge's main thread with its queue's lock held; raises what work() raises."""
    from modules.call_queue import queue_lock
    from modules_forge import main_thread

    if threading.current_thread() is threading.main_thread():
        return on_this_thread(work, queue_lock)
    results: list[Result] = []
    errors: list[Exception] = []

    def carried() -> None:
        # An exception would end in the log, and None would come back.
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    with queue_lock:
        main_thread.run_and_wait_result(carried)
    if errors:
        raise errors[0]
    return results[0]


def on_this_thread(work: Callable[[], Result], queue_lock: Any) -> Result:
    # Whoever holds the lock may be waiting for this very thread.
    if not queue_lock.acquire(blocking=False):
        raise CannotWarm("the WebUI is making a picture")
    try:
        return work()
    finally:
        queue_lock.release()


def selected_engine() -> Any:
    """The checkpoint that the next picture would be made with, loaded now if it is not. Raises CannotWarm."""
    from modules import sd_models

    try:
        engine, _ = sd_models.forge_model_reload()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CannotWarm(f"the checkpoint cannot be loaded: {reason}") from error
    return engine


def one_call(patcher: Any, width: int, height: int, batch: int, tokens: int) -> None:
    """Load the patcher's UNet as Forge does for a sampling, and call it once with random inputs of a size in pixels."""
    from backend.sampling.sampling_function import sampling_cleanup, sampling_prepare

    unet, device, dtype = patcher.model.diffusion_model, patcher.load_device, patcher.model.computation_dtype
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    with torch.inference_mode():
        latent = random(batch, unet.in_channels, height // LATENT_PIXEL, width // LATENT_PIXEL)
        # Forge plans memory for twice the pictures: the prompt and the negative prompt.
        sampling_prepare(patcher, latent[:(batch + 1) // 2])
        try:
            prompt = {"context": PROMPT_NOISE * random(batch, tokens, context_width(unet))}
            if unet.num_classes is not None:
                prompt["y"] = PROMPT_NOISE * random(batch, unet.config["adm_in_channels"])
            unet(
                latent, torch.full((batch,), TIMESTEP, device=device), control=None, transformer_options={}, **prompt
            )
        finally:
            sampling_cleanup(patcher)


def one_decode(engine: Any, width: int, height: int, pictures: int) -> None:
    """Decode random latents of so many pictures at once, as Forge does; not where it would put the UNet aside for it,
    which would then lie elsewhere when it comes back."""
    from backend import memory_management

    vae = engine.forge_objects.vae
    latent = torch.randn(
        (pictures, vae.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL),
        generator=torch.Generator().manual_seed(0),
    )
    needed = vae.memory_used_decode(latent.shape, vae.vae_dtype) + memory_management.module_size(vae.first_stage_model)
    if needed < memory_management.get_free_memory(vae.device):
        with torch.inference_mode():
            engine.decode_first_stage(latent)


def context_width(unet: Any) -> int:
    width = unet.config["context_dim"]
    return width[0] if isinstance(width, (list, tuple)) else width
