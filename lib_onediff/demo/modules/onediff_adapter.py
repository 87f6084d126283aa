"""OneDiff's adapter for the demo, whose model is a diffusers pipeline: OneDiff's forwards replace those of its network
and its VAE. hosts/__init__.py finds the adapter by the name of this module.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.call import Call
from ...core.key import LATENT_PIXEL
from ...core.refusal import Refusal
from ...hosts.contract import WebUI, random_state_kept
from ...hosts.diffusers import unet as diffusers_host
from ...hosts.diffusers import vae as diffusers_decoder
from ...hosts.diffusers.module_forward import attached
from ...hosts.diffusers.schedule import sampling_of
from ...runtime.runtime import runtime

# The numbers of SDXL's time_ids: original size, crop and target size, two each.
NUMBERS_OF_A_LABEL = 6


def release() -> str:
    """The demo's name for messages, in place of a WebUI's name and release."""
    return "OneDiff's own WebUI"


class Standalone(WebUI):
    """The demo's adapter. hosts.contract.WebUI describes the methods."""

    name = "standalone"
    _serving = False

    def serve(self) -> None:
        """Serve the calls of the loaded model, and of those that are loaded later, until stop()."""
        self._serving = True
        self.model_loaded(self.checkpoint())

    def network(self, checkpoint: Any) -> Any:
        """The UNet or transformer of a LoadedModel; None if no model is loaded."""
        return getattr(checkpoint, "unet", None)

    def unet_of(self, checkpoint: Any) -> Any:
        """The network of a LoadedModel if OneDiff serves its class; otherwise None."""
        unet = self.network(checkpoint)
        return unet if diffusers_host.is_served(unet) else None

    def stop(self) -> None:
        """Undo serve(): give the loaded model its own forwards back, and let the runtime release all networks."""
        self._serving = False
        unet = self.unet_of(self.checkpoint())
        if unet is not None:
            runtime.guard.attempt("restoring the UNet", lambda: diffusers_host.detach(unet))
        for half in diffusers_decoder.halves_of(getattr(self.checkpoint(), "pipeline", None)):
            runtime.guard.attempt("restoring the VAE", partial(diffusers_decoder.detach, half))
        runtime.guard.attempt("restoring the UNets' weights", runtime.release_all)

    def hooks(self) -> int:
        """1 while the loaded model's network has our forward, otherwise 0; for the status."""
        unet = self.unet_of(self.checkpoint())
        return int(unet is not None and attached(unet) is not None)

    def model_loaded(self, sd_model: Any) -> None:
        """Called when a LoadedModel is loaded, and before each sampling. Between serve() and stop(), its VAE and its
        network, if OneDiff serves the network's class, get our forwards. Does nothing for None."""
        unet = self.unet_of(sd_model)
        if unet is not None and self._serving:
            diffusers_host.attach(unet)
        if self._serving:
            for half in diffusers_decoder.halves_of(getattr(sd_model, "pipeline", None)):
                diffusers_decoder.attach(half)

    def before_sampling(self, p: Any) -> None:
        """Called before each sampling of the generation p: tell the runtime that a sampling of the loaded model's
        network begins. Nothing is told if OneDiff does not serve the network's class."""
        self.model_loaded(self.checkpoint())
        unet = self.unet_of(self.checkpoint())
        generation = weakref.ref(p)

        def scheduler() -> Any:
            return getattr(generation(), "sampler", None)

        if unet is not None:
            scale = getattr(p, "cfg_scale", None)
            runtime.begin_sampling(unet, sampling_of(scheduler, None if scale is None else float(scale)))
            diffusers_host.note_pipeline(unet, lambda: getattr(generation(), "pipeline", None))

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one call of the network with random inputs, so that OneDiff makes the shape ready. Arguments and errors:
        see WebUI.warm. torch's random state stays as it is."""
        unet = self.unet_of(self.checkpoint())
        if unet is None:
            raise Refusal(self.why_not_served() or "no model is loaded yet")
        self.model_loaded(self.checkpoint())
        noise = lambda *shape: torch.randn(shape, device=unet.device, dtype=unet.dtype)  # noqa: E731
        call = self.call_to_warm(width, height, batch, tokens, noise)
        is_unet = self.checkpoint().is_unet
        arguments = arguments_of(unet, call, noise) if is_unet else arguments_of_transformer(call, tokens)
        with random_state_kept(), torch.no_grad():
            unet(**arguments)

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode a random latent, so that OneDiff makes the VAE's shape ready. width, height: in pixels. images: not
        used, because the images of a batch are decoded one by one. A model must be loaded."""
        model = self.checkpoint()
        vae = model.pipeline.vae
        with random_state_kept(), torch.no_grad():
            # LoadedModel.decode takes the images of a batch one by one, so one is enough.
            shape = 1, vae.config.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL
            model.decode(torch.randn(shape, dtype=vae.dtype, device=vae.device))


def arguments_of(unet: Any, call: Call, noise: Callable[..., Tensor]) -> dict[str, Any]:
    """The keyword arguments with which a diffusers pipeline would make this call of a UNet; SDXL's time_ids are random.
    noise: returns a random tensor, given its sizes."""
    context, *labels = call.prompt
    conditions = None
    for label in labels:
        text = label.shape[1] - NUMBERS_OF_A_LABEL * unet.config.addition_time_embed_dim
        conditions = {"text_embeds": label[:, :text], "time_ids": noise(len(label), NUMBERS_OF_A_LABEL)}
    return {
        "sample": call.latent, "timestep": call.timestep[0].long(), "encoder_hidden_states": context,
        "added_cond_kwargs": conditions,
    }


def arguments_of_transformer(call: Call, tokens: int) -> dict[str, Any]:
    """The keyword arguments with which FlowPipeline would make this call of its transformer. tokens: the prompt's
    length, to which the call's context is cut."""
    [context] = call.prompt
    return {
        "hidden_states": call.latent, "timestep": call.timestep, "encoder_hidden_states": context[:, :tokens],
    }
