"""The host's own ways to the UNet outside of a generation: its queue, its main thread, its memory management."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from ...guard import first_line, outcome_of
from ...prewarm.job import CannotWarm
from ...runtime.runtime import runtime
from ...shapes.key import LATENT_PIXEL
from ..webui import PROMPT_NOISE, Result
from .traits import Traits

# A timestep in the middle, where a UNet's output is of the size of its input.
TIMESTEP = 500.0


def exclusively(work: Callable[[], Result]) -> Result:
    """Run work() on the host's main thread with its queue's lock held; raises what work() raises."""
    from modules.call_queue import queue_lock
    from modules_forge import main_thread

    if threading.current_thread() is threading.main_thread():
        return on_this_thread(work, queue_lock)
    outcomes: list[Future[Result]] = []
    with queue_lock:
        # An exception would end in the log, and None would come back.
        main_thread.run_and_wait_result(lambda: outcomes.append(outcome_of(work)))
    return outcomes.pop().result()


def on_this_thread(work: Callable[[], Result], queue_lock: Any) -> Result:
    # Whoever holds the lock may be waiting for this very thread.
    if not queue_lock.acquire(blocking=False):
        raise CannotWarm("the WebUI is making an image")
    try:
        return work()
    finally:
        queue_lock.release()


def selected_engine(traits: Traits) -> Any:
    """The checkpoint that the next image would be made with, loaded now if it is not. Raises CannotWarm."""
    try:
        return traits.selected_engine()
    except Exception as error:
        raise CannotWarm(f"the checkpoint cannot be loaded: {first_line(error)}") from error


def one_call(traits: Traits, patcher: Any, width: int, height: int, batch: int, tokens: int) -> None:
    """Load the patcher's UNet as the host does for a sampling, and call it once with random inputs of a size in pixels.

    Raises UnsupportedUNet for one that we cannot run.
    """
    sampling = traits.module(traits.sampling)
    unet, device = patcher.model.diffusion_model, patcher.load_device
    layout = runtime.layout_of(unet)
    dtype = traits.computation_dtype(patcher)
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    with torch.inference_mode():
        latent = random(batch, layout.in_channels, height // LATENT_PIXEL, width // LATENT_PIXEL)
        # The host plans memory for twice the images: the prompt and the negative prompt.
        sampling.sampling_prepare(patcher, latent[:(batch + 1) // 2])
        try:
            prompt = {"context": PROMPT_NOISE * random(batch, tokens, layout.context_width)}
            if layout.label is not None:
                prompt["y"] = PROMPT_NOISE * random(batch, layout.y_width)
            unet(
                latent, torch.full((batch,), TIMESTEP, device=device), control=None, transformer_options={}, **prompt
            )
        finally:
            sampling.sampling_cleanup(patcher)


def one_decode(traits: Traits, engine: Any, width: int, height: int, images: int) -> None:
    """Decode random latents of so many images at once, as the host does; not where it would put the UNet aside for it,
    which would then lie elsewhere when it comes back."""
    memory, vae = traits.module(traits.memory), engine.forge_objects.vae
    latent = torch.randn(
        (images, vae.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL),
        generator=torch.Generator().manual_seed(0),
    )
    needed = vae.memory_used_decode(latent.shape, vae.vae_dtype) + memory.module_size(vae.first_stage_model)
    if needed < memory.get_free_memory(vae.device):
        with torch.inference_mode():
            engine.decode_first_stage(latent)
