"""Forge Neo's Z-Image and Lumina 2: padded prompts, LoRAs on their joint projections (one layer for queries, keys and
values), and the calls and networks that OneDiff leaves to the host.

Tests of all transformers of Neo are in test_transformers_of_neo.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, relative_error
from contract_hosts import calls_of, random, running
from left_to_the_host import replace_part
from test_generations import OURS, close
from torch import Tensor, nn
from transformer_hosts import Lumina2Host, ZImageHost

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime

QKV = "layers.1.attention.qkv.weight"


@pytest.fixture(params=[ZImageHost, Lumina2Host], ids=lambda kind: kind.model)
def host(fresh_runtime: None, request: pytest.FixtureRequest) -> Iterator[ZImageHost]:
    with running("neo", request.param) as made:
        yield made


@pytest.fixture
def z_image(fresh_runtime: None) -> Iterator[ZImageHost]:
    with running("neo", ZImageHost) as made:
        yield made


def test_a_call_whose_tensors_do_not_fit_the_network_is_refused(z_image: ZImageHost) -> None:
    """Each change makes one tensor of a valid call wrong: its number of dimensions, channels or batch rows, or a prompt
    length that is no multiple of 32. Without the check, our forward would fail or broadcast."""
    layout = FAMILIES.read(z_image.unet)
    family = FAMILIES.of(layout)
    call: Any = family.example(layout, (8, 8), 2, 77, torch.randn)
    family.refuse_call(layout, call)
    for change, reason in (
        ({"latent": call.latent[:, :2]}, "latent .*fit"), ({"latent": call.latent[:, :, None]}, "latent .*fit"),
        ({"context": call.context[..., :5]}, "prompt .*fit"), ({"context": call.context[:, :77]}, "prompt .*fit"),
        ({"context": call.context[:1]}, "different batch sizes"),
        ({"lengths": call.lengths[:1]}, "different batch sizes"),
    ):
        with pytest.raises(Refusal, match=reason):
            family.refuse_call(layout, replace(call, **change))


def test_prompts_that_are_padded_to_the_same_length_have_one_shape(z_image: ZImageHost) -> None:
    """Z-Image pads prompts to multiples of 32 tokens. Calls with 33, 40 and 64 tokens are one entry in the table of
    shapes, so that one CUDA graph serves them all; 65 tokens are a second entry."""
    expected = [z_image.output(tokens=tokens) for tokens in (33, 40, 64)]
    z_image.begin()
    for tokens, theirs in zip((33, 40, 64), expected, strict=True):
        ours, calls = calls_of(lambda tokens=tokens: z_image.output(tokens=tokens))
        assert calls == {"plain": 1} and relative_error(ours, theirs) < 1e-5, runtime.status()["reason"]
    assert len(runtime.table.entries()) == 1
    z_image.output(tokens=65)
    assert len(runtime.table.entries()) == 2


def with_joint_lora(host: ZImageHost, online: bool) -> None:
    """Set three LoRAs on rows of a joint projection, as Neo does when it loads a LoRA with diffusers' layer names."""
    rows, width = host.unet.get_parameter(QKV).shape
    head_width = width // host.unet.layers[1].attention.n_local_heads
    parts = (0, width), (width, head_width), (rows - head_width, head_width)
    patcher = host.checkpoint.forge_objects_original.unet.clone()
    for seed, (first, count) in enumerate(parts):
        factors = 0.3 * random(count, 3, seed=seed), 0.3 * random(3, width, seed=9 + seed)
        patch = [0.7, ("lora", (*factors, 6.0, None, None)), 1.0, (0, first, count), None, online]
        patcher.lora.setdefault(f"diffusion_model.{QKV}", []).append(patch)
    host.checkpoint.forge_objects_after_applying_lora.unet = patcher


@pytest.mark.parametrize("online", [True, False])
def test_our_generation_shows_loras_on_rows_of_a_joint_projection(host: ZImageHost, online: bool) -> None:
    """A joint projection computes queries, keys and values in one layer; each LoRA changes some of its output rows. Our
    generation must be close to the host's with the LoRAs, and the host's without them must not be. online: whether a
    LoRA is computed at each use; otherwise the host merges it into the weight."""
    plain = host.generate()
    with_joint_lora(host, online)
    expected = host.generate()
    assert relative_error(expected.latent, plain.latent) > 1e-2
    host.start()
    ours, calls = calls_of(host.generate)
    assert calls == OURS and close(ours, expected), runtime.status()["reason"]
    if online:
        assert any("LoRA on the fly" in entry.key.weights for entry in runtime.table.entries())


def alter_result(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Replace a function by one with another result: multiplying it would have no effect, because norms follow."""
    function = getattr(owner, name)

    def changed(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        return tuple(one + one.flip(-1) for one in found) if isinstance(found, tuple) else found + found.flip(-1)

    patch.setattr(owner, name, changed)


@pytest.mark.parametrize("path", [
    "attention_function", "pad_to_patch_size", "clamp_fp16", "apply_rope", "FeedForward.forward",
    "JointAttention.forward",
])
def test_only_calls_with_a_replaced_function_of_the_host_are_left_to_the_host(z_image: ZImageHost, path: str) -> None:
    """path: a function in Neo's module of the network, replaced as an extension would. Our forward does not call these
    functions, and would ignore the replacement. OneDiff serves the calls without it."""
    owner, _, name = path.rpartition(".")

    def changed() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            alter_result(patch, getattr(z_image.code, owner) if owner else z_image.code, name)
            return z_image.output()

    z_image.check_that_only_changed_calls_run_the_host(changed, path, least_change=1e-3)


def test_a_call_with_an_attention_mask_for_the_prompt_is_left_to_the_host(z_image: ZImageHost) -> None:
    z_image.begin()
    _, calls = calls_of(lambda: z_image.output(attention_mask=torch.ones(2, 1, 1, 32, dtype=torch.bool)))
    assert calls == {"host": 1} and "attention_mask" in runtime.status()["reason"]


@pytest.mark.parametrize(("reason", "path", "value"), [
    ("a pooled prompt", "clip_text_pooled_proj", nn.Linear(2, 2)),
    ("expected SiLU", "t_embedder.mlp.1", nn.GELU()),
    ("without weight", "final_layer.norm_final", nn.LayerNorm(64)),
    ("has a bias", "layers.1.attention.out", nn.Linear(64, 64)),
    ("has a bias", "layers.0.feed_forward.w2", nn.Linear(128, 64)),
    ("q_norm is a torch", "layers.0.attention.q_norm", nn.LayerNorm(32)),
    ("its modulation is", "layers.0.modulation", False),
    ("such as layers.0.extra", "layers.0.extra", nn.Linear(CONTEXT_WIDTH, 2)),
])
def test_a_network_with_an_unknown_module_or_value_is_refused(
    z_image: ZImageHost, reason: str, path: str, value: Any
) -> None:
    """path: the module or attribute that is replaced by value; our forward would ignore it. reason: a part of the
    message."""
    replace_part(z_image.unet, path, value)
    with pytest.raises(Refusal, match=reason):
        FAMILIES.read(z_image.unet)
