"""Changes that a host makes to the weights of a compiled UNet affect its next output; weights are bound (their
addresses read) again only if they moved. Every other kind of edit affects the next call, too, with or without a
graph."""
from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    SMALL_XL,
    a_call,
    diffusers_arguments,
    diffusers_output,
    diffusers_unet,
    randomise,
    relative_error,
    served,
)
from edits_of_modules import EDITS, edited
from graph_builders import PretendedGraphs
from grid import WHOLE, grid
from ladder_builders import NATIVE, error
from own_forward import own_forward
from torch import nn

import lib_onediff
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import runtime

CROSS_ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn2"
KEYS_OF_CONTEXT = f"{CROSS_ATTENTION}.to_k"
LABEL_EMBEDDING = "add_embedding.linear_1"
LAYERS = (
    KEYS_OF_CONTEXT, "mid_block.attentions.0.transformer_blocks.0.attn1.to_q", "mid_block.resnets.0.time_emb_proj",
    LABEL_EMBEDDING, "down_blocks.0.resnets.0.conv2",
)


class Compiled:
    """A compiled SDXL-like UNet that has computed one call."""

    def __init__(self) -> None:
        self.unet: Any = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))
        self.call: UNetCall = a_call(self.unet)
        self.first = served(self.unet, self.call)

    def assert_output_is_that_of_the_host(self, call: UNetCall, most: float = 1e-5) -> torch.Tensor:
        """Assert that our forward computes this call, with the host's output (relative error below `most`). Returns the
        host's output."""
        expected = diffusers_output(self.unet, call)
        assert relative_error(served(self.unet, call), expected) < most
        assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
        return expected

    def assert_change_is_followed(self, moved: bool) -> None:
        """Assert that the output has changed as the host's has. moved: whether the weights must have been bound
        again."""
        assert relative_error(self.assert_output_is_that_of_the_host(self.call), self.first) > 1e-4
        assert runtime.services.networks[self.unet].bound.epoch.addresses == (2 if moved else 1)


@torch.no_grad()
def in_place(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter))


def behind_autograds_back(layer: Any) -> None:
    """An edit by .data, which torch does not count."""
    layer.weight.data.mul_(1.5)


def pointed_elsewhere(layer: Any) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


@grid(path=LAYERS, change=[in_place, behind_autograds_back, pointed_elsewhere, replaced])
def test_a_change_takes_effect_at_the_next_call_and_moved_weights_are_bound_again(path: str, change: Any) -> None:
    """The output is compared with the host's. change: an edit of the layer at this path. After an edit in place,
    nothing is bound again (epoch.addresses)."""
    compiled = Compiled()
    change(compiled.unet.get_submodule(path))
    compiled.assert_change_is_followed(moved=change in (pointed_elsewhere, replaced))


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_checkpoint_takes_effect_and_is_bound_again_only_if_it_is_assigned(assign: bool) -> None:
    """assign: load_state_dict replaces the parameters in place of copying into them."""
    compiled = Compiled()
    compiled.unet.load_state_dict(diffusers_unet(1, **SMALL_XL).state_dict(), assign=assign)
    compiled.assert_change_is_followed(moved=assign)


def test_a_layer_that_takes_the_place_of_a_freed_one_is_read_again() -> None:
    """A new layer may get the address, and so the id, of one that was freed."""
    compiled = Compiled()
    attention = compiled.unet.get_submodule(CROSS_ATTENTION)
    width = attention.to_q.in_features
    same_id = False
    for seed in range(30):
        before = id(attention.to_q)
        del attention.to_q
        attention.to_q = randomise(nn.Linear(width, width, bias=False), seed)
        same_id = same_id or (seed > 0 and id(attention.to_q) == before)  # its position in the order changes at first
        compiled.assert_output_is_that_of_the_host(compiled.call)
    if not same_id:
        pytest.skip("Python gave no layer the id of the one before")


def test_a_parameter_with_the_id_and_address_of_a_freed_one_takes_effect() -> None:
    """Freed memory is reused: a new parameter may have the id, address and edit count of an old one."""
    compiled = Compiled()
    layer = compiled.unet.add_embedding.linear_2
    arguments = diffusers_arguments(compiled.call)
    memory = layer.weight.detach().clone().numpy()
    places = []
    for _ in range(20):
        del layer.weight
        memory[:] = torch.randn(memory.shape).numpy()
        layer.weight = nn.Parameter(torch.from_numpy(memory))
        places.append((id(layer.weight), layer.weight.data_ptr(), layer.weight._version))
        if len(places) % 2:  # allocators often return the block freed last but one
            with torch.no_grad():
                output = compiled.unet(**arguments)
                expected = own_forward(compiled.unet)(**arguments)
            assert relative_error(output.sample, expected.sample) < 1e-5
    if not any(now == last for now, last in zip(places[2::2], places[:-2:2], strict=False)):
        pytest.skip("no parameter got the place of the one before")


@grid(path=[KEYS_OF_CONTEXT, LABEL_EMBEDDING], inference_context=[False, True])
def test_an_edit_of_parameters_made_in_inference_mode_takes_effect_at_the_next_call(
    path: str, inference_context: bool
) -> None:
    """torch counts no edits of inference tensors. inference_context: whether the call after the edit is made in
    inference mode, too."""
    with torch.inference_mode():
        compiled = Compiled()
        compiled.unet.get_submodule(path).weight.mul_(1.5)
    with torch.inference_mode(inference_context):
        given = {name: getattr(compiled.call, name).clone() for name in ("latent", "timestep", "context", "y")}
        compiled.call = replace(compiled.call, **given)
        compiled.assert_change_is_followed(moved=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_unet_cast_to_another_dtype_and_back_is_bound_anew_each_time(dtype: torch.dtype) -> None:
    """float64 is not supported: then the host computes."""
    compiled = Compiled()
    compiled.unet.to(dtype)
    call = replace(compiled.call, **{
        name: getattr(compiled.call, name).to(dtype) for name in ("latent", "context", "y")
    })
    if dtype == torch.float64:
        assert torch.equal(served(compiled.unet, call), diffusers_output(compiled.unet, call))
        assert lib_onediff.status()["reason"].endswith("is stored as float64")
    else:
        compiled.assert_output_is_that_of_the_host(call, 5 * torch.finfo(dtype).eps)
    compiled.unet.float()
    compiled.assert_output_is_that_of_the_host(compiled.call)


CHANGES: dict[str, Callable[[Any], object]] = {
    "another prompt": lambda unet: served(unet, a_call(unet, tokens=154)),
    "FreeU": lambda unet: (unet.enable_freeu(0.9, 0.2, 1.2, 1.4), served(unet, a_call(unet, seed=1))),
    "a refusal": lambda unet: (setattr(unet, "conv_act", nn.GELU()), served(unet, a_call(unet, seed=1))),
    "uncompiled": lib_onediff.uncompile_unet,
    "another type": lambda unet: unet.half(),
}


@pytest.mark.parametrize("change", [*CHANGES.values(), None], ids=[*CHANGES, "nothing"])
def test_a_deleted_unet_is_freed_whatever_happened_to_it_before(change: Callable[[Any], object] | None) -> None:
    """Without a change it is freed at once; after one, at the latest by a garbage collection."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    served(unet, a_call(unet))
    gc.collect()
    gc.disable()
    try:
        if change is not None:
            change(unet)
        gone = weakref.ref(unet), weakref.ref(unet.conv_in.weight)
        del unet
        if change is not None:
            gc.collect()
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def assert_close_to_host(unet: Any, call: Any, edit: str) -> None:
    apart = error(unet, call)
    assert apart < 1e-5, f"{edit}: {apart:.1e} by {runtime.status()['route']}, {runtime.status()['reason']}"


@pytest.mark.parametrize("seed", range(25 if WHOLE else 1))
def test_each_of_many_random_edits_takes_effect_at_the_next_call_with_graphs(
    pretended: PretendedGraphs, seed: int
) -> None:
    """Outputs are compared with the host's after each edit. EDITS: every kind of edit that hosts and extensions make,
    in a random order, with and without new prompts and samplings. seed: the seed of that order."""
    chance = random.Random(seed)
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), backend=NATIVE)
    call = a_call(unet)
    for _ in range(4):
        assert_close_to_host(unet, call, "unedited")
    graphs = runtime.status()["calls"]["graph"]
    assert graphs, runtime.status()["reason"]
    for edit in edited(unet, chance, len(EDITS) + 11):
        if chance.random() < 0.5:
            call = replace(call, context=call.context.clone() + 0.1, y=call.y.clone())
        loop = lib_onediff.sampling(unet) if chance.random() < 0.5 else contextlib.nullcontext()
        with loop:
            for _ in range(chance.choice([1, 1, 4])):
                assert_close_to_host(unet, call, edit)
    assert runtime.status()["calls"]["graph"] > graphs
