"""Our forward against diffusers' UNet2DConditionModel, in float32."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import (
    LAYOUTS,
    SD1,
    SDXL,
    a_call,
    diffusers_arguments,
    diffusers_output,
    diffusers_unet,
    our_output,
    relative_error,
    shared_unet,
)
from grid import first, grid

CLOSE = 1e-5
# For large pictures, where the number of heads is what attention costs.
FEW_HEADS = {"attention_head_dim": 2}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_parameter_of_the_oracle_shows_in_its_output(name: str) -> None:
    unet = diffusers_unet(**LAYOUTS[name])
    call = a_call(unet, 16, 16)  # smaller, and the deepest attention would see one pixel only
    output = unet(**diffusers_arguments(call))
    output.sample.square().sum().backward()
    silent = [name for name, parameter in unet.named_parameters() if not parameter.grad.abs().max() > 1e-4]
    assert silent == []


@grid(name=list(LAYOUTS), size=[(9, 11), (8, 8), (12, 16)])
def test_ours_is_the_hosts_for_every_layout_and_size(name: str, size: tuple[int, int]) -> None:
    unet = shared_unet(name)
    call = a_call(unet, *size)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@grid(batch=[1, 2, 3, 4], tokens=[77, 154, 231], name=["SD1", "SDXL"])
def test_ours_is_the_hosts_for_every_batch_and_context(name: str, batch: int, tokens: int) -> None:
    unet = shared_unet(name)
    call = a_call(unet, 8, 12, batch, tokens)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@pytest.mark.parametrize("pixels", first(1, ["960x720", "512x512", "720x960", "896x768", "720x720", "1280x1280"]))
def test_ours_is_the_hosts_at_real_sdxl_sizes(pixels: str) -> None:
    unet = diffusers_unet(**{**SDXL, **FEW_HEADS})
    width, height = (int(side) // 8 for side in pixels.split("x"))
    call = a_call(unet, height, width, batch=1)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@pytest.mark.parametrize("pixels", first(2, ["72x88", "512x512", "960x720"]))
def test_ours_is_the_hosts_at_real_sd1_sizes(pixels: str) -> None:
    unet = diffusers_unet(**{**SD1, **FEW_HEADS})
    width, height = (int(side) // 8 for side in pixels.split("x"))
    call = a_call(unet, height, width, batch=1)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


def test_a_larger_batch_changes_no_picture_in_it() -> None:
    unet = shared_unet("SDXL")
    four = a_call(unet, 8, 8, batch=4)
    first = replace(four, **{
        name: getattr(four, name)[:1] for name in ("latent", "timestep", "context", "y")
    })
    assert relative_error(our_output(unet, four)[:1], our_output(unet, first)) < CLOSE


@pytest.mark.parametrize("timestep", [0.0, 0.4375, 1.0, 998.75, 999.0])
def test_every_timestep_is_embedded_as_the_host_does(timestep: float) -> None:
    unet = shared_unet("SD1")
    call = replace(a_call(unet), timestep=torch.full((2,), timestep))
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float16])
def test_a_timestep_of_any_type_is_understood(dtype: torch.dtype) -> None:
    unet = shared_unet("SD1")
    call = replace(a_call(unet), timestep=torch.tensor([981, 3]).to(dtype))
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@pytest.mark.parametrize("config", [
    {"flip_sin_to_cos": False}, {"freq_shift": 1}, {"norm_eps": 1e-2}, {"norm_num_groups": 8}, {"conv_in_kernel": 5},
    {"conv_out_kernel": 1}, {"layers_per_block": (1, 2, 3, 1)}, {"time_embedding_dim": 96}, {"in_channels": 8},
    {"out_channels": 8}, {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                          "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, {"dropout": 0.5},
], ids=str)
def test_what_a_config_says_is_read_from_the_module(config: dict) -> None:
    unet = diffusers_unet(**{**SD1, **config})
    call = a_call(unet, 9, 11)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


def test_an_lcm_model_without_a_guidance_embedding_is_the_hosts_too() -> None:
    unet = shared_unet("LCM")
    guided = a_call(unet)
    plain = replace(guided, timestep_condition=None)
    assert relative_error(our_output(unet, plain), diffusers_output(unet, plain)) < CLOSE
    assert relative_error(our_output(unet, plain), our_output(unet, guided)) > 1e-3


def test_a_latent_in_channels_last_gives_the_same() -> None:
    unet = shared_unet("SDXL")
    call = a_call(unet, 9, 11)
    other = replace(call, latent=call.latent.to(memory_format=torch.channels_last))
    assert relative_error(our_output(unet, other), diffusers_output(unet, call)) < CLOSE


def test_a_unet_in_channels_last_gives_the_same() -> None:
    unet = diffusers_unet(**SD1)
    call = a_call(unet, 9, 11)
    expected = diffusers_output(unet, call)
    unet.to(memory_format=torch.channels_last)
    assert relative_error(our_output(unet, call), expected) < CLOSE
