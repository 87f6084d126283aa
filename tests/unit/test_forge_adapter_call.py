"""What a call of Forge's UNet asks for: residuals in Forge's order, and options that only Forge understands."""
from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from builders import a_call, our_output, relative_error, shared_ldm_unet
from torch import Tensor, nn

from lib_onediff.hosts.forge.call import control_of, copied_lists, unet_call, unknown_options
from lib_onediff.model.call import UNetCall

STAGES = 12


def by_forge(patch: Any) -> Any:
    """A function of an extension's, as far as its module's name goes."""
    return eval("lambda *arguments: None", {"__name__": patch})


def forge_lists(adapter: bool) -> dict[str, list[Tensor | None]]:
    """Residuals as Forge's control_merge leaves them, the shapes standing in for places: input reversed for an
    adapter (None in most), output and middle for a ControlNet."""
    made = [torch.full((1, 1, 1, 1), float(index)) for index in range(STAGES)]
    if adapter:
        sparse = [residual if index % 3 == 2 else None for index, residual in enumerate(made)]
        return {"input": sparse[::-1], "middle": [], "output": []}
    return {"input": [], "middle": [torch.zeros(1, 1, 1, 1)], "output": made}


@pytest.mark.parametrize("adapter", [True, False], ids=["T2I adapter", "ControlNet"])
def test_each_stage_gets_what_forge_would_pop_for_it(adapter: bool) -> None:
    control = forge_lists(adapter)
    ours = control_of(control)
    popping = copied_lists(control)
    for part in ("input", "output"):
        slots = getattr(ours, part)
        for stage in range(STAGES):
            popped = popping[part].pop() if popping[part] else None
            assert (slots[stage] if stage < len(slots) else None) is popped
    assert ours.middle == (() if adapter else (control["middle"][0],))


def test_of_several_middle_residuals_forge_takes_the_last() -> None:
    first, last = torch.zeros(1), torch.ones(1)
    assert control_of({"input": [], "middle": [first, last], "output": []}).middle == (last,)


@pytest.mark.parametrize("control", [
    None, {}, {"input": [], "middle": [], "output": []}, {"input": [None] * STAGES, "middle": [None]},
])
def test_no_residual_is_no_control(control: Any) -> None:
    assert control_of(control) is None


def test_the_hosts_lists_stay_whole() -> None:
    control = forge_lists(adapter=False)
    kept = {part: list(values) for part, values in control.items()}
    control_of(control)
    copied_lists(control)["output"].pop()
    assert control == kept


def test_a_residual_that_is_no_tensor_is_for_the_host() -> None:
    control = {"input": [], "middle": [0.5], "output": []}
    assert control_of(control) == "control[middle] holds a float" == made(control=control)


def test_our_forward_adds_the_residuals_where_forge_does() -> None:
    unet = shared_ldm_unet()
    call = a_call(unet)
    skips: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda module, given, output: skips.append(output.clone()))
             for block in (*unet.input_blocks, unet.middle_block)]
    with torch.no_grad():
        unet(call.latent, call.timestep, context=call.context)
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(1)
    *adapter, middle = (torch.randn(skip.shape, generator=generator) for skip in skips)
    output = [torch.randn(skip.shape, generator=generator) for skip in skips[:-1]]
    # ControlNet's lists are in the order of the input blocks, an adapter's is reversed: both are popped from the end.
    control = {"input": adapter[::-1], "middle": [middle], "output": output}
    ours = our_output(unet, UNetCall(call.latent, call.timestep, call.context, control=control_of(control)))
    assert relative_error(ours, popped_output(unet, call, copied_lists(control))) < 1e-5
    assert relative_error(ours, our_output(unet, call)) > 0.1


@torch.no_grad()
def popped_output(unet: Any, call: UNetCall, control: dict[str, list[Tensor]]) -> Tensor:
    """ldm's UNet, whose stages Forge shares, with residuals taken from the ends of the lists as Forge takes them."""
    hooks = []

    def add(part: str) -> Any:
        return lambda module, given, output: output + control[part].pop()

    def add_to_skip(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        residual = control["output"].pop()
        image = given[0].clone()
        image[:, -residual.shape[1]:] += residual
        return image, *given[1:]

    hooks += [block.register_forward_hook(add("input")) for block in unet.input_blocks]
    hooks += [unet.middle_block.register_forward_hook(add("middle"))]
    hooks += [block.register_forward_pre_hook(add_to_skip) for block in unet.output_blocks]
    try:
        return unet(call.latent, call.timestep, context=call.context)
    finally:
        for hook in hooks:
            hook.remove()


HARMLESS: dict[str, Any] = {
    "cond_or_uncond": [1, 0], "sigmas": torch.ones(1), "cond_mark": torch.ones(2), "cond_indices": [1],
    "uncond_indices": [0], "original_shape": [2, 4, 8, 8], "transformer_index": 3, "block": ("last", 0),
    "block_index": 0, "controlnet_conditioning_modifiers": [len], "controlnet_model_function_wrapper": len,
}


# By which the forward of Forge's UNet asks for options and arguments.
READ = {"patches", "patches_replace", "block_modifiers", "block_inner_modifiers", "group_norm_wrapper", "num_frames"}


def test_what_forge_itself_writes_is_harmless() -> None:
    assert unknown_options(HARMLESS, READ) == []


@pytest.mark.parametrize("value", [torch.ones(20), 3, [0.5, None], {"start": 1}, uuid.uuid4()])
def test_data_that_the_unet_never_asks_for_is_harmless(value: Any) -> None:
    assert unknown_options({**HARMLESS, "sampling_sigmas": value}, READ) == []


@pytest.mark.parametrize("empty", [
    {"patches": {}}, {"patches": {"attn1_patch": []}}, {"patches_replace": {"attn1": {}}}, {"block_modifiers": []},
    {"group_norm_wrapper": None},
])
def test_what_is_empty_changes_nothing(empty: dict[str, Any]) -> None:
    assert unknown_options({**HARMLESS, **empty}, READ) == []


@pytest.mark.parametrize(("options", "names"), [
    ({"patches": {"attn1_patch": [by_forge("tome.py")]}}, ["patches[attn1_patch] by tome.py"]),
    ({"patches": {"attn1_patch": [], "output_block_patch": [by_forge("freeu.py")]}},
     ["patches[output_block_patch] by freeu.py"]),
    ({"patches_replace": {"attn1": {("middle", 0): by_forge("pag.py")}}}, ["patches_replace[attn1] by pag.py"]),
    ({"block_modifiers": [by_forge("hrfix.py")]}, ["block_modifiers by hrfix.py"]),
    ({"block_inner_modifiers": [by_forge("x.py")]}, ["block_inner_modifiers by x.py"]),
    ({"group_norm_wrapper": by_forge("iclight.py")}, ["group_norm_wrapper by iclight.py"]),
    ({"of_tomorrow": [by_forge("new.py")]}, ["of_tomorrow by new.py"]),
    ({"num_frames": 2}, ["num_frames"]),
    ({"patches": {"attn2_patch": [len]}, "of_tomorrow": {"strength": len}},
     ["patches[attn2_patch] by builtins", "of_tomorrow[strength] by builtins"]),
])
def test_what_changes_the_unet_is_named(options: dict[str, Any], names: list[str]) -> None:
    named = unknown_options({**HARMLESS, **options}, READ)
    assert [name.replace("builtin_function_or_method", "builtins") for name in named] == names


@pytest.mark.parametrize("options", [
    {"block_inner_modifiers": [by_forge("x.py")]}, {"of_tomorrow": [by_forge("new.py")]}, {"num_frames": 2},
    {"patches": {"attn7_patch": [len]}},
])
def test_what_our_forward_cannot_call_is_for_the_host(options: dict[str, Any]) -> None:
    assert made(options={**HARMLESS, **options}).startswith("another extension changes the UNet for this call: ")


def made(options: dict[str, Any] = HARMLESS, control: Any = None, **others: Any) -> UNetCall | str:
    one = torch.zeros(1)
    return unet_call(nn.Identity(), one, one, one, None, control, options, False, READ, others)


def test_an_argument_that_the_unet_asks_for_is_for_the_host() -> None:
    assert made(control_model=object(), num_frames=None).latent.shape == (1,)
    assert made(num_frames=2) == "the UNet is called with more than we know (num_frames)"
