"""Half precision: our rounding error is not larger than the host's, both measured against the host in float32."""
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
    """Our relative error divided by that of `host` in this dtype, as a mean over networks. exact: the forward that is
    run in float32, with the same weights in half precision, for the output that both are compared with."""
    ratios = []
    for seed in range(NETWORKS):
        deepcache = build(seed).to(dtype)
        call = cast(a_call(deepcache, 8, 8, PICTURES, seed=seed), dtype)
        expected = exact(copy.deepcopy(deepcache).float(), cast(call, torch.float32))
        ours = our_output(deepcache, replace(call, upcast_attention=upcast))
        ratios.append(relative_error(ours.float(), expected) / relative_error(host(deepcache, call).float(), expected))
    return statistics.geometric_mean(ratios)


@grid(name=["SD1", "SDXL"], dtype=HALF_TYPES)
def test_our_rounding_error_is_at_most_diffusers(name: str, dtype: torch.dtype) -> None:
    """Up to WORST_RATIO; see error_ratio()."""
    layout = {"SD1": {**SD1, **WIDER}, "SDXL": {**SDXL, **WIDER_SDXL}}[name]
    build = partial(diffusers_unet, **layout)
    ratio = error_ratio(build, dtype, host=diffusers_output, exact=diffusers_output)
    assert ratio <= WORST_RATIO


@pytest.mark.parametrize("dtype", first(1, HALF_TYPES), ids=str)
def test_our_rounding_error_with_upcast_attention_is_at_most_that_of_diffusers_upcast_attention(
    dtype: torch.dtype
) -> None:
    """SD 2 with A1111's option "upcast cross attention to float32". diffusers' AttnProcessor upcasts by the config of
    SD2."""
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
def test_our_rounding_error_is_at_most_ldms_under_autocast(name: str, dtype: torch.dtype) -> None:
    """As A1111 runs it."""
    def host(unet: nn.Module, call: UNetCall) -> Tensor:
        unet.dtype = dtype
        with autocast_as_on_a_gpu(dtype):
            return ldm_output(unet, call)

    build = partial(ldm_unet, **LDM_LAYOUTS[name])
    assert error_ratio(build, dtype, host=host, exact=ldm_output) <= WORST_RATIO
