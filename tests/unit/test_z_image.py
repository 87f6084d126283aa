"""diffusers' ZImageTransformer2DModel, computed by OneDiff: the output is close to that of its own forward."""
from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import CONTEXT_WIDTH, randomise, relative_error
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE, ONEFLOW
from left_to_the_host import IN_BLOCK, IN_CALL, IN_CONFIG, check_left_to_the_host
from own_forward import own_forward
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.leaves import names_of
from lib_onediff.devices.oneflow.gate import OneFlowGate
from lib_onediff.devices.oneflow.route import NOT_A_UNET, OneFlow
from lib_onediff.families.registry import FAMILIES
from lib_onediff.hosts.diffusers.unet import UNKNOWN_HALVES
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps.registry import step_policies

code = pytest.importorskip("diffusers.models.transformers.transformer_z_image", reason="needs diffusers 0.36")
CHANNELS = 4
SMALL = {
    "in_channels": CHANNELS, "dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
    "cap_feat_dim": CONTEXT_WIDTH, "axes_dims": [16, 16, 16], "axes_lens": [700, 40, 40],
}


def network(**config: Any) -> Any:
    return randomise(code.ZImageTransformer2DModel(**{**SMALL, **config})).requires_grad_(False)


def call(height: int = 6, width: int = 10, tokens: tuple[int, ...] = (5, 20)) -> dict[str, Any]:
    """The arguments of a call. tokens: the length of each image's prompt."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(height * width))
    return {
        "x": [random(CHANNELS, 1, height, width) for _ in tokens], "t": torch.linspace(0.1, 0.9, len(tokens)),
        "cap_feats": [random(length, CONTEXT_WIDTH) for length in tokens],
    }


@torch.no_grad()
def ours(unet: Any, given: dict[str, Any]) -> Tensor:
    """The samples of a call, computed by our forward, after a check that they are close to those of diffusers' own
    forward."""
    output = unet(**given)
    expected = own_forward(unet)(**given)
    assert type(output) is type(expected)
    for made, theirs in zip(output.sample, expected.sample, strict=True):
        assert relative_error(made, theirs) < 1e-5 and made.shape == theirs.shape
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    return torch.stack(unet(**given, return_dict=False)[0])


def test_our_output_is_close_to_that_of_diffusers_and_an_edit_takes_effect_at_the_next_call() -> None:
    """ours() compares each output. The prompts of a batch are padded to one length, or to several. The edits are of a
    padding token and of four kinds of layers."""
    unet = lib_onediff.compile_unet(network())
    for inputs in ((6, 10, (1,)), (14, 2, (32, 9)), (8, 8, (600, 33)), (16, 24, (70, 3, 64))):
        given = call(*inputs)
        before = ours(unet, given)
    unet.cap_pad_token.add_(1)
    before, after = ours(unet, given), before
    assert relative_error(after, before) > 1e-3
    for name in ("adaLN_modulation.0", "attention.norm_q", "attention.to_k", "feed_forward.w3"):
        # Every second row alone: the norm after a layer would undo one factor for all rows.
        unet.layers[1].get_submodule(name).weight[::2].mul_(1.5)
        before, after = ours(unet, given), before
        assert relative_error(after, before) > 1e-3


@torch.no_grad()
def test_a_graph_serves_prompts_of_other_lengths_that_are_padded_to_the_same_length(
    pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts are padded to 32 tokens. Outputs are compared with those of diffusers' own forward."""
    monkeypatch.setattr(runtime.two_gpus, "is_used", False)
    unet = lib_onediff.compile_unet(network(), backend=NATIVE)
    for tokens in ((9, 31), (20, 3), (32, 1), (5, 32)):
        given = call(tokens=tokens)
        output = unet(**given).sample
        for made, theirs in zip(output, own_forward(unet)(**given).sample, strict=True):
            assert relative_error(made, theirs) < 1e-5
    assert lib_onediff.status()["route"] == "graph", lib_onediff.status()["reason"]


def test_loras_are_computed_and_uncompiling_restores_the_pipeline() -> None:
    """LoRAs of PEFT are on eight kinds of layers. With them, ours() compares the output with diffusers' own; without
    them, the output is close to the first one; after uncompiling, it equals the first one to the bit."""
    peft = pytest.importorskip("peft")
    unet = network()
    expected = unet(**call()).sample
    pipe = SimpleNamespace(transformer=unet)
    lib_onediff.compile_pipe(pipe)
    layers = ["to_q", "to_v", "to_out.0", "w1", "w2", "w3", "cap_embedder.1", "layers.1.adaLN_modulation.0"]
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False), "a")
    assert relative_error(ours(unet, call()), torch.stack(expected)) > 1e-2
    unet.unload_lora()
    assert relative_error(ours(unet, call()), torch.stack(expected)) < 1e-5
    lib_onediff.uncompile_pipe(pipe)
    assert "forward" not in vars(unet)
    assert torch.equal(torch.stack(unet(**call()).sample), torch.stack(expected))


@torch.no_grad()
def test_the_images_of_a_z_image_pipeline_are_close_to_those_of_diffusers() -> None:
    """The pipeline runs with guidance and with prompts of several lengths. Its VAE is of Flux's kind, and OneDiff
    computes it too."""
    diffusers = pytest.importorskip("diffusers")
    blocks = 2
    vae = randomise(diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * blocks, up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=[32] * blocks, latent_channels=CHANNELS, norm_num_groups=8, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.1,
    ))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.ZImagePipeline(scheduler, vae, None, None, network())
    pipe.set_progress_bar_config(disable=True)
    given = call(tokens=(40, 7, 33, 9))["cap_feats"]

    def image() -> Tensor:
        found: Tensor = pipe(
            prompt_embeds=given[:2], negative_prompt_embeds=given[2:], num_inference_steps=3, guidance_scale=4.0,
            height=64, width=96, output_type="pt", generator=torch.Generator().manual_seed(3),
        ).images
        return found

    expected = image()
    lib_onediff.compile_pipe(pipe)
    assert (image() - expected).abs().max() < 1e-3
    status = lib_onediff.status()
    assert (status["route"], status["vae"]["route"]) == ("plain", "ours"), status["reason"]
    lib_onediff.uncompile_pipe(pipe)


@torch.no_grad()
def test_the_negative_prompt_of_z_image_is_computed_with_a_reason_that_names_no_separate_calls() -> None:
    """diffusers' pipeline computes the prompt and the negative prompt in one call."""
    runtime.stepping.policies = step_policies()
    unet = lib_onediff.compile_unet(network(), skip_negative_after=50)
    times = [1 - step / 16 for step in range(16)]
    with lib_onediff.sampling(unet, times):
        for time in times:
            unet(**{**call(), "t": torch.full((2,), 1 - time)})
    assert UNKNOWN_HALVES in lib_onediff.status()["guidance"]["reason"]


def test_oneflow_is_not_tried_for_z_image_and_stays_usable_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneFlow lacks operators that a transformer needs, and one graph that fails would switch it off for all models."""
    monkeypatch.setattr(OneFlowGate, "why_not", lambda *given: None)
    ours(lib_onediff.compile_unet(network(), backend="oneflow"), call())
    assert NOT_A_UNET in lib_onediff.status()["reason"]
    device = cast("OneFlow", runtime.devices.named(ONEFLOW))
    assert (device.failure, device.count) == ("", 0)


def test_units_of_z_image_name_every_layer_once() -> None:
    """Units are groups of layers in the order in which their weights are streamed."""
    layout = FAMILIES.read(network())
    family = FAMILIES.of(layout)
    named = [name for unit in family.units(layout, family.example(layout, (8, 8), 1, 77, torch.randn)) for name in unit]
    assert sorted(named) == sorted(names_of(layout))


@pytest.mark.parametrize(("where", "change", "reason"), [
    (IN_CONFIG, {"siglip_feat_dim": 8}, "omni"),
    (IN_CONFIG, {"all_patch_size": (2, 4), "all_f_patch_size": (1, 1)}, "4-1"),
    (IN_BLOCK, {"attention.to_out.0": nn.Linear(96, 96)}, "has a bias"),
    (IN_BLOCK, {"extra": nn.Linear(2, 2)}, "extra"),
    (IN_BLOCK, {"attention.processor": type("Other", (code.ZSingleStreamAttnProcessor,), {})()}, "its processor is"),
    (IN_CALL, {"controlnet_block_samples": {0: torch.ones(1)}}, "passes controlnet_block_samples"),
    (IN_CALL, {"joint_attention_kwargs": {"scale": 0.5}}, "passes joint_attention_kwargs"),
    (IN_CALL, {"x": call(8, 8)["x"][:1] + call()["x"][:1]}, "several sizes"),
    (IN_CALL, {"t": torch.ones(2, dtype=torch.float64)}, "float32"), (IN_CALL, call(7, 10), "patches of 2"),
    (IN_CALL, call(6, 82), "larger than this model"), (IN_CALL, call(tokens=(5, 699)), "larger than this model"),
    (IN_CALL, {"cap_feats": [torch.ones(3, 5)] * 2}, "the prompt (shape"),
], ids=lambda value: "" if isinstance(value, dict) else value)
@torch.no_grad()
def test_an_unsupported_z_image_network_or_call_is_computed_by_diffusers(
    where: str, change: dict[str, Any], reason: str
) -> None:
    """where: what is unsupported: the configuration, a block, or an argument of the call. change: its unsupported
    values. reason: a part of the reason in the status."""
    check_left_to_the_host(network, "layers.1", call(), where, change, reason)
