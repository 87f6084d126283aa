"""Our forward against the real ldm UNetModel, resized as A1111 does it, in float32."""
from __future__ import annotations

import pytest
import torch
from builders import (
    LDM_LAYOUTS,
    a1111_sizes,
    a_call,
    ldm_output,
    ldm_unet,
    our_output,
    relative_error,
    shared_ldm_unet,
)
from grid import first, grid

CLOSE = 1e-5


@pytest.mark.parametrize("name", LDM_LAYOUTS)
def test_every_parameter_of_the_oracle_shows_in_its_output(name: str) -> None:
    unet = ldm_unet(**LDM_LAYOUTS[name])
    call = a_call(unet, 16, 16)  # smaller, and the deepest attention would see one pixel only
    unet(call.latent, call.timestep, context=call.context).square().sum().backward()
    silent = [name for name, parameter in unet.named_parameters() if not parameter.grad.abs().max() > 1e-4]
    assert silent == []


@grid(name=list(LDM_LAYOUTS), size=[(9, 11), (8, 8), (12, 16)])
def test_ours_is_the_hosts_for_every_layout_and_size(name: str, size: tuple[int, int]) -> None:
    unet = shared_ldm_unet(name)
    call = a_call(unet, *size, batch=1)
    assert relative_error(our_output(unet, call), ldm_output(unet, call)) < CLOSE


@grid(batch=[1, 2, 3, 4], tokens=[77, 154, 231])
def test_ours_is_the_hosts_for_every_batch_and_context(batch: int, tokens: int) -> None:
    unet = shared_ldm_unet()
    call = a_call(unet, 8, 12, batch, tokens)
    assert relative_error(our_output(unet, call), ldm_output(unet, call)) < CLOSE


def test_ours_is_the_hosts_at_half_of_960x720_with_all_its_attention() -> None:
    unet = shared_ldm_unet()
    call = a_call(unet, 45, 60, batch=1)
    assert relative_error(our_output(unet, call), ldm_output(unet, call)) < CLOSE


@pytest.mark.parametrize("pixels", first(1, ["720x720", "960x720", "512x512"]))
def test_ours_is_the_hosts_at_real_sizes(pixels: str) -> None:
    # ldm writes its attention scores out: at the first level they would take gigabytes.
    unet = ldm_unet(attention_resolutions=[4, 2], num_heads=2)
    width, height = (int(side) // 8 for side in pixels.split("x"))
    call = a_call(unet, height, width, batch=1)
    assert relative_error(our_output(unet, call), ldm_output(unet, call)) < CLOSE


def test_an_odd_size_is_resized_after_the_convolution_and_not_before() -> None:
    """A1111 and diffusers differ there; if this test's oracle did not, the odd sizes above would prove nothing."""
    from lib_onediff.ops import torch_ops

    class ResizeBefore:
        """Cuts 10 x 12 to 9 x 11 before the convolution, as diffusers does."""

        def __getattr__(self, name: str) -> object:
            return getattr(torch_ops, name)

        @staticmethod
        def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
            return torch_ops.resize(image, min(height, 9), min(width, 11))

    unet = shared_ldm_unet()
    call = a_call(unet, 9, 11)
    assert relative_error(our_output(unet, call, ResizeBefore()), ldm_output(unet, call)) > 1e-3


def test_the_hosts_own_forward_would_fail_at_an_odd_size_without_a1111() -> None:
    unet = shared_ldm_unet()
    call = a_call(unet, 9, 11)
    with pytest.raises(RuntimeError, match="[Ss]izes of tensors must match"), torch.no_grad():
        unet(call.latent, call.timestep, context=call.context)
    with a1111_sizes(), torch.no_grad():
        assert unet(call.latent, call.timestep, context=call.context).shape == call.latent.shape


@pytest.mark.parametrize("channels", [32, 320, 1280])
def test_sinusoids_are_the_hosts_to_the_bit(channels: int) -> None:
    """What is rounded otherwise here is a thousand times as much in the output of some models."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    from lib_onediff.model.layout import Linear, TimeEmbedding
    from lib_onediff.ops import torch_ops

    layer = Linear("", channels, channels)
    time = TimeEmbedding(channels, True, 0.0, 1.0, None, layer, layer)
    timestep = torch.tensor([999.0, 500.25, 1.0, 0.0])
    assert torch.equal(torch_ops.sinusoids(timestep, time), timestep_embedding(timestep, channels))
