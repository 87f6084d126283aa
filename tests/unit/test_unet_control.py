"""Control residuals: our slots against ldm's own blocks in a loop that is written out here."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from builders import a_call, our_output, relative_error, shared_ldm_unet
from torch import Tensor

from lib_onediff.model.call import Control, UNetCall

CLOSE = 1e-5


@torch.no_grad()
def ldm_with_control(unet: torch.nn.Module, call: UNetCall) -> Tensor:
    """ldm's forward with the additions that Control describes."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    embedding = unet.time_embed(timestep_embedding(call.timestep, unet.model_channels))
    control = call.control or Control()
    image, skips = call.latent, []
    for index, block in enumerate(unet.input_blocks):
        image = block(image, embedding, call.context)
        if index < len(control.input) and control.input[index] is not None:
            image = image + control.input[index]
        skips.append(image)
    image = unet.middle_block(image, embedding, call.context)
    if control.middle and control.middle[0] is not None:
        image = image + control.middle[0]
    for index, block in enumerate(unet.output_blocks):
        skip = skips.pop()
        if index < len(control.output) and control.output[index] is not None:
            skip = skip + control.output[index]
        image = functional.interpolate(image, skip.shape[-2:], mode="nearest")
        image = block(torch.cat([image, skip], dim=1), embedding, call.context)
    return unet.out(image)


def skip_shapes(unet: torch.nn.Module, call: UNetCall) -> list[torch.Size]:
    """The shape of every input block's output; the middle block's is the last one's."""
    shapes: list[torch.Size] = []
    hooks = [block.register_forward_hook(lambda *seen: shapes.append(seen[-1].shape)) for block in unet.input_blocks]
    try:
        ldm_with_control(unet, replace(call, control=None))
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def residuals(shapes: list[torch.Size], present: set[int]) -> tuple[Tensor | None, ...]:
    return tuple(torch.randn(shape) if index in present else None for index, shape in enumerate(shapes))


@pytest.mark.parametrize("size", [(8, 8), (9, 11)], ids=["even", "odd"])
@pytest.mark.parametrize("part", ["input", "middle", "output", "all"])
@pytest.mark.parametrize("present", [{0}, {11}, {0, 1, 2, 5, 8, 11}], ids=str)
def test_residuals_are_added_where_control_says(present: set[int], part: str, size: tuple[int, int]) -> None:
    unet = shared_ldm_unet()
    call = a_call(unet, *size)
    shapes = skip_shapes(unet, call)
    parts = {
        "input": residuals(shapes, present), "middle": residuals(shapes[-1:], {0}),
        "output": residuals(shapes[::-1], present),
    }
    controlled = replace(call, control=Control(**(parts if part == "all" else {part: parts[part]})))
    expected = ldm_with_control(unet, controlled)
    assert relative_error(our_output(unet, controlled), expected) < CLOSE
    assert relative_error(expected, ldm_with_control(unet, call)) > 1e-3


def test_fewer_residuals_than_stages_leave_the_rest_alone() -> None:
    unet = shared_ldm_unet()
    call = a_call(unet)
    shapes = skip_shapes(unet, call)
    short = Control(residuals(shapes[:2], {0, 1}), (None,), residuals(shapes[:-3:-1], {1}))
    controlled = replace(call, control=short)
    assert relative_error(our_output(unet, controlled), ldm_with_control(unet, controlled)) < CLOSE


def test_residuals_of_another_precision_are_cast() -> None:
    unet = shared_ldm_unet()
    call = a_call(unet)
    middle = torch.randn(skip_shapes(unet, call)[-1], dtype=torch.float64)
    ours = our_output(unet, replace(call, control=Control(middle=(middle,))))
    expected = ldm_with_control(unet, replace(call, control=Control(middle=(middle.float(),))))
    assert relative_error(ours, expected) < CLOSE
