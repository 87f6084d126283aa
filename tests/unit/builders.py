"""Small UNets with the topology of real ones and random weights, and functions that compute a call by the host's
forward or by ours."""
from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from own_forward import own_forward
from tiny_weights import randomise
from torch import Tensor, nn

from lib_onediff.core.operators import Operators
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts import a1111 as a1111
from lib_onediff.hosts.diffusers import read_unet as read_unet
from lib_onediff.weights.bound import BoundNetwork

# The output of a call, by the family that reads the UNet's layout.
compute = FAMILIES.output
CONTEXT_WIDTH = 48
POOLED_WIDTH = 40
TIME_ID_WIDTH = 16
# With the real models' 32 groups, such narrow UNets would have one channel in a group. A group norm would then remove
# every shift, and errors in the time embedding or in a convolution's bias would not change the output.
GROUPS = 4

ATTENTION_DOWN = "CrossAttnDownBlock2D"
PLAIN_DOWN = "DownBlock2D"
ATTENTION_UP = "CrossAttnUpBlock2D"
PLAIN_UP = "UpBlock2D"

SD1 = {
    "block_out_channels": (16, 32, 64, 64), "norm_num_groups": GROUPS, "cross_attention_dim": CONTEXT_WIDTH,
    "attention_head_dim": 8,
}
SD2 = {**SD1, "attention_head_dim": (2, 4, 8, 8), "use_linear_projection": True, "upcast_attention": True}
SDXL = {
    **SD1, "block_out_channels": (16, 32, 64), "attention_head_dim": (2, 4, 8), "use_linear_projection": True,
    "down_block_types": (PLAIN_DOWN, ATTENTION_DOWN, ATTENTION_DOWN),
    "up_block_types": (ATTENTION_UP, ATTENTION_UP, PLAIN_UP), "transformer_layers_per_block": (0, 2, 3),
    "addition_embed_type": "text_time", "addition_time_embed_dim": TIME_ID_WIDTH,
    "projection_class_embeddings_input_dim": POOLED_WIDTH + 6 * TIME_ID_WIDTH,
}
REFINER = {
    **SDXL, "block_out_channels": (16, 32, 64, 64), "attention_head_dim": (2, 4, 8, 8),
    "down_block_types": (PLAIN_DOWN, ATTENTION_DOWN, ATTENTION_DOWN, PLAIN_DOWN),
    "up_block_types": (PLAIN_UP, ATTENTION_UP, ATTENTION_UP, PLAIN_UP), "transformer_layers_per_block": 4,
    "projection_class_embeddings_input_dim": POOLED_WIDTH + 5 * TIME_ID_WIDTH,
}
# SSD-1B has fewer blocks on the way up than down, and no attention in the middle.
SSD = {
    **SDXL, "mid_block_type": "UNetMidBlock2D", "transformer_layers_per_block": (0, (2, 1), (3, 1)),
    "reverse_transformer_layers_per_block": ((3, 1, 2), (2, 1, 1), 0),
}
LCM = {**SD1, "time_cond_proj_dim": 24}
INPAINTING = {**SD1, "in_channels": 9}
ONE_LAYER_A_BLOCK = {**SD1, "layers_per_block": 1}
NO_MIDDLE = {**SD1, "mid_block_type": None}
# The fewest layers that show everything except topology.
SMALL = {
    **SD1, "block_out_channels": (16, 32), "layers_per_block": 1, "down_block_types": (ATTENTION_DOWN, PLAIN_DOWN),
    "up_block_types": (PLAIN_UP, ATTENTION_UP),
}
SMALL_XL = {
    **SDXL, "block_out_channels": (16, 32), "layers_per_block": 1, "down_block_types": (PLAIN_DOWN, ATTENTION_DOWN),
    "up_block_types": (ATTENTION_UP, PLAIN_UP), "transformer_layers_per_block": (0, 2), "attention_head_dim": (2, 4),
}
LAYOUTS = {
    "small": SMALL, "small XL": SMALL_XL, "SD1": SD1, "SD2": SD2, "SDXL": SDXL, "refiner": REFINER, "SSD": SSD,
    "LCM": LCM, "inpainting": INPAINTING, "one layer a block": ONE_LAYER_A_BLOCK, "no middle": NO_MIDDLE,
}


@contextlib.contextmanager
def without_initial_values() -> Iterator[None]:
    """A context in which modules are made without random initial values, which would be replaced anyway."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (nn.Linear, nn.modules.conv._ConvNd, nn.GroupNorm, nn.LayerNorm):
            patch.setattr(kind, "reset_parameters", lambda self: None)
        yield


def diffusers_structure(config: dict[str, Any]) -> Any:
    """A diffusers UNet2DConditionModel with uninitialised weights. config: overrides, as in LAYOUTS."""
    from diffusers import UNet2DConditionModel

    with without_initial_values():
        return UNet2DConditionModel(**config)


def diffusers_unet(seed: int = 0, **config: Any) -> Any:
    """A diffusers UNet2DConditionModel with random weights. config: overrides, as in LAYOUTS; SMALL by default."""
    return randomise(diffusers_structure(config or SMALL), seed)


LDM_UNET = "ldm.modules.diffusionmodules.openaimodel"


def ldm_structure(config: dict[str, Any], module: str = LDM_UNET, kind: str = "UNetModel") -> Any:
    """ldm's UNetModel from stable-diffusion-sdkit, with uninitialised weights. config: overrides, as in LDM_LAYOUTS.
    module, kind: another module and class that takes the same arguments."""
    pytest.importorskip(LDM_UNET, reason="stable-diffusion-sdkit is not installed")
    layout: dict[str, Any] = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": 2,
        "attention_resolutions": [4, 2, 1], "channel_mult": [1, 2, 4, 4], "num_heads": 8, "transformer_depth": 1,
        "use_spatial_transformer": True, "context_dim": CONTEXT_WIDTH, "use_checkpoint": False, "legacy": False,
    }
    with without_initial_values():
        unet = getattr(importlib.import_module(module), kind)(**{**layout, **config})
    return with_small_groups(unet)


def with_small_groups(network: Any) -> Any:
    """Set the number of groups of each group norm to GROUPS."""
    for module in network.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = GROUPS
    return network


def ldm_unet(seed: int = 0, **config: Any) -> Any:
    """ldm's UNetModel with SD1's layout and random weights. Its own forward needs a1111_sizes() for odd latent
    sizes."""
    return randomise(ldm_structure(config), seed)


# The fewest layers that show everything except topology.
SMALL_LDM = {
    "model_channels": 32, "num_res_blocks": 1, "channel_mult": [1, 2], "num_heads": 2, "attention_resolutions": [2, 1],
}
# Triton's interpreter takes a millisecond or more for each group of a norm.
FEW_NORMS_LDM = {**SMALL_LDM, "attention_resolutions": [2]}
LDM_SD2 = {"num_heads": -1, "num_head_channels": 16, "use_linear_in_transformer": True}
LDM_LAYOUTS = {"SD1": {}, "SD2": LDM_SD2, "inpainting": {"in_channels": 9}}


@cache
def shared_unet(name: str) -> Any:
    """A diffusers UNet of a layout in LAYOUTS, shared by tests that do not change it."""
    return diffusers_unet(**LAYOUTS[name])


@cache
def shared_ldm_unet(name: str = "SD1") -> Any:
    """An ldm UNet of a layout in LDM_LAYOUTS, shared by tests that do not change it."""
    return ldm_unet(**LDM_LAYOUTS[name])


class ResizingTorch:
    """What A1111 puts in place of torch in ldm's openaimodel: cat resizes the first image to the size of the second."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(tensors: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        image, skip = tensors
        if image.shape[-2:] != skip.shape[-2:]:
            image = functional.interpolate(image, skip.shape[-2:], mode="nearest")
        return torch.cat([image, skip], *args, **kwargs)


@contextlib.contextmanager
def a1111_sizes() -> Iterator[None]:
    """A context in which ldm's forward takes latents of odd sizes, as in A1111."""
    from ldm.modules.diffusionmodules import openaimodel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openaimodel, "th", ResizingTorch())
        yield


def a_call(unet: Any, height: int = 8, width: int = 8, batch: int = 2, tokens: int = 77, seed: int = 0) -> UNetCall:
    """A call with random inputs for a UNet of this file. Height and width are in latent pixels; the timesteps of the
    batch's rows differ and are fractional."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    config = getattr(unet, "config", {})
    y_width = config.get("projection_class_embeddings_input_dim")
    guidance = config.get("time_cond_proj_dim")
    return UNetCall(
        latent=random(batch, config["in_channels"] if config else unet.in_channels, height, width),
        timestep=torch.tensor([981.25, 3.5, 417.0, 0.125]).repeat(batch)[:batch],
        context=random(batch, tokens, CONTEXT_WIDTH),
        y=random(batch, y_width) if y_width else None,
        timestep_condition=random(batch, guidance) if guidance else None,
    )


def diffusers_arguments(call: UNetCall) -> dict[str, Any]:
    """The arguments with which a diffusers pipeline makes this call, without call.control."""
    added = None
    if call.y is not None:
        # A label embedding takes y as a whole: pass it as the pooled text embedding, without size numbers.
        added = {"text_embeds": call.y, "time_ids": call.y.new_empty((call.y.shape[0], 0))}
    return {
        "sample": call.latent, "timestep": call.timestep, "encoder_hidden_states": call.context,
        "timestep_cond": call.timestep_condition, "added_cond_kwargs": added,
    }


@torch.no_grad()
def diffusers_output(unet: Any, call: UNetCall, **others: Any) -> Tensor:
    """The output of a diffusers UNet's own forward for a call, also if the UNet is compiled."""
    return own_forward(unet)(**diffusers_arguments(call), **others).sample


@torch.no_grad()
def served(unet: Any, call: UNetCall, **others: Any) -> Tensor:
    """The output of a diffusers UNet for a call: by OneDiff if the UNet is compiled and OneDiff serves the call."""
    return unet(**diffusers_arguments(call), **others).sample


@torch.no_grad()
def ldm_output(unet: Any, call: UNetCall) -> Tensor:
    """The output of an ldm UNet's own forward for a call."""
    with a1111_sizes():
        return unet(call.latent, call.timestep, context=call.context)


def host_output(unet: Any, call: UNetCall) -> Tensor:
    """The output of the host's own forward for a call. The UNet may be diffusers' or ldm's."""
    return diffusers_output(unet, call) if hasattr(unet, "config") else ldm_output(unet, call)


def wrap_round(network: nn.Module) -> None:
    """Set circular padding on every convolution, as A1111's tiling does."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"


@torch.no_grad()
def our_output(unet: nn.Module, call: UNetCall, ops: Operators = torch_ops) -> Tensor:
    """The output of our forward with these operators, without the runtime."""
    bound = BoundNetwork(unet, FAMILIES.read)
    bound.refresh(call)
    return compute(bound.layout, bound.binding.weights(), ops, call)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """||output - expected|| / ||expected|| in float64; infinite if the shapes or dtypes differ."""
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return float("inf")
    return float((output.double() - expected.double()).norm() / expected.double().norm())


@contextlib.contextmanager
def generating(runtime: Any, settings: Any, why_off: str = "") -> Iterator[None]:
    """A context in which calls belong to one generation with these settings. why_off: why OneDiff is off for it; "":
    it is on."""
    image = SimpleNamespace()
    runtime.generations.begin(image, settings, why_off)
    try:
        yield
    finally:
        runtime.generations.end(image)
