"""The standalone host: its model is a diffusers pipeline, so our forward goes on its UNet and its VAE.

OneDiff finds the adapter of this host here, as it finds those of others by the modules that they offer.
"""
from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from ...hosts.diffusers import schedule as diffusers_schedule
from ...hosts.diffusers import unet as diffusers_host
from ...hosts.diffusers import vae as diffusers_decoder
from ...hosts.diffusers.instance_forward import attached
from ...hosts.webui import PROMPT_NOISE, WebUI, network_name, random_state_kept
from ...model.layout import UNetLayout, UnsupportedUNet
from ...prewarm.job import CannotWarm
from ...runtime.runtime import runtime
from ...shapes.key import LATENT_PIXEL

MIDDLE_OF_THE_SCHEDULE = 500
# Sizes, crop and target; the refiner takes a score in place of the target's two.
NUMBERS_OF_A_LABEL = {False: 6, True: 5}


class Standalone(WebUI):
    """The adapter; see hosts.webui.WebUI."""

    name, release = "standalone", "OneDiff's own WebUI"

    def __init__(self) -> None:
        self._serving = False

    def serve(self) -> None:
        self._serving = True
        self.model_loaded(loaded_model())

    def stop(self) -> None:
        self._serving = False
        model = loaded_model()
        if model is not None:
            runtime.guard.attempt("giving the UNet back", lambda: diffusers_host.detach(model.unet))
            for half in diffusers_decoder.halves_of(model.pipeline):
                runtime.guard.attempt("giving the VAE back", partial(diffusers_decoder.detach, half))
        runtime.guard.attempt("giving the UNets back", runtime.release_all)

    def hooks(self) -> int:
        model = loaded_model()
        return int(model is not None and attached(model.unet) is not None)

    def model_loaded(self, sd_model: Any) -> None:
        if self._serving and sd_model is not None:
            diffusers_host.attach(sd_model.unet)
            for half in diffusers_decoder.halves_of(sd_model.pipeline):
                diffusers_decoder.attach(half)

    def before_sampling(self, p: Any) -> None:
        model, generation = loaded_model(), weakref.ref(p)
        self.model_loaded(model)
        runtime.begin_sampling(model.unet, diffusers_schedule.sampling_to_come(p))
        diffusers_host.note_pipeline(model.unet, lambda: getattr(generation(), "pipeline", None))
        runtime.vae.begin_run()

    def after_run(self, p: Any) -> None:
        # diffusers calls the UNet's own forward, which nobody bypasses here.
        runtime.vae.end_run()
        runtime.end_sampling()

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        model = loaded_model()
        if model is None:
            raise CannotWarm("no model is loaded yet")
        self.model_loaded(model)
        unet = model.unet
        try:
            layout = runtime.layout_of(unet)
        except UnsupportedUNet as reason:
            raise CannotWarm(str(reason)) from reason
        with random_state_kept(), torch.no_grad():
            unet(**random_inputs(unet, layout, width, height, batch, tokens))

    def warm_decode(self, width: int, height: int, images: int) -> None:
        model = loaded_model()
        vae = model.pipeline.vae
        with random_state_kept(), torch.no_grad():
            # One image after the other, however many there are.
            latent = torch.randn((1, vae.config.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL))
            model.decode(latent.to(vae.device, vae.dtype))

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        # A pipeline puts both halves of the guidance into one call, and makes no other half without it.
        return (2 * images, tokens), (images, tokens)

    def model_name(self, sd_model: Any = None) -> str | None:
        model = sd_model or loaded_model()
        return None if model is None else network_name(model.unet)


def random_inputs(
    unet: Any, layout: UNetLayout, width: int, height: int, batch: int, tokens: int
) -> dict[str, Any]:
    """The arguments of one call as a pipeline makes it, at a size in pixels."""
    noise = lambda *shape: torch.randn(shape, device=unet.device, dtype=unet.dtype)  # noqa: E731
    label = None
    if layout.label is not None:
        numbers = NUMBERS_OF_A_LABEL[layout.model_name == "SDXL refiner"]
        text = layout.y_width - numbers * unet.config.addition_time_embed_dim
        label = {"text_embeds": PROMPT_NOISE * noise(batch, text), "time_ids": noise(batch, numbers)}
    return {
        "sample": noise(batch, layout.in_channels, height // LATENT_PIXEL, width // LATENT_PIXEL),
        "timestep": torch.tensor(MIDDLE_OF_THE_SCHEDULE, device=unet.device),
        "encoder_hidden_states": PROMPT_NOISE * noise(batch, tokens, layout.context_width), "added_cond_kwargs": label,
    }


def loaded_model() -> Any:
    from modules import sd_models

    # shared.sd_model would load one.
    return sd_models.model_data.sd_model
