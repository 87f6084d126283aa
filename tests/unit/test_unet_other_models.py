"""Models that OneDiff does not support: compile_unet() leaves their output as it is and gives a reason."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SD1, a_call, diffusers_unet, randomise
from torch import nn

import lib_onediff
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime

random = torch.randn


def flux() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )
    return model, {
        "hidden_states": random(1, 16, 4), "encoder_hidden_states": random(1, 8, 32),
        "pooled_projections": random(1, 32), "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
    }


def unconditional() -> tuple[nn.Module, dict[str, Any]]:
    """A UNet without a prompt."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        block_out_channels=(32, 64), down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )
    return model, {"sample": random(1, 3, 8, 8), "timestep": torch.tensor(3.0)}


def with_image_prompt() -> tuple[nn.Module, dict[str, Any]]:
    """A UNet whose whole context is the embedding of an image, as in Kandinsky. It projects the embedding in a layer
    like an IP-Adapter's."""
    unet = diffusers_unet(**SD1, encoder_hid_dim=24, encoder_hid_dim_type="image_proj")
    call = a_call(unet)
    return unet, {
        "sample": call.latent, "timestep": call.timestep, "encoder_hidden_states": call.context,
        "added_cond_kwargs": {"image_embeds": random(2, 24)},
    }


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], str]] = {
    "Flux": (flux, "FluxTransformer2DModel"), "unconditional": (unconditional, "UNet2DModel"),
    "image prompt": (with_image_prompt, "its prompt passes through a projection"),
}


@pytest.mark.parametrize(("build", "reason"), MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_model_that_onediff_does_not_support_gives_its_own_output_and_a_message(
    build: Callable, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After compile_unet(), the output equals the model's own to the bit, and the log and the status have the reason.
    After uncompile_unet(), the model's attributes are those it had before."""
    model, given = build()
    attributes = dict(randomise(model).__dict__)
    expected = model(**given)
    assert lib_onediff.compile_unet(model) is model
    outputs = [model(**given)]
    if build is unconditional:
        outputs.append(model(*given.values()))
    for output in outputs:
        assert type(output) is type(expected)
        assert torch.equal(output[0], expected[0])
    status = lib_onediff.status()
    assert reason in caplog.text
    # A class that OneDiff does not know has no hook that could count its calls.
    [explanation] = status["left_alone"] or [status["reason"]]
    assert reason in explanation and bool(status["left_alone"]) is (build is not with_image_prompt)
    if build is with_image_prompt:
        assert status["route"] == "host" and reason in status["reason"], status["reason"]
        assert "\n" not in status["reason"]
    lib_onediff.uncompile_unet(model)
    assert model.__dict__ == attributes and not lib_onediff.status()["left_alone"]


def test_a_unet_with_an_ip_adapter_is_computed_by_the_host_if_the_call_has_no_image_prompt() -> None:
    """Our forward computes the IP-Adapter's layers only if the call has an image prompt; without one it would leave the
    adapter out. The UNet is still read as the same architecture."""
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    unet = lib_onediff.compile_unet(diffusers_unet())
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(16, 48, 4)])
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    assert FAMILIES.read(unet).foreign == ("an IP-Adapter's image prompt",)
    assert FAMILIES.read(unet).architecture == FAMILIES.read(diffusers_unet()).architecture
    call = a_call(unet)
    output = random(2, 4, 8, 8)
    with torch.no_grad():
        assert runtime.run(unet, call, lambda: output) is output
    reason = "other extensions have replaced parts of the UNet: an IP-Adapter's image prompt"
    assert lib_onediff.status()["reason"] == reason
