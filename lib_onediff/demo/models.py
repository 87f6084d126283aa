"""The model that the host runs: a diffusers folder, a single checkpoint file, or the one that ships with us."""
from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.logs import one_line
from ..core.refusal import Refusal
from ..hosts.diffusers.model_folder import load_folder
from . import SHIPPED
from .single_file import load_checkpoint

ABOUT_SHIPPED = (
    "Draws emoji: try “a red apple on a blue background” or “an owl and a rocket”. "
    "Start with --model FILE_OR_FOLDER for your own."
)
LATENT_CHANNELS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16 if torch.cuda.is_available() else torch.float32


@dataclass(eq=False)
class LoadedModel:
    """A diffusers pipeline and its name, as scripts see it in shared.sd_model.

    about: what the user should know of the model, in a sentence or two; empty for one that the user has chosen.
    """

    pipeline: Any
    name: str
    about: str = ""

    @property
    def unet(self) -> Any:
        """The UNet, a diffusers UNet2DConditionModel."""
        return self.pipeline.unet

    @property
    def side(self) -> int:
        """The side in pixels of the square images that the model was made for."""
        return self.unet.config.sample_size * 2 ** (len(self.pipeline.vae.config.block_out_channels) - 1)

    @cached_property
    def text_pipeline(self) -> Any:
        """A pipeline of the same parts that makes images from text. Raises Refusal where the model needs more."""
        import diffusers

        if self.unet.config.in_channels != LATENT_CHANNELS:
            raise Refusal(f"{self.name} is an inpainting model: it needs a mask, which this page does not take.")
        return diffusers.AutoPipelineForText2Image.from_pipe(self.pipeline)

    def decode(self, latents: Tensor) -> Tensor:
        """(batch, 3, height, width) pixels from 0 to 1 in float32 on the CPU, decoded one image at a time. SDXL's VAE
        overflows in float16."""
        vae = self.pipeline.vae
        if vae.config.force_upcast:
            vae.to(torch.float32)
        latents = latents.to(vae.dtype) / vae.config.scaling_factor
        mean, deviation = getattr(vae.config, "latents_mean", None), getattr(vae.config, "latents_std", None)
        if mean is not None and deviation is not None:
            deviation, mean = (latents.new_tensor(values).view(1, -1, 1, 1) for values in (deviation, mean))
            latents = latents * deviation + mean
        decoded = torch.cat([vae.decode(latent[None]).sample for latent in latents])
        return (decoded.float().cpu() / 2 + 0.5).clamp(0, 1)


def load_model(path: str | None) -> LoadedModel:
    """The model at path, on the host's device; without a path the one that ships with us. Raises Refusal with a
    sentence for the user when it cannot be loaded."""
    from diffusers.utils import logging

    location = SHIPPED if path is None else Path(path).expanduser()
    if not location.exists():
        raise Refusal(f"There is no model file or folder {path}.")
    is_folder = location.is_dir()
    logging.disable_progress_bar()
    try:
        pipeline = (load_folder if is_folder else load_checkpoint)(location, DTYPE).to(DEVICE, DTYPE)
    except Refusal:
        raise
    except Exception as error:
        # Loaders raise dozens of kinds for damaged files.
        first_sentence = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        cause = textwrap.shorten(first_sentence, 200, placeholder=" ...").rstrip(".")
        raise Refusal(f"The model {location.name} cannot be loaded; it may be damaged ({cause}).") from error
    if pipeline.text_encoder is None:
        raise Refusal(f"The model {location.name} is a refiner: it needs an image, which this page does not take.")
    name = location.resolve().name if is_folder else location.stem
    return LoadedModel(pipeline, one_line(name), ABOUT_SHIPPED if path is None else "")
