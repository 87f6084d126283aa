"""The UNets of Forge and of sgm (A1111's SDXL), from a checkout that the environment names.

Neither is on a package registry, and none of their code is in this repository. Point ONEDIFF_FORGE at a checkout of
stable-diffusion-webui-forge, ONEDIFF_SGM at one of Stability AI's generative-models, to run these.
"""
from __future__ import annotations

import copy
import importlib
import os
import sys
import types
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, GROUPS, a_call, our_output, randomise, relative_error
from torch import Tensor, nn

from lib_onediff.core.call import Control, UNetCall
from lib_onediff.families.registry import read_layout

FORGE, SGM = os.environ.get("ONEDIFF_FORGE"), os.environ.get("ONEDIFF_SGM")
needs_forge = pytest.mark.skipif(not FORGE, reason="ONEDIFF_FORGE names no checkout of Forge")
needs_sgm = pytest.mark.skipif(not SGM, reason="ONEDIFF_SGM names no checkout of generative-models")

Y_WIDTH = 56
COMMON = {"in_channels": 4, "model_channels": 32, "out_channels": 4, "context_dim": CONTEXT_WIDTH}
SD1 = {
    **COMMON, "num_res_blocks": [2] * 4, "channel_mult": (1, 2, 4, 4), "num_heads": 8, "use_spatial_transformer": True,
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_output": [1] * 9 + [0] * 3,
    "transformer_depth_middle": 1, "use_linear_in_transformer": False,
}
SDXL = {
    **COMMON, "num_res_blocks": [2] * 3, "channel_mult": (1, 2, 4), "num_head_channels": 16,
    "use_spatial_transformer": True, "transformer_depth": [0, 0, 2, 2, 3, 3],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 3, 3, 3], "transformer_depth_middle": 3,
    "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": Y_WIDTH,
}
SGM_SDXL = {
    **COMMON, "num_res_blocks": 2, "channel_mult": (1, 2, 4), "num_head_channels": 16, "attention_resolutions": [4, 2],
    "transformer_depth": [1, 2, 3], "use_linear_in_transformer": True, "num_classes": "sequential",
    "adm_in_channels": Y_WIDTH, "spatial_transformer_attn_type": "softmax",
}
SGM_REFINER = {
    **SGM_SDXL, "channel_mult": (1, 2, 4, 4), "transformer_depth": [4] * 4, "context_dim": [CONTEXT_WIDTH] * 4,
}


def forge_unet(**config: Any) -> Any:
    root = os.path.abspath(FORGE or "")
    for path in (root, os.path.join(root, "packages_3rdparty")):
        if path not in sys.path:
            sys.path.append(path)
    arguments, sys.argv = sys.argv, ["forge", "--always-cpu", "--attention-pytorch"]
    try:
        module = pytest.importorskip("backend.nn.unet", reason="Forge's own requirements are not installed")
    finally:
        sys.argv = arguments
    return with_small_groups(module.IntegratedUNet2DConditionModel(**copy.deepcopy(config)))


def sgm_unet(**config: Any) -> Any:
    # sgm/__init__.py pulls in the training stack; the UNet needs none of it.
    for name in ("sgm", "sgm.modules"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(SGM or "", *name.split("."))]
        sys.modules.setdefault(name, package)
    module = importlib.import_module("sgm.modules.diffusionmodules.openaimodel")
    return with_small_groups(module.UNetModel(**copy.deepcopy(config)))


def with_small_groups(unet: nn.Module) -> nn.Module:
    for module in unet.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = GROUPS
    return randomise(unet)


def call_for(unet: Any, height: int, width: int, y: int | None, **others: Any) -> UNetCall:
    call = a_call(unet, height, width, **others)
    label = torch.randn(call.latent.shape[0], y) if y else None
    return UNetCall(call.latent, call.timestep, call.context, label)


@torch.inference_mode()
def host_output(unet: Any, call: UNetCall, **others: Any) -> Tensor:
    return unet(call.latent, call.timestep, context=call.context, y=call.y, **others)


@needs_forge
@pytest.mark.parametrize(("config", "y"), [(SD1, None), (SDXL, Y_WIDTH)], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("size", [(8, 8), (9, 11), (45, 60)])
def test_forge_gets_its_own_output(config: dict[str, Any], y: int | None, size: tuple[int, int]) -> None:
    unet = forge_unet(**config)
    call = call_for(unet, *size, y, tokens=154)
    assert read_layout(unet).family == "forge"
    assert relative_error(our_output(unet, call), host_output(unet, call, transformer_options={})) < 1e-5


@needs_forge
def test_forge_control_slots_are_ours_in_the_order_they_are_popped() -> None:
    unet = forge_unet(**SD1)
    call = call_for(unet, 9, 11, None)
    shapes: list[torch.Size] = []
    hooks = [block.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
             for block in (*unet.input_blocks, unet.middle_block)]
    host_output(unet, call)
    for hook in hooks:
        hook.remove()
    *skips, middle = (torch.randn(shape) for shape in shapes)
    adapter = [None if index % 3 else torch.randn_like(skip) for index, skip in enumerate(skips)]
    control = Control(tuple(adapter), (middle,), tuple(reversed(skips)))
    popped = {"input": adapter[::-1], "middle": [middle], "output": skips}
    expected = host_output(unet, call, control=popped)
    ours = our_output(unet, UNetCall(call.latent, call.timestep, call.context, control=control))
    assert relative_error(ours, expected) < 1e-5


@needs_sgm
@pytest.mark.parametrize("config", [SGM_SDXL, SGM_REFINER], ids=["SDXL", "refiner"])
@pytest.mark.parametrize("size", [(8, 8), (16, 24)])
def test_sgm_gets_its_own_output(config: dict[str, Any], size: tuple[int, int]) -> None:
    unet = sgm_unet(**config)
    call = call_for(unet, *size, Y_WIDTH)
    assert relative_error(our_output(unet, call), host_output(unet, call)) < 1e-5


@needs_sgm
def test_ssd_as_a1111_makes_it_by_deleting_layers_from_sdxl() -> None:
    unet = sgm_unet(**SGM_SDXL)
    delattr(unet.middle_block, "1")
    delattr(unet.output_blocks[0][1].transformer_blocks, "2")
    delattr(unet.output_blocks[1][1].transformer_blocks, "0")
    call = call_for(unet, 8, 8, Y_WIDTH)
    assert relative_error(our_output(unet, call), host_output(unet, call)) < 1e-5
