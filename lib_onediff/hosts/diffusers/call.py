"""What only some calls of a UNet2DConditionModel need: their prompt's rows alone, and residuals to add. Refusal says
what in them only diffusers knows."""
from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...core.call import Control, half_of, rows_within
from ...core.refusal import Refusal

# These pipelines call with the negative prompt's rows first and as many of the prompt's after them. Others, of
# diffusers or of somebody else, may have three predictions an image, or another order.
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


def rows_of_prompt(pipe: Any, latent: Tensor) -> slice:
    """The prompts' rows of a call that this pipeline makes. pipe: None where nobody knows it."""
    if pipe is None:
        raise Refusal(NO_PIPELINE)
    kind = type(pipe)
    if kind.__name__ not in TWO_HALVES or kind.__module__.partition(".")[0] != "diffusers":
        raise Refusal(f"{kind.__name__} may order its rows in another way")
    # A pipeline has it from its first image on.
    if not hasattr(pipe, "_guidance_scale") or not getattr(pipe, "do_classifier_free_guidance", False):
        raise Refusal(NO_GUIDANCE)
    if latent.shape[0] % 2:
        raise Refusal(ODD_BATCH)
    return half_of(latent.shape[0], is_first=False)


def arguments_of_prompt(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The arguments of UNet2DConditionModel.forward for these rows alone."""
    batch = given["sample"].shape[0]
    return {name: value if name in FOR_ALL_ROWS else rows_within(value, rows, batch) for name, value in given.items()}


def control_of(unet: Any, sample: Tensor, down: Any, middle: Tensor | None, inside: Any) -> Control | None:
    """ControlNet's and T2I adapters' residuals, sorted into our slots as UNet2DConditionModel.forward takes them."""
    if inside is None and middle is None and down is not None:
        raise Refusal("a T2I adapter passes its residuals in the old way")
    adapter, waiting = adapter_slots(unet, list(inside or ()))
    after_middle: list[Tensor | None] = []
    if waiting and unet.mid_block is not None and waiting[0].shape == deepest_shape(unet, sample):
        after_middle.append(waiting[0])
    output: tuple[Tensor | None, ...] = ()
    if down is not None and middle is not None:  # the host ignores one without the other
        output = tuple(reversed(tuple(down)))
        after_middle.append(middle)
    if not (adapter or after_middle or output):
        return None
    return Control(adapter, tuple(after_middle), output)


def adapter_slots(unet: Any, waiting: list[Tensor]) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """A T2I adapter's residuals in our input slots, and those that no down block takes.

    Each down block takes one: after its last attention, or after all of a block without attention.
    """
    if not waiting:
        return (), []
    slots: list[Tensor | None] = [None]
    for block in unet.down_blocks:
        resnets, downsamplers = len(block.resnets), len(block.downsamplers or ())
        stage = len(slots) + resnets - 1
        if not getattr(block, "has_cross_attention", False):
            stage += downsamplers
        slots += [None] * (resnets + downsamplers)
        if waiting:
            slots[stage] = waiting.pop(0)
    return tuple(slots), waiting


def deepest_shape(unet: Any, sample: Tensor) -> tuple[int, ...]:
    """The shape of the middle block's output: a T2I adapter's last residual is added there if it has that shape."""
    reduction = 2 ** sum(len(block.downsamplers or ()) for block in unet.down_blocks)
    height, width = (math.ceil(side / reduction) for side in sample.shape[-2:])
    return sample.shape[0], unet.config.block_out_channels[-1], height, width
