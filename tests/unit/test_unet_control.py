"""Control residuals: our slots against ldm's own blocks in a loop that is written out here, and diffusers' ControlNets
and adapters through a compiled UNet."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from builders import (
    POOLED_WIDTH,
    SD1,
    SDXL,
    a_call,
    diffusers_unet,
    our_output,
    randomise,
    relative_error,
    shared_ldm_unet,
)
from torch import Tensor

import lib_onediff
from lib_onediff.core.call import Control, UNetCall
from lib_onediff.devices.torch import operators as torch_ops

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


PICTURE = torch.linspace(0, 9, 2 * 3 * 64 * 96).reshape(2, 3, 64, 96).sin()


class Scene:
    """One UNet and one denoising call with the extras of its architecture."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self.unet = diffusers_unet(**layout)
        self.call = a_call(self.unet, 8, 12)
        sdxl = layout is SDXL
        self.added = {"text_embeds": torch.randn(2, POOLED_WIDTH), "time_ids": 9 * torch.rand(2, 6)} if sdxl else None

    @torch.no_grad()
    def output(self, **residuals: Any) -> Tensor:
        # The UNet eats the list of a T2I adapter.
        whole = {name: list(value) if isinstance(value, list) else value for name, value in residuals.items()}
        call = self.call
        return self.unet(
            call.latent, call.timestep, call.context, added_cond_kwargs=self.added, **whole
        ).sample

    @torch.no_grad()
    def controlnet(self) -> tuple[list[Tensor], Tensor]:
        from diffusers import ControlNetModel

        net = randomise(ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=(8, 8, 16, 16)), 1)
        call = self.call
        return net(
            call.latent, call.timestep, call.context, controlnet_cond=PICTURE, added_cond_kwargs=self.added,
            return_dict=False,
        )

    @torch.no_grad()
    def adapter(self) -> list[Tensor]:
        from diffusers import T2IAdapter

        if self.layout is SDXL:
            adapter = T2IAdapter(3, [16, 32, 64, 64], 1, 16, adapter_type="full_adapter_xl")
        else:
            adapter = T2IAdapter(3, [16, 32, 64, 64], 1, 8, adapter_type="full_adapter")
        return randomise(adapter, 2)(PICTURE)


def controlled(scene: Scene) -> dict[str, Any]:
    down, middle = scene.controlnet()
    return {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}


def adapted(scene: Scene, count: int = 4) -> dict[str, Any]:
    """SDXL's adapter has a fourth residual, which the host adds to the middle block's output."""
    return {"down_intrablock_additional_residuals": scene.adapter()[:count]}


def one_more(scene: Scene) -> dict[str, Any]:
    """Without a middle block it goes nowhere."""
    residuals = scene.adapter()
    return {"down_intrablock_additional_residuals": [*residuals, torch.ones_like(residuals[-1])]}


@pytest.mark.parametrize(("layout", "residuals"), [
    (SD1, controlled), (SDXL, controlled), (SD1, adapted), (SDXL, adapted), (SDXL, lambda scene: adapted(scene, 2)),
    (SD1, lambda scene: controlled(scene) | adapted(scene, 3)), ({**SD1, "mid_block_type": None}, one_more),
], ids=["ControlNet", "SDXL ControlNet", "adapter", "SDXL adapter", "fewer", "both", "no middle block"])
def test_residuals_give_what_the_host_gives(layout: dict, residuals: Callable[[Scene], dict[str, Any]]) -> None:
    scene = Scene(layout)
    given = residuals(scene)
    bare, expected = scene.output(), scene.output(**given)
    lib_onediff.compile_unet(scene.unet)
    output = scene.output(**given)
    assert (lib_onediff.status()["route"], relative_error(output, expected) < CLOSE) == ("plain", True)
    assert relative_error(expected, bare) > 1e-2


def test_a_middle_residual_alone_is_ignored_as_the_host_ignores_it() -> None:
    scene = Scene(SD1)
    _, middle = scene.controlnet()
    expected = scene.output(mid_block_additional_residual=middle)
    assert torch.equal(expected, scene.output())
    lib_onediff.compile_unet(scene.unet)
    assert relative_error(scene.output(mid_block_additional_residual=middle), expected) < CLOSE


def test_one_more_residual_is_never_served_by_the_proof_of_one_less() -> None:
    """What the host adds and we do not must not hide in a shape that was proved without it."""
    scene = Scene(SDXL)
    residuals = scene.adapter()
    expected = scene.output(down_intrablock_additional_residuals=residuals)
    lib_onediff.compile_unet(scene.unet)
    scene.output(down_intrablock_additional_residuals=residuals[:3])
    assert lib_onediff.status()["route"] == "plain"
    assert relative_error(scene.output(down_intrablock_additional_residuals=residuals), expected) < CLOSE


def test_the_host_finds_an_adapters_residuals_whole_however_often_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It eats the list that it is given; here it runs to check us, and again because we were wrong."""
    scene = Scene(SD1)
    residuals = scene.adapter()
    expected = scene.output(down_intrablock_additional_residuals=residuals)
    lib_onediff.compile_unet(scene.unet)
    monkeypatch.setattr(torch_ops, "geglu", lambda tokens, reader: tokens.chunk(2, dim=-1)[0])
    assert torch.equal(scene.output(down_intrablock_additional_residuals=residuals), expected)
    assert lib_onediff.status()["route"] == "host"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_in_the_old_way_is_left_to_the_host() -> None:
    scene = Scene(SD1)
    residuals = scene.adapter()
    expected = scene.output(down_block_additional_residuals=list(residuals))
    lib_onediff.compile_unet(scene.unet)
    assert torch.equal(scene.output(down_block_additional_residuals=list(residuals)), expected)
    assert (lib_onediff.status()["route"], lib_onediff.status()["reason"]) == (
        "host", "a T2I adapter passes its residuals in the old way"
    )
