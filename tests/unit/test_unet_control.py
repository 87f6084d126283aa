"""Residuals of ControlNets and T2I adapters: in our forward, against ldm's own layers; and in compiled diffusers UNets,
against diffusers' own forward."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    POOLED_WIDTH,
    SD1,
    SDXL,
    a1111_sizes,
    a_call,
    diffusers_unet,
    our_output,
    randomise,
    relative_error,
    shared_ldm_unet,
)
from comfy_unet import patched_output
from grid import grid
from torch import Tensor

import lib_onediff
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import Control, UNetCall

CLOSE = 1e-5


def residuals_for(unet: torch.nn.Module, call: UNetCall, present: set[int]) -> dict[str, tuple[Tensor | None, ...]]:
    """Random residuals for each part of an ldm UNet (input, middle, output), as arguments of Control. present: indices
    of the input and output stages that get one; the list ends with the last of them."""
    shapes: list[torch.Size] = []
    hooks = [block.register_forward_hook(lambda *seen: shapes.append(seen[-1].shape)) for block in unet.input_blocks]
    with a1111_sizes(), torch.no_grad():
        unet(call.latent, call.timestep, context=call.context)
    for hook in hooks:
        hook.remove()
    slots = {"input": shapes, "middle": shapes[-1:], "output": shapes[::-1]}
    return {
        part: tuple(torch.randn(shape) if index in present or part == "middle" else None
                    for index, shape in enumerate(slots[part][:max(present) + 1]))
        for part in slots
    }


@grid(present=[{0}, {11}, {0, 1, 2, 5, 8, 11}], part=["input", "middle", "output", "all"], size=[(8, 8), (9, 11)])
def test_residuals_of_a_controlnet_are_added_at_their_stages(
    present: set[int], part: str, size: tuple[int, int]
) -> None:
    """Our output is compared with that of ldm's layers and the residuals added between them, which differs from the one
    without residuals. present: indices of the stages that get a residual. part: the part of the UNet that gets
    residuals. size: the size of the latent; odd sizes are resized on the way up."""
    unet = shared_ldm_unet()
    call = a_call(unet, *size)
    parts = residuals_for(unet, call, present)
    controlled = replace(call, control=Control(**(parts if part == "all" else {part: parts[part]})))
    expected = patched_output(unet, controlled)
    assert relative_error(our_output(unet, controlled), expected) < CLOSE
    assert relative_error(expected, patched_output(unet, call)) > 1e-3


def test_residuals_in_float64_are_cast_to_the_dtype_of_the_network() -> None:
    """Our output is close to that of ldm's layers with the residual in float32."""
    unet = shared_ldm_unet()
    call = a_call(unet)
    (middle,) = residuals_for(unet, call, {0})["middle"]
    ours = our_output(unet, replace(call, control=Control(middle=(middle.double(),))))
    assert relative_error(ours, patched_output(unet, replace(call, control=Control(middle=(middle,))))) < CLOSE


PICTURE = torch.linspace(0, 9, 2 * 3 * 64 * 96).reshape(2, 3, 64, 96).sin()


class Scene:
    """A diffusers UNet, a call for it, and the residuals that a ControlNet or T2I adapter of random weights makes.

    layout: SD1, SDXL or another configuration of builders; SDXL calls have pooled prompts and size numbers.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self.unet = diffusers_unet(**layout)
        self.call = a_call(self.unet, 8, 12)
        sdxl = layout is SDXL
        self.added = {"text_embeds": torch.randn(2, POOLED_WIDTH), "time_ids": 9 * torch.rand(2, 6)} if sdxl else None

    @torch.no_grad()
    def output(self, **residuals: Any) -> Tensor:
        # The host's UNet empties the list of a T2I adapter.
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
    """The first `count` residuals of a T2I adapter. With SDXL, the fourth is added to the middle block's output."""
    return {"down_intrablock_additional_residuals": scene.adapter()[:count]}


def one_more(scene: Scene) -> dict[str, Any]:
    """A T2I adapter's residuals and one more than the down blocks take: it is for the middle block, and a UNet without
    one ignores it."""
    residuals = scene.adapter()
    return {"down_intrablock_additional_residuals": [*residuals, torch.ones_like(residuals[-1])]}


@pytest.mark.parametrize(("layout", "residuals"), [
    (SD1, controlled), (SDXL, controlled), (SD1, adapted), (SDXL, adapted), (SDXL, lambda scene: adapted(scene, 2)),
    (SD1, lambda scene: controlled(scene) | adapted(scene, 3)), ({**SD1, "mid_block_type": None}, one_more),
], ids=["ControlNet", "SDXL ControlNet", "adapter", "SDXL adapter", "fewer", "both", "no middle block"])
def test_our_output_with_residuals_is_close_to_that_of_diffusers(
    layout: dict, residuals: Callable[[Scene], dict[str, Any]]
) -> None:
    """residuals: makes the arguments of the UNet's call. Without residuals, diffusers' output differs. fewer: an
    adapter with two residuals; both: a ControlNet and an adapter."""
    scene = Scene(layout)
    given = residuals(scene)
    bare = scene.output()
    expected = scene.output(**given)
    lib_onediff.compile_unet(scene.unet)
    output = scene.output(**given)
    assert (lib_onediff.status()["route"], relative_error(output, expected) < CLOSE) == ("plain", True)
    assert relative_error(expected, bare) > 1e-2


@pytest.mark.parametrize("options", [{}, {"enabled": False}], ids=["ours", "the host's"])
@pytest.mark.parametrize(("layout", "residuals", "steps"), [
    (SDXL, adapted, 2), (SD1, adapted, 2), ({**SD1, "mid_block_type": None}, one_more, 1),
], ids=["SDXL adapter", "adapter", "no middle block"])
def test_a_call_takes_residuals_out_of_the_list_of_the_caller_as_diffusers_does(
    layout: dict, residuals: Callable[[Scene], dict[str, Any]], steps: int, options: dict[str, Any]
) -> None:
    """diffusers' forward pops an adapter's residuals off the list that it gets. A loop that passes the same list at
    each step has the adapter at the first step only, with OneDiff too. options: whether OneDiff is on or off."""
    scene = Scene(layout)
    (name, given), = residuals(scene).items()
    lists = list(given), list(given)
    call = scene.call

    def output(left: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return scene.unet(
                call.latent, call.timestep, call.context, added_cond_kwargs=scene.added, **{name: left}
            ).sample

    expected = [output(lists[0]) for _ in range(steps)]
    lib_onediff.compile_unet(scene.unet, **options)
    for one in expected:
        assert relative_error(output(lists[1]), one) < CLOSE
    assert [id(one) for one in lists[1]] == [id(one) for one in lists[0]] and len(lists[0]) < len(given)
    assert lib_onediff.status()["route"] == ("host" if options else "plain")


def test_a_residual_for_the_middle_block_alone_is_ignored_as_in_diffusers() -> None:
    scene = Scene(SD1)
    _, middle = scene.controlnet()
    expected = scene.output(mid_block_additional_residual=middle)
    assert torch.equal(expected, scene.output())
    lib_onediff.compile_unet(scene.unet)
    assert relative_error(scene.output(mid_block_additional_residual=middle), expected) < CLOSE


def test_a_call_with_one_more_residual_than_the_checked_one_is_close_to_diffusers() -> None:
    """The fourth residual of an SDXL adapter is for the middle block. A shape that was checked without it must not
    serve a call that has it."""
    scene = Scene(SDXL)
    residuals = scene.adapter()
    expected = scene.output(down_intrablock_additional_residuals=residuals)
    lib_onediff.compile_unet(scene.unet)
    scene.output(down_intrablock_additional_residuals=residuals[:3])
    assert lib_onediff.status()["route"] == "plain"
    assert relative_error(scene.output(down_intrablock_additional_residuals=residuals), expected) < CLOSE


def test_the_forward_of_diffusers_gets_all_residuals_of_an_adapter_each_time_it_runs(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers' forward empties the list that it gets. For this call it runs twice: to check our output, and to
    compute the call, because our output is wrong (the operator `gated` is replaced by a wrong function)."""
    scene = Scene(SD1)
    residuals = scene.adapter()
    expected = scene.output(down_intrablock_additional_residuals=residuals)
    lib_onediff.compile_unet(scene.unet)
    monkeypatch.setattr(torch_ops, "gated", lambda tokens, unit, consumer: tokens.chunk(2, dim=-1)[0])
    assert torch.equal(scene.output(down_intrablock_additional_residuals=residuals), expected)
    assert lib_onediff.status()["route"] == "host"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_call_with_residuals_of_an_adapter_in_the_deprecated_argument_is_left_to_the_host() -> None:
    """The output equals diffusers' to the bit, and the reason names the argument to use instead."""
    scene = Scene(SD1)
    residuals = scene.adapter()
    expected = scene.output(down_block_additional_residuals=list(residuals))
    lib_onediff.compile_unet(scene.unet)
    assert torch.equal(scene.output(down_block_additional_residuals=list(residuals)), expected)
    assert (lib_onediff.status()["route"], lib_onediff.status()["reason"]) == (
        "host", "a T2I adapter passes its residuals as down_block_additional_residuals, which is deprecated: update "
        "the pipeline, to pass down_intrablock_additional_residuals"
    )
