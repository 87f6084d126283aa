"""The model that the host has loaded, as scripts see it in shared.sd_model."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from .prompts import is_sdxl
from .refusal import Refusal

LATENT_CHANNELS = 4


@dataclass(eq=False)
class LoadedModel:
    """A diffusers pipeline and its name. Pipelines for the other kinds of generation share its parts.

    about: what the user should know of the model, in a sentence or two; empty for one that the user has chosen.
    """

    pipeline: Any
    name: str
    about: str = ""
    _pipelines: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def unet(self) -> Any:
        """The UNet, a diffusers UNet2DConditionModel."""
        return self.pipeline.unet

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """The configuration of the scheduler that the model came with."""
        return dict(self.pipeline.scheduler.config)

    @property
    def sd_checkpoint_info(self) -> SimpleNamespace:
        """What scripts ask about the checkpoint; no path."""
        return SimpleNamespace(name=self.name, name_for_extra=self.name, title=self.name, model_name=self.name)

    @property
    def sd_model_hash(self) -> str | None:
        """The checkpoint's hash: not computed here."""
        return None

    @property
    def is_sdxl(self) -> bool:
        return is_sdxl(self.pipeline)

    @property
    def side(self) -> int:
        """The side in pixels of the square images that the model was made for."""
        return self.unet.config.sample_size * 2 ** (len(self.pipeline.vae.config.block_out_channels) - 1)

    @property
    def takes_mask(self) -> bool:
        """Whether this is an inpainting model, whose UNet also takes the mask and the masked image."""
        return self.unet.config.in_channels != LATENT_CHANNELS

    @property
    def is_refiner(self) -> bool:
        return self.is_sdxl and self.pipeline.text_encoder is None

    def text_to_image(self) -> Any:
        """A pipeline for txt2img; Refusal for models that cannot do it."""
        if self.takes_mask:
            raise Refusal(f"{self.name} is an inpainting model: it needs img2img with a mask.")
        if self.is_refiner:
            raise Refusal(f"{self.name} is a refiner: it needs img2img.")
        return self._pipeline_for("Text2Image")

    def image_to_image(self) -> Any:
        """A pipeline for img2img without a mask; Refusal for models that need one."""
        if self.takes_mask:
            raise Refusal(f"{self.name} is an inpainting model: it needs a mask.")
        return self._pipeline_for("Image2Image")

    def inpaint(self) -> Any:
        """A pipeline for img2img with a mask."""
        return self._pipeline_for("Inpainting")

    def _pipeline_for(self, task: str) -> Any:
        import diffusers

        if task not in self._pipelines:
            self._pipelines[task] = getattr(diffusers, f"AutoPipelineFor{task}").from_pipe(self.pipeline)
        return self._pipelines[task]
