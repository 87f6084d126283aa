"""Which rows of a call a diffusers pipeline means for the prompt: with guidance, the second half."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from ...model.rows import half_of, rows_within

# These call with the negative prompt's rows first and as many of the prompt's after them. Others, of diffusers or of
# somebody else, may have three predictions an image, or another order.
TWO_HALVES = frozenset({
    "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionDepth2ImgPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline", "StableDiffusionControlNetPipeline", "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline", "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline", "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionAdapterPipeline", "StableDiffusionXLAdapterPipeline",
})
NO_PIPELINE = "the UNet was compiled without its pipeline (compile_pipe knows it)"
NO_GUIDANCE = "the pipeline computes no negative prompt (its guidance scale is 1 or less)"
ODD_BATCH = "the call has another number of rows than a prompt and a negative prompt for each image"
# What of a call is for all rows, whatever its size.
FOR_ALL_ROWS = ("cross_attention_kwargs",)


def prompt_rows(pipe: Any, latent: Tensor) -> slice | str:
    """The prompts' rows of a call that this pipeline makes, or why they are not known."""
    if pipe is None:
        return NO_PIPELINE
    kind = type(pipe)
    if kind.__name__ not in TWO_HALVES or kind.__module__.partition(".")[0] != "diffusers":
        return f"{kind.__name__} may order its rows in another way"
    # A pipeline has it from its first image on.
    if not hasattr(pipe, "_guidance_scale") or not getattr(pipe, "do_classifier_free_guidance", False):
        return NO_GUIDANCE
    batch = latent.shape[0]
    return ODD_BATCH if batch % 2 else half_of(batch, is_first=False)


def arguments_of_prompt(given: dict[str, Any], rows: slice, batch: int) -> dict[str, Any]:
    """The arguments of UNet2DConditionModel.forward for these rows alone."""
    return {
        name: value if name in FOR_ALL_ROWS else rows_within(value, rows, batch) for name, value in given.items()
    }
