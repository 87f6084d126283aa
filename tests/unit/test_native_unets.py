"""Whole UNets, computed in float32 by NativeOperators (Triton kernels, interpreted if there is no GPU), against the
hosts' own forwards."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from builders import (
    FEW_NORMS_LDM,
    SMALL,
    SMALL_LDM,
    SMALL_XL,
    a_call,
    diffusers_unet,
    host_output,
    ldm_unet,
    our_output,
    relative_error,
    wrap_round,
)
from torch import nn

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.families.unet.call import UNetCall

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-5
# The interpreter takes a millisecond or more for each group.
FEW_GROUPS = {"norm_num_groups": 2}
UNETS: dict[str, Callable[[], nn.Module]] = {
    "SD1": lambda: diffusers_unet(**{**SMALL, **FEW_GROUPS}),
    "SD2": lambda: diffusers_unet(**{
        **SMALL, **FEW_GROUPS, "use_linear_projection": True, "upcast_attention": True, "attention_head_dim": (2, 4)
    }),
    "SDXL": lambda: diffusers_unet(**{**SMALL_XL, **FEW_GROUPS}),
    "ldm SD1": lambda: ldm_unet(**FEW_NORMS_LDM),
    "ldm SD2": lambda: ldm_unet(
        **{**SMALL_LDM, "num_heads": -1, "attention_resolutions": [1]}, num_head_channels=8,
        use_linear_in_transformer=True,
    ),
}


@cache
def shared(name: str) -> nn.Module:
    """A UNet shared by tests that do not change it."""
    return UNETS[name]().to(DEVICE)


def moved(call: UNetCall) -> UNetCall:
    parts = {name: getattr(call, name) for name in ("latent", "timestep", "context", "y")}
    return replace(call, **{name: part if part is None else part.to(DEVICE) for name, part in parts.items()})


def call_of(unet: nn.Module, height: int, width: int, batch: int, tokens: int = 5) -> UNetCall:
    return moved(a_call(unet, height, width, batch, tokens))


def error(unet: nn.Module, call: UNetCall) -> float:
    return relative_error(our_output(unet, call, NativeOperators()), host_output(unet, call))


@pytest.mark.parametrize("name", UNETS)
def test_a_unet_by_native_operators_is_close_to_the_host_at_an_odd_size(name: str) -> None:
    """The latent has 3x5 pixels. name: a key of UNETS."""
    assert error(shared(name), call_of(shared(name), 3, 5, 1)) < CLOSE


def test_a_unet_and_latent_in_channels_last_are_close_to_the_host() -> None:
    """The reference is the host's output in the default memory format."""
    unet = UNETS["SDXL"]().to(DEVICE)
    call = call_of(unet, 4, 2, 2)
    expected = host_output(unet, call)
    unet.to(memory_format=torch.channels_last)
    call = replace(call, latent=call.latent.to(memory_format=torch.channels_last))
    assert relative_error(our_output(unet, call, NativeOperators()), expected) < CLOSE


def test_a_unet_with_circular_padding_is_close_to_the_host() -> None:
    """WebUIs set circular padding for tileable images. It must also change the host's output, or nothing was tested."""
    unet = UNETS["SD1"]().to(DEVICE)
    call = call_of(unet, 4, 3, 1)
    flat = host_output(unet, call)
    wrap_round(unet)
    assert error(unet, call) < CLOSE
    assert relative_error(host_output(unet, call), flat) > 1e-3
