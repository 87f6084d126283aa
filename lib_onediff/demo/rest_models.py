"""The bodies of the REST API, in A1111's names; null means the default."""
from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .images import from_base64
from .refusal import Refusal

NOT_SERVED = {
    "enable_hr": "hires fix",
    "refiner_checkpoint": "the refiner switch",
    "tiling": "tiling",
    "restore_faces": "face restoration",
    "styles": "styles",
    "subseed_strength": "variation seeds",
    "script_name": "selectable scripts",
}
# What a StableDiffusionProcessing takes as it comes.
ARGUMENTS = {
    "prompt", "negative_prompt", "seed", "subseed", "batch_size", "n_iter", "steps", "cfg_scale", "width", "height",
    "override_settings", "override_settings_restore_afterwards", "scheduler",
}
IMAGE_ARGUMENTS = {"denoising_strength", "resize_mode", "mask_blur", "inpainting_mask_invert"}


class GenerationRequest(BaseModel):
    """What txt2img and img2img have in common."""

    prompt: str | None = ""
    negative_prompt: str | None = ""
    seed: int | None = -1
    subseed: int | None = -1
    sampler_name: str | None = None
    sampler_index: str | None = "Euler"
    scheduler: str | None = None
    batch_size: int | None = 1
    n_iter: int | None = 1
    steps: int | None = 50
    cfg_scale: float | None = 7.0
    width: int | None = 512
    height: int | None = 512
    override_settings: dict[str, Any] | None = None
    override_settings_restore_afterwards: bool | None = True
    send_images: bool | None = True
    save_images: bool | None = False
    alwayson_scripts: dict[str, Any] | None = None
    enable_hr: bool | None = False
    refiner_checkpoint: str | None = None
    tiling: bool | None = False
    restore_faces: bool | None = False
    styles: list[str] | None = None
    subseed_strength: float | None = 0
    script_name: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of a StableDiffusionProcessing. Raises Refusal for what this host does not serve."""
        for name, feature in NOT_SERVED.items():
            if getattr(self, name):
                raise Refusal(f"This host does not serve {feature} ({name}).")
        sampler = self.sampler_name or self.sampler_index
        given = self.model_dump(include=ARGUMENTS, exclude_none=True)
        return {
            **given, "do_not_save_samples": not self.save_images, **({"sampler_name": sampler} if sampler else {}),
        }


class Txt2ImgRequest(GenerationRequest):
    """POST /sdapi/v1/txt2img."""


class Img2ImgRequest(GenerationRequest):
    """POST /sdapi/v1/img2img; images are base64. Inpainting repaints the whole image, starting from the original."""

    init_images: list[str] | None = None
    denoising_strength: float | None = 0.75
    resize_mode: int | None = 0
    mask: str | None = None
    mask_blur: int | None = 4
    inpainting_mask_invert: int | None = 0
    inpainting_fill: int | None = None
    inpaint_full_res: bool | None = None
    include_init_images: bool | None = False

    def arguments(self) -> dict[str, Any]:
        if self.mask and self.inpainting_fill not in (None, 1):
            raise Refusal("inpainting_fill must be 1 here: masked parts start from the original image.")
        if self.mask and self.inpaint_full_res:
            raise Refusal("inpaint_full_res is not served here: masked images are repainted at their full size.")
        # A1111 refuses them too. What is not used is not opened.
        if len(self.init_images or []) > max(1, self.batch_size or 1):
            raise Refusal("There are more init images than images in a batch (batch_size).")
        images = [from_base64(image) for image in self.init_images or []]
        mask = from_base64(self.mask) if self.mask else None
        given = self.model_dump(include=IMAGE_ARGUMENTS, exclude_none=True)
        return {**super().arguments(), **given, "init_images": images, "mask": mask}


class GenerationResponse(BaseModel):
    """images: base64 PNG files; parameters: the request; info: JSON text with infotexts and seeds."""

    images: list[str]
    parameters: dict[str, Any]
    info: str
