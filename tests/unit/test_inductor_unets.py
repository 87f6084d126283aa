"""Whole UNets by the inductor backend's operators against the hosts' own forwards, compiled for the CPU, in float32."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import (
    ATTENTION_DOWN,
    ATTENTION_UP,
    GROUPS,
    SD1,
    SDXL,
    a_call,
    diffusers_unet,
    host_output,
    ldm_unet,
    our_output,
    relative_error,
    wrap_round,
)
from inductor_fixtures import without_our_files
from test_unet_control import ldm_with_control, residuals, skip_shapes
from torch import Tensor, nn

from lib_onediff.engines.inductor.helper import compile_region
from lib_onediff.engines.inductor.plan import regions_of, weights_without_numbers
from lib_onediff.model.call import Control, UNetCall
from lib_onediff.model.read import read_layout
from lib_onediff.ops.availability import why_no_inductor
from lib_onediff.ops.inductor.operators import InductorOperators
from lib_onediff.ops.inductor.regions import Region, Shapes

CPU = torch.device("cpu")
LACK = why_no_inductor(CPU)
pytestmark = pytest.mark.skipif(LACK is not None, reason=LACK or "")

CLOSE = 1e-5
# All layers as wide: what one of these UNets needs serves the others.
TWO_LEVELS = {
    "block_out_channels": (32, 32), "layers_per_block": 1, "down_block_types": (ATTENTION_DOWN, ATTENTION_DOWN),
    "up_block_types": (ATTENTION_UP, ATTENTION_UP), "norm_num_groups": GROUPS, "attention_head_dim": 4,
}
TWO_LDM_LEVELS = {"num_res_blocks": 1, "channel_mult": [1, 1], "attention_resolutions": [1, 2]}
UNETS: dict[str, Callable[[], nn.Module]] = {
    "SD1": lambda: diffusers_unet(**{**SD1, **TWO_LEVELS}),
    "SD2": lambda: diffusers_unet(**{**SD1, **TWO_LEVELS, "use_linear_projection": True, "upcast_attention": True}),
    "SDXL": lambda: diffusers_unet(**{**SDXL, **TWO_LEVELS, "transformer_layers_per_block": (1, 2)}),
    "ldm SD1": lambda: ldm_unet(**TWO_LDM_LEVELS),
    "ldm SD2": lambda: ldm_unet(
        **{**TWO_LDM_LEVELS, "num_heads": -1}, num_head_channels=8, use_linear_in_transformer=True
    ),
}


@pytest.fixture(scope="module")
def operators(compilers_store: Path) -> Iterator[InductorOperators]:
    with pytest.MonkeyPatch.context() as patch:
        without_our_files(compilers_store, patch)
        yield InductorOperators()


def needed_regions(unet: nn.Module, single: bool) -> dict[Region, Shapes]:
    layout = read_layout(unet)
    return regions_of(layout, weights_without_numbers(unet, layout, torch.float32), CPU, single)


def compiled_output(unet: nn.Module, call: UNetCall, operators: InductorOperators) -> Tensor:
    for region, shapes in needed_regions(unet, single=call.latent.shape[0] == 1).items():
        if not operators.region(region).is_ready:
            compile_region(operators.region(region), shapes)
    output = our_output(unet, call, operators)
    assert operators.refused() == 0
    return output


def error(unet: nn.Module, call: UNetCall, operators: InductorOperators) -> float:
    return relative_error(compiled_output(unet, call, operators), host_output(unet, call))


@pytest.mark.parametrize("name", UNETS)
def test_a_whole_unet_is_the_hosts(name: str, operators: InductorOperators) -> None:
    unet = UNETS[name]()
    # Two pictures or the two halves of the guidance, one with an odd side, and one picture alone.
    for shape in ((8, 12, 2), (9, 6, 2), (7, 5, 1)):
        assert error(unet, a_call(unet, *shape), operators) < CLOSE, shape


def test_what_one_layout_needs_serves_the_others() -> None:
    needed = {name: set(needed_regions(UNETS[name](), single=False)) for name in UNETS}
    assert needed["SD1"] and all(regions == needed["SD1"] for regions in needed.values())


def test_weights_and_a_latent_in_channels_last_give_the_same(operators: InductorOperators) -> None:
    unet = UNETS["SDXL"]()
    call = a_call(unet, 9, 6)
    expected = host_output(unet, call)
    call = replace(call, latent=call.latent.to(memory_format=torch.channels_last))
    assert relative_error(compiled_output(unet, call, operators), expected) < CLOSE
    unet.to(memory_format=torch.channels_last)
    assert relative_error(compiled_output(unet, call, operators), expected) < CLOSE


def test_tiling_wraps_round_the_edges(operators: InductorOperators) -> None:
    unet = UNETS["SD1"]()
    call = a_call(unet, 8, 6)
    flat = host_output(unet, call)
    wrap_round(unet)
    assert error(unet, call, operators) < CLOSE
    assert relative_error(host_output(unet, call), flat) > 1e-3


def test_residuals_of_a_control_are_added(operators: InductorOperators) -> None:
    unet = UNETS["ldm SD1"]()
    call = a_call(unet, 8, 6)
    shapes = skip_shapes(unet, call)
    everywhere = set(range(len(shapes)))
    control = Control(residuals(shapes, everywhere), (torch.randn(shapes[-1]),), residuals(shapes[::-1], everywhere))
    controlled = replace(call, control=control)
    expected = ldm_with_control(unet, controlled)
    assert relative_error(compiled_output(unet, controlled, operators), expected) < CLOSE
    assert relative_error(expected, host_output(unet, call)) > 1e-2
