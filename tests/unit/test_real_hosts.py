"""The UNets and VAEs of Forge and of sgm (A1111's SDXL), from a checkout that the environment names.

Neither is on a package registry, and none of their code is in this repository. Point ONEDIFF_FORGE at a checkout of
stable-diffusion-webui-forge, ONEDIFF_SGM at one of Stability AI's generative-models, to run these.
"""
from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vae_builders
from builders import CONTEXT_WIDTH, a_call, our_output, relative_error, without_initial_values
from torch import Tensor
from vae_builders import LDM, a_latent, host_picture, last, our_picture, with_small_groups

from lib_onediff.core.call import Control, UNetCall
from lib_onediff.families.registry import read_decoder, read_layout
from lib_onediff.hosts.forge.traits import FORGE as FORGE_TRAITS
from lib_onediff.hosts.hooks import VaeHooks
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")
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


def forge_module(name: str) -> Any:
    root = os.path.abspath(FORGE or "")
    for path in (root, os.path.join(root, "packages_3rdparty")):
        if path not in sys.path:
            sys.path.append(path)
    arguments, sys.argv = sys.argv, ["forge", "--always-cpu", "--attention-pytorch"]
    try:
        return pytest.importorskip(name, reason="Forge's own requirements are not installed")
    finally:
        sys.argv = arguments


def sgm_module(name: str) -> Any:
    # sgm/__init__.py pulls in the training stack; the networks need none of it.
    for parent in ("sgm", "sgm.modules"):
        package = types.ModuleType(parent)
        package.__path__ = [os.path.join(SGM or "", *parent.split("."))]
        sys.modules.setdefault(parent, package)
    return importlib.import_module(name)


def forge_unet(config: dict[str, Any]) -> Any:
    kind = forge_module("backend.nn.unet").IntegratedUNet2DConditionModel
    return with_small_groups(kind(**copy.deepcopy(config)))


def sgm_unet(config: dict[str, Any]) -> Any:
    kind = sgm_module("sgm.modules.diffusionmodules.openaimodel").UNetModel
    return with_small_groups(kind(**copy.deepcopy(config)))


def ssd(config: dict[str, Any]) -> Any:
    """As A1111 makes it, by deleting layers from SDXL."""
    unet = sgm_unet(config)
    delattr(unet.middle_block, "1")
    delattr(unet.output_blocks[0][1].transformer_blocks, "2")
    delattr(unet.output_blocks[1][1].transformer_blocks, "0")
    return unet


@torch.inference_mode()
def unet_output(unet: Any, call: UNetCall, **others: Any) -> Tensor:
    return unet(call.latent, call.timestep, context=call.context, y=call.y, **others)


@pytest.mark.parametrize("size", [(8, 8), (16, 24), (9, 11)])
@pytest.mark.parametrize(("build", "config"), [
    pytest.param(forge_unet, SD1, marks=needs_forge), pytest.param(forge_unet, SDXL, marks=needs_forge),
    pytest.param(sgm_unet, SGM_SDXL, marks=needs_sgm), pytest.param(sgm_unet, SGM_REFINER, marks=needs_sgm),
    pytest.param(ssd, SGM_SDXL, marks=needs_sgm),
], ids=["Forge SD1", "Forge SDXL", "sgm SDXL", "sgm refiner", "SSD"])
def test_a_unet_gets_its_own_output(build: Callable, config: dict[str, Any], size: tuple[int, int]) -> None:
    if build is not forge_unet and size == (9, 11):
        pytest.skip("A1111 resizes odd sizes by a patch of sgm")
    unet = build(config)
    call = a_call(unet, *size, tokens=154)
    if "adm_in_channels" in config:
        call = UNetCall(call.latent, call.timestep, call.context, torch.randn(2, Y_WIDTH))
    options = {"transformer_options": {}} if build is forge_unet else {}
    assert (read_layout(unet).family == "forge") is (build is forge_unet)
    assert relative_error(our_output(unet, call), unet_output(unet, call, **options)) < 1e-5


@needs_forge
def test_forge_control_slots_are_ours_in_the_order_they_are_popped() -> None:
    unet = forge_unet(SD1)
    call = a_call(unet, 9, 11)
    shapes: list[torch.Size] = []
    hooks = [block.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
             for block in (*unet.input_blocks, unet.middle_block)]
    unet_output(unet, call)
    for hook in hooks:
        hook.remove()
    *skips, middle = (torch.randn(shape) for shape in shapes)
    adapter = [None if index % 3 else torch.randn_like(skip) for index, skip in enumerate(skips)]
    control = Control(tuple(adapter), (middle,), tuple(reversed(skips)))
    expected = unet_output(unet, call, control={"input": adapter[::-1], "middle": [middle], "output": skips})
    ours = our_output(unet, UNetCall(call.latent, call.timestep, call.context, control=control))
    assert relative_error(ours, expected) < 1e-5


def forge_half(kind: str, forge_layers: bool = True, **config: Any) -> Any:
    """A decoder or encoder of Forge's, in the layers that its loader builds it with."""
    forge_module("backend.nn.unet")
    module = forge_module("backend.nn.vae")
    with without_initial_values(), contextlib.redirect_stdout(io.StringIO()):
        made = getattr(module, kind)(**{**LDM, **config})
    operations = importlib.import_module("backend.operations").ForgeOperations
    for layer in made.modules() if forge_layers else ():
        if hasattr(operations, type(layer).__name__):
            layer.__class__ = getattr(operations, type(layer).__name__)
            layer.parameters_manual_cast = False
    return with_small_groups(made)


def sgm_half(kind: str, **config: Any) -> Any:
    sgm_module("sgm.modules.diffusionmodules.model")
    return vae_builders.ldm_decoder(module="sgm.modules.diffusionmodules.model", kind=kind, **config)


@pytest.mark.parametrize("kind", ["Decoder", "Encoder"])
@pytest.mark.parametrize(("build", "config"), [
    pytest.param(sgm_half, {}, marks=needs_sgm), pytest.param(sgm_half, {"z_channels": 16}, marks=needs_sgm),
    pytest.param(sgm_half, {"attn_resolutions": [16]}, marks=needs_sgm),
    pytest.param(forge_half, {"forge_layers": False}, marks=needs_forge),
    pytest.param(forge_half, {"forge_layers": True}, marks=needs_forge),
], ids=["SD", "Flux", "attention", "torch's layers", "Forge's layers"])
def test_a_vae_gets_its_own_picture(build: Callable, config: dict[str, Any], kind: str) -> None:
    half = build(kind, **config)
    given = a_latent(half, 5, 7, batch=2) if kind == "Decoder" else torch.rand(2, 3, 24, 40)
    assert read_decoder(half).family == ("sgm" if build is sgm_half else "backend")
    with torch.inference_mode():
        assert relative_error(our_picture(half, given), host_picture(half, given)) < 1e-5
    assert last() == ("ours", "")


@needs_forge
def test_forge_with_another_attention_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = forge_half("Decoder")
    module = forge_module("backend.nn.vae")
    own = module.Decoder.__dict__["forward"]
    patches = VaeHooks([module.Decoder], HostTraits(), FORGE_TRAITS.check_vae)
    patches.serve()
    try:
        latent = a_latent(decoder)
        with torch.no_grad():
            decoder(latent)
            assert last() == ("ours", "")
            monkeypatch.setattr(module, "attention_function_single_head_spatial", lambda q, k, v: v)
            assert torch.equal(decoder(latent), own(decoder, latent))
        assert last() == ("host", f"the attention of the WebUI's VAE was replaced by {__name__}")
    finally:
        patches.stop()
    assert module.Decoder.__dict__["forward"] is own
