"""The forward cut in two: full is forward, and shallow around a fresh deep feature is full."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from builders import a_call, our_output, relative_error, shared_ldm_unet, shared_unet
from deepcache_builders import Oracle
from torch import Tensor, nn

from lib_onediff.core.call import Call, Control

SIZES = pytest.mark.parametrize("size", [(8, 8), (9, 11)], ids=["even", "odd"])
DEPTHS = [("SD1", depth) for depth in (1, 3, 4, 7, 11)] + [("SDXL", depth) for depth in (1, 3, 8)]


@SIZES
@pytest.mark.parametrize(("name", "depth"), DEPTHS)
def test_full_is_forward_and_shallow_repeats_it(name: str, depth: int, size: tuple[int, int]) -> None:
    unet = shared_unet(name)
    cut, call = Oracle(unet, depth), a_call(unet, *size)
    output, deep = cut.whole(call)
    assert torch.equal(output, our_output(unet, call))
    assert torch.equal(cut.shallow(call, deep), output)


@torch.no_grad()
def outer_blocks_of_ldm(unet: nn.Module, call: Call, depth: int, deep: Tensor) -> Tensor:
    """The host's own outer blocks around a deep feature."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    embedding = unet.time_embed(timestep_embedding(call.timestep, unet.model_channels))
    image, skips = call.latent, []
    for block in unet.input_blocks[:depth]:
        image = block(image, embedding, call.context)
        skips.append(image)
    image = deep
    for block in unet.output_blocks[-depth:]:
        skip = skips.pop()
        image = functional.interpolate(image, skip.shape[-2:], mode="nearest")
        image = block(torch.cat([image, skip], dim=1), embedding, call.context)
    return unet.out(image)


@SIZES
@pytest.mark.parametrize("depth", [1, 4, 11])
def test_a_stale_deep_feature_gives_the_hosts_outer_blocks_around_it(depth: int, size: tuple[int, int]) -> None:
    unet = shared_ldm_unet()
    cut, call = Oracle(unet, depth), a_call(unet, *size)
    _, stale = cut.whole(a_call(unet, *size, seed=1))
    output = cut.shallow(call, stale)
    assert relative_error(output, outer_blocks_of_ldm(unet, call, depth, stale)) < 1e-5
    assert relative_error(output, our_output(unet, call)) > 1e-2


def test_shallow_steps_take_their_control_residuals_too() -> None:
    unet = shared_unet("SD1")
    cut, call = Oracle(unet, 3), a_call(unet)
    first, last = torch.randn(2, 16, 8, 8), torch.randn(2, 16, 8, 8)
    controlled = replace(call, control=Control(input=(first,), output=(None,) * 11 + (last,)))
    output, deep = cut.whole(controlled)
    assert torch.equal(output, our_output(unet, controlled))
    assert torch.equal(cut.shallow(controlled, deep), output)
    assert relative_error(cut.shallow(call, deep), output) > 1e-3
