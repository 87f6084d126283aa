"""Half precision: our rounding error is not larger than the host's. Both errors are measured against the host's output
in float32, with the same weights."""
from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from builders import (
    LDM_LAYOUTS,
    SD1,
    SD2,
    SDXL,
    a_call,
    diffusers_output,
    diffusers_unet,
    ldm_output,
    ldm_unet,
    our_output,
    relative_error,
)
from grid import first, grid
from torch import Tensor, nn

from lib_onediff.families.unet.call import UNetCall

HALF_TYPES = (torch.float16, torch.bfloat16)
# The number of outputs that are averaged. Rounding errors of one output add up or cancel by chance; with so many, the
# ratio is known to 0.03.
NETWORKS = 3
PICTURES = 16
# Our error may be this many times the host's: 1, and a margin for the chance.
WORST_RATIO = 1.1
WIDER = {"block_out_channels": (32, 64, 128, 128), "norm_num_groups": 8}
WIDER_SDXL = {**WIDER, "block_out_channels": (32, 64, 128)}


def cast(call: UNetCall, dtype: torch.dtype) -> UNetCall:
    to = lambda tensor: None if tensor is None else tensor.to(dtype)  # noqa: E731
    return replace(call, latent=to(call.latent), context=to(call.context), y=to(call.y))


def error_ratio(
    build: Callable[[int], nn.Module], dtype: torch.dtype,
    *, host: Callable[[nn.Module, UNetCall], Tensor], exact: Callable[[nn.Module, UNetCall], Tensor],
    upcast: bool = False,
) -> float:
    """Our relative error in this dtype divided by that of `host`: the geometric mean over networks. Both errors are
    against the output of `exact` in float32 with the same half-precision weights. build: makes a network from a seed.
    upcast: our forward computes attention in float32."""
    ratios = []
    for seed in range(NETWORKS):
        unet = build(seed).to(dtype)
        call = cast(a_call(unet, 8, 8, PICTURES, seed=seed), dtype)
        expected = exact(copy.deepcopy(unet).float(), cast(call, torch.float32))
        ours = our_output(unet, replace(call, upcast_attention=upcast))
        ratios.append(relative_error(ours.float(), expected) / relative_error(host(unet, call).float(), expected))
    return statistics.geometric_mean(ratios)


@grid(name=["SD1", "SDXL"], dtype=HALF_TYPES)
def test_our_rounding_error_is_at_most_that_of_diffusers(name: str, dtype: torch.dtype) -> None:
    """Times WORST_RATIO, a margin for chance; see error_ratio()."""
    layout = {"SD1": {**SD1, **WIDER}, "SDXL": {**SDXL, **WIDER_SDXL}}[name]
    build = partial(diffusers_unet, **layout)
    ratio = error_ratio(build, dtype, host=diffusers_output, exact=diffusers_output)
    assert ratio <= WORST_RATIO


@pytest.mark.parametrize("dtype", first(1, HALF_TYPES), ids=str)
def test_our_rounding_error_with_upcast_attention_is_at_most_that_of_diffusers_with_it(
    dtype: torch.dtype
) -> None:
    """SD 2 with A1111's option "upcast cross attention to float32". diffusers' AttnProcessor upcasts, too, because SD
    2's config has upcast_attention. See error_ratio()."""
    from diffusers.models.attention_processor import AttnProcessor

    def build(seed: int) -> nn.Module:
        unet = diffusers_unet(seed, **{**SD2, **WIDER})
        unet.set_attn_processor(AttnProcessor())
        return unet

    assert error_ratio(build, dtype, host=diffusers_output, exact=diffusers_output, upcast=True) <= WORST_RATIO


@contextlib.contextmanager
def autocast_as_on_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """The autocast in which A1111 runs ldm, on a CPU: CUDA's computes norms in float32; the CPU's would raise here."""

    def group_norm(self: nn.GroupNorm, image: Tensor) -> Tensor:
        return functional.group_norm(image.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)

    def layer_norm(self: nn.LayerNorm, tokens: Tensor) -> Tensor:
        return functional.layer_norm(
            tokens.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=dtype):
        patch.setattr(nn.GroupNorm, "forward", group_norm)
        patch.setattr(nn.LayerNorm, "forward", layer_norm)
        patch.setattr("ldm.modules.attention._ATTN_PRECISION", "fp16")
        yield


@grid(name=["SD2", "SD1"], dtype=HALF_TYPES)
def test_our_rounding_error_is_at_most_that_of_ldm_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A1111 runs ldm under autocast. See error_ratio()."""
    def host(unet: nn.Module, call: UNetCall) -> Tensor:
        unet.dtype = dtype
        with autocast_as_on_a_gpu(dtype):
            return ldm_output(unet, call)

    build = partial(ldm_unet, **LDM_LAYOUTS[name])
    assert error_ratio(build, dtype, host=host, exact=ldm_output) <= WORST_RATIO
