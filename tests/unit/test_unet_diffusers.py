"""The output of our forward compared with those of diffusers' UNet2DConditionModel and of ldm's UNetModel, the UNet of
A1111, in float32."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    LAYOUTS,
    LDM_LAYOUTS,
    SD1,
    a_call,
    diffusers_arguments,
    diffusers_output,
    diffusers_unet,
    host_output,
    ldm_unet,
    our_output,
    relative_error,
    shared_ldm_unet,
    shared_unet,
)
from grid import first, grid

CLOSE = 1e-5
# For large images, whose attention takes a time that grows with the number of heads: two, by diffusers' name for it.
FEW_HEADS = {"attention_head_dim": 2}
LDM = "ldm "
EVERY_LAYOUT = [*LAYOUTS, *(LDM + name for name in LDM_LAYOUTS)]


def shared(name: str) -> Any:
    """A UNet that tests share, by a name of EVERY_LAYOUT."""
    return shared_ldm_unet(name.removeprefix(LDM)) if name.startswith(LDM) else shared_unet(name)


@pytest.mark.parametrize("name", [*first(2, list(LAYOUTS)), *(LDM + name for name in first(1, list(LDM_LAYOUTS)))])
def test_every_parameter_of_the_host_network_affects_its_output(name: str) -> None:
    """The gradient of each parameter has an element above 1e-4. If a parameter had no effect on the host's output, the
    comparisons in this file would pass even if our forward left its layer out."""
    is_ldm = name.startswith(LDM)
    unet = ldm_unet(**LDM_LAYOUTS[name.removeprefix(LDM)]) if is_ldm else diffusers_unet(**LAYOUTS[name])
    call = a_call(unet, 16, 16)  # smaller, and the deepest attention would see one pixel only
    if is_ldm:
        output = unet(call.latent, call.timestep, context=call.context)
    else:
        output = unet(**diffusers_arguments(call)).sample
    output.square().sum().backward()
    silent = [name for name, parameter in unet.named_parameters() if not parameter.grad.abs().max() > 1e-4]
    assert silent == []


@grid(name=EVERY_LAYOUT, size=[(9, 11), (8, 8), (12, 16)])
def test_our_output_is_close_to_the_host_output_for_every_layout_and_size(name: str, size: tuple[int, int]) -> None:
    unet = shared(name)
    call = a_call(unet, *size)
    assert relative_error(our_output(unet, call), host_output(unet, call)) < CLOSE


@grid(batch=[1, 2, 3, 4], tokens=[77, 154, 231], name=["SD1", "SDXL", "ldm SD1"])
def test_our_output_is_close_to_the_host_output_for_every_batch_and_prompt_length(
    name: str, batch: int, tokens: int
) -> None:
    unet = shared(name)
    call = a_call(unet, 8, 12, batch, tokens)
    assert relative_error(our_output(unet, call), host_output(unet, call)) < CLOSE


REAL_SIZES = [
    ("SDXL", "960x720"), ("SD1", "72x88"), ("ldm", "720x720"), ("SD1", "512x512"), ("SDXL", "896x768"),
    ("SDXL", "1280x1280"), ("ldm", "960x720"),
]


@pytest.mark.parametrize(("name", "pixels"), first(3, REAL_SIZES))
def test_our_output_is_close_to_the_host_output_at_real_image_sizes(name: str, pixels: str) -> None:
    if name == "ldm":
        # It writes its attention scores out: at the first level they would take gigabytes.
        unet = ldm_unet(attention_resolutions=[4, 2], num_heads=2)
    else:
        unet = diffusers_unet(**{**LAYOUTS[name], **FEW_HEADS})
    width, height = (int(side) // 8 for side in pixels.split("x"))
    call = a_call(unet, height, width, batch=1)
    assert relative_error(our_output(unet, call), host_output(unet, call)) < CLOSE


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_our_output_is_close_to_the_host_output_with_integer_and_float16_timesteps(dtype: torch.dtype) -> None:
    unet = shared_unet("SD1")
    call = replace(a_call(unet), timestep=torch.tensor([981, 3]).to(dtype))
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


@pytest.mark.parametrize("config", [
    {"flip_sin_to_cos": False}, {"freq_shift": 1}, {"norm_eps": 1e-2}, {"norm_num_groups": 8}, {"conv_in_kernel": 5},
    {"conv_out_kernel": 1}, {"layers_per_block": (1, 2, 3, 1)}, {"time_embedding_dim": 96}, {"in_channels": 8},
    {"out_channels": 8}, {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                          "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, {"dropout": 0.5},
], ids=str)
def test_our_output_follows_options_of_the_config_that_have_no_parameters(config: dict) -> None:
    """Such as epsilons, frequencies and kernel sizes. Our forward reads them from the modules; the output is compared
    with diffusers'."""
    unet = diffusers_unet(**{**SD1, **config})
    call = a_call(unet, 9, 11)
    assert relative_error(our_output(unet, call), diffusers_output(unet, call)) < CLOSE


def test_our_output_is_close_to_the_host_output_for_lcm_without_a_guidance_embedding() -> None:
    """timestep_condition is the embedding of the guidance scale, which a caller may leave out. With it, the output must
    differ."""
    unet = shared_unet("LCM")
    guided = a_call(unet)
    plain = replace(guided, timestep_condition=None)
    assert relative_error(our_output(unet, plain), diffusers_output(unet, plain)) < CLOSE
    assert relative_error(our_output(unet, plain), our_output(unet, guided)) > 1e-3


def test_our_output_with_channels_last_is_close_to_the_host_output_with_contiguous_memory() -> None:
    """Our forward gets weights and latent in torch.channels_last."""
    unet = diffusers_unet(**SD1)
    call = a_call(unet, 9, 11)
    expected = diffusers_output(unet, call)
    unet.to(memory_format=torch.channels_last)
    call = replace(call, latent=call.latent.to(memory_format=torch.channels_last))
    assert relative_error(our_output(unet, call), expected) < CLOSE


@pytest.mark.parametrize("channels", [32, 320, 1280])
def test_our_timestep_sinusoids_equal_those_of_ldm_to_the_bit(channels: int) -> None:
    """Some models amplify a rounding difference in the timestep embedding a thousand times."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    from lib_onediff.core.leaves import Linear, TimeEmbedding
    from lib_onediff.devices.torch import operators as torch_ops

    layer = Linear("", channels, channels)
    time = TimeEmbedding(channels, True, 0.0, 1.0, None, layer, layer)
    timestep = torch.tensor([999.0, 500.25, 1.0, 0.0])
    assert torch.equal(torch_ops.sinusoids(timestep, time), timestep_embedding(timestep, channels))
