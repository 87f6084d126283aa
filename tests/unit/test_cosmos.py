"""diffusers' CosmosTransformer3DModel (Cosmos-Predict2 and Anima), computed by OneDiff: its output is close to that of
the model's own forward."""
from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, randomise, relative_error
from left_to_the_host import IN_BLOCK, IN_CALL, IN_CONFIG, check_left_to_the_host
from own_forward import own_forward
from torch import Tensor, nn
from torch.nn import functional

import lib_onediff

code = pytest.importorskip("diffusers.models.transformers.transformer_cosmos", reason="needs diffusers 0.33")
SMALL = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2,
    "mlp_ratio": 2.0, "text_embed_dim": CONTEXT_WIDTH, "adaln_lora_dim": 16, "max_size": (8, 40, 40),
    "extra_pos_embed_type": None, "crossattn_proj_in_channels": CONTEXT_WIDTH,
}
ONE_PIXEL = {"patch_size": (1, 1, 1), "num_attention_heads": 3, "rope_scale": (1.0, 4.0, 3.0)}
# The functions of torchvision that diffusers calls, in case torchvision is not installed.
NEAREST = SimpleNamespace(resize=lambda mask, size, interpolation: functional.interpolate(mask, size))
vars(code).setdefault("transforms", SimpleNamespace(functional=NEAREST, InterpolationMode=SimpleNamespace(NEAREST="")))


def network(**config: Any) -> Any:
    return randomise(code.CosmosTransformer3DModel(**{**SMALL, **config})).requires_grad_(False)


def call(height: int = 6, width: int = 10, batch: int = 2, frames: int = 1) -> dict[str, Any]:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(height * width))
    return {
        "hidden_states": random(batch, 4, frames, height, width), "timestep": torch.linspace(0.9, 0.2, batch),
        "encoder_hidden_states": random(batch, 20, CONTEXT_WIDTH), "padding_mask": random(1, 1, 8 * height, 8 * width),
    }


@torch.no_grad()
def ours(unet: Any, given: dict[str, Any]) -> Tensor:
    """The output of our forward for a call. Asserts that our forward computed it, and that it is within 1e-5 of the
    output of diffusers' own forward."""
    output = unet(**given)
    expected = own_forward(unet)(**given)
    assert relative_error(output.sample, expected.sample) < 1e-5 and type(output) is type(expected)
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    return unet(**given, return_dict=False)[0]


@pytest.mark.parametrize("config", [{}, ONE_PIXEL, {"concat_padding_mask": False}, {"in_channels": 5}], ids=str)
def test_outputs_are_close_to_diffusers_and_an_edit_takes_effect_at_the_next_call(config: dict[str, Any]) -> None:
    """The reference is diffusers' own forward (see ours), before and after weights are edited in place. config:
    replaces values of SMALL; with 5 channels, the last one is a condition mask."""
    unet = lib_onediff.compile_unet(network(**config))
    for size in ((6, 10, 1), (14, 2, 2), (16, 24, 2)):
        given = call(*size)
        given["condition_mask"] = given["hidden_states"][:, :1].sign() if "in_channels" in config else None
        before = ours(unet, given)
    for name in ("norm2.linear_2", "attn1.norm_q", "ff.net.0.proj"):
        unet.transformer_blocks[1].get_submodule(name).weight.mul_(1.5)
        before, after = ours(unet, given), before
        assert relative_error(after, before) > 1e-3


def test_loras_are_computed_in_our_forward_and_uncompiling_restores_the_transformer() -> None:
    """The reference is diffusers' own forward (see ours). compile_pipe() with ignores=["transformer"] adds no attribute
    to the transformer."""
    peft = pytest.importorskip("peft")
    unet = network()
    attributes = dict(vars(unet))
    expected = unet(**call()).sample
    pipe = SimpleNamespace(transformer=unet)
    assert vars(lib_onediff.compile_pipe(pipe, ignores=["transformer"]).transformer) == attributes
    layers = ["to_q", "to_v", "to_out.0", "linear_1", "linear_2", "proj", "proj_out"]
    lib_onediff.compile_pipe(pipe)
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False), "a")
    assert relative_error(ours(unet, call()), expected) > 1e-2
    unet.unload_lora()
    assert relative_error(ours(unet, call()), expected) < 1e-5
    lib_onediff.uncompile_pipe(pipe)
    assert "forward" not in vars(unet) and torch.equal(unet(**call()).sample, expected)


@pytest.mark.parametrize(("where", "change", "reason"), [
    (IN_CONFIG, {"extra_pos_embed_type": "learnable"}, "learned positions"),
    (IN_CONFIG, {"use_crossattn_projection": True, "encoder_hidden_states_channels": 48}, "projection of the prompt"),
    (IN_CONFIG, {"img_context_dim_in": 8}, "a second attention"), (IN_CONFIG, {"patch_size": (1, 1, 2)}, "(1, 1, 2)"),
    (IN_BLOCK, {"attn1.to_out.0": nn.Linear(64, 64)}, "has a bias (transformer_blocks.1.attn1.to_out.0.bias)"),
    (IN_BLOCK, {"attn2.processor": type("Other", (code.CosmosAttnProcessor2_0,), {})()}, "its processor is"),
    (IN_BLOCK, {"ff.net.0.approximate": "tanh"}, "tanh"), (IN_BLOCK, {"norm2.norm.eps": 0.1}, "its norms differ"),
    (IN_CALL, {"block_controlnet_hidden_states": []}, "passes block_controlnet"), (IN_CALL, {"fps": 16}, "passes fps"),
    (IN_CALL, {"attention_mask": torch.arange(20).expand(2, -1) < 9}, "passes attention_mask"),
    (IN_CALL, {"timestep": torch.ones(2, 1, 1, 1, 1)}, "not one number"), (IN_CALL, call(frames=2), "one image"),
    (IN_CALL, call(7, 10), "multiples of 2, up to 40"), (IN_CALL, call(6, 42), "multiples of 2, up to 40"),
    (IN_CALL, {"encoder_hidden_states": (None,)}, "several"), (IN_CALL, {"padding_mask": None}, "OneDiff failed"),
], ids=lambda value: "" if isinstance(value, dict) else value)
@torch.no_grad()
def test_unsupported_networks_and_calls_are_computed_by_the_original_forward(
    where: str, change: dict[str, Any], reason: str
) -> None:
    """The output, or the error, must equal that of diffusers' own forward. where: whether the configuration of the
    network, a block, or the arguments of the call are changed. reason: a part of the reason in the status."""
    check_left_to_the_host(network, "transformer_blocks.1", call(), where, change, reason)


@pytest.mark.parametrize(("folder", "name"), [("Anima-2B", "Anima"), ("Predict2-2B", "Cosmos")])
@torch.no_grad()
def test_the_status_names_the_model_by_its_folder(folder: str, name: str, tmp_path: Path) -> None:
    """Anima and Cosmos have the same class, so the status uses the name of the folder from which the model was
    loaded."""
    network().save_pretrained(tmp_path / folder / "transformer")
    unet = code.CosmosTransformer3DModel.from_pretrained(tmp_path / folder / "transformer")
    ours(lib_onediff.compile_unet(unet.requires_grad_(False)), call())
    assert lib_onediff.status()["model"] == name
