"""diffusers' Krea2Transformer2DModel, computed by OneDiff: outputs are close to those of the model's own forward."""
from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import randomise, relative_error
from left_to_the_host import IN_BLOCK, IN_CALL, check_left_to_the_host
from own_forward import own_forward
from streaming_builders import EarlyCopyStream, LateCopyStream
from test_streaming import AWAY, TwoMemories, two_memories
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.inputs import take_rows
from lib_onediff.hosts.diffusers.krea2 import Krea2Calls

code = pytest.importorskip("diffusers.models.transformers.transformer_krea2", reason="needs diffusers 0.41")
SMALL = {
    "in_channels": 16, "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "timestep_embed_dim": 64, "text_hidden_dim": 32, "num_text_layers": 3,
    "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 48,
    "axes_dims_rope": (8, 12, 12),
}
__all__ = ["two_memories"]


def network(**config: Any) -> Any:
    return randomise(code.Krea2Transformer2DModel(**{**SMALL, **config})).requires_grad_(False)


def call(rows: int = 3, columns: int = 5, batch: int = 2, tokens: int = 7) -> dict[str, Any]:
    """The arguments of a call as the pipeline makes it. The mask hides the last token of the first prompt, the last two
    of the second, and so on."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(rows * columns))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    mask = torch.arange(tokens)[None] < tokens - torch.arange(1, batch + 1)[:, None]
    return {
        "hidden_states": random(batch, rows * columns, 16), "timestep": torch.linspace(0.9, 0.2, batch),
        "encoder_hidden_states": random(batch, tokens, 3, 32), "encoder_attention_mask": mask,
        "position_ids": torch.cat([torch.zeros(tokens, 3), places]),
    }


@torch.no_grad()
def ours(transformer: Any, given: dict[str, Any]) -> Tensor:
    """The sample of a call, computed by OneDiff, after a check that it is close to that of diffusers' own forward."""
    output = transformer(**given)
    expected = own_forward(transformer)(**given)
    assert relative_error(output.sample, expected.sample) < 1e-5 and type(output) is type(expected)
    assert output.sample.stride() == expected.sample.stride()
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    return transformer(**given, return_dict=False)[0]


def test_outputs_are_close_to_diffusers_and_an_edit_takes_effect_at_the_next_call() -> None:
    """ours() compares each output with diffusers' own forward, before and after each parameter is edited in place."""
    transformer = lib_onediff.compile_unet(network())
    for size in ((3, 5), (7, 1, 1, 600), (8, 12, 2, 20)):
        given = call(*size)
        for mask in (None, given["encoder_attention_mask"]):
            before = ours(transformer, {**given, "encoder_attention_mask": mask})
    block = transformer.transformer_blocks[1]
    for parameter in (
        block.scale_shift_table, block.attn.norm_k.weight, block.attn.to_gate.weight, block.ff.up.weight,
        transformer.text_fusion.projector.weight, transformer.final_layer.scale_shift_table,
    ):
        parameter.mul_(1.5)
        before, after = ours(transformer, given), before
        assert relative_error(after, before) > 1e-4


def test_position_ids_edited_in_place_change_the_next_output_as_in_diffusers() -> None:
    """First the ids are edited in the same tensor, then replaced by random ones, which form no grid. ours() compares
    each output with diffusers' own forward."""
    transformer = lib_onediff.compile_unet(network())
    given = call()
    before = ours(transformer, given)
    given["position_ids"][-15:, 1:] += 3
    after = ours(transformer, given)
    assert relative_error(after, before) > 1e-3
    ours(transformer, {**given, "position_ids": torch.randint(0, 9, (22, 3)).float()})


def test_a_packed_latent_is_unpacked_and_a_call_is_split_by_the_rows_of_its_batch() -> None:
    """The pipeline packs 2 x 2 pixels of the latent into one token; Krea2Calls reads 3 x 5 tokens as a latent of 6 x 10
    pixels. take_rows() selects rows of the latent, prompt and mask, but not of the positions, which all rows share. A
    call without a mask has another signature."""
    made = Krea2Calls()(network(), **call(3, 5))
    assert made.latent.shape == (2, 4, 6, 10)
    taken = take_rows(made, slice(1, 2))
    assert taken.mask is not None and taken.positions is not None
    assert len(taken.mask) == len(taken.context) == 1 and torch.equal(taken.positions, made.positions)
    assert replace(made, mask=None).signature != made.signature


@torch.no_grad()
def test_our_error_in_bfloat16_with_float32_norms_is_at_most_a_tenth_above_that_of_diffusers() -> None:
    """from_pretrained() loads bfloat16 models with norms in float32. Both errors are against a float32 copy of the
    model."""
    transformer = network().bfloat16()
    for module in transformer.modules():
        if type(module).__name__ == "Krea2RMSNorm":
            module.float()
    given = {
        name: value.bfloat16() if name in ("hidden_states", "encoder_hidden_states") else value
        for name, value in call().items()
    }
    exact = copy.deepcopy(transformer).float()(
        **{name: value if value.dtype == torch.bool else value.float() for name, value in given.items()}
    ).sample
    host = relative_error(transformer(**given).sample.float(), exact)
    output = lib_onediff.compile_unet(transformer)(**given).sample
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    assert output.dtype == torch.bfloat16 and relative_error(output.float(), exact) < 1.1 * host


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
@torch.no_grad()
def test_streamed_weights_have_arrived_when_they_are_read(
    two_memories: TwoMemories, copy_stream: type[EarlyCopyStream]
) -> None:
    """Half of the weights are in main memory and copied for each step. Each output is compared with diffusers' own
    forward. copy_stream: a stand-in that copies as early or as late as our waits allow, so that a missing wait gives a
    wrong output."""
    two_memories.copy_stream = copy_stream
    two_memories.is_away = AWAY["half"]
    transformer = network(num_layers=4)
    two_memories.knows(transformer)
    lib_onediff.compile_unet(transformer)
    for size in ((3, 5), (3, 5), (3, 5), (4, 4)):
        given = call(*size)
        assert relative_error(transformer(**given).sample, own_forward(transformer)(**given).sample) < 1e-5
    assert two_memories.alone == 0 and "of its weights are copied" in lib_onediff.status()["reason"]


def test_a_lora_is_computed_in_our_forward_and_uncompile_pipe_restores_the_transformer() -> None:
    """ours() compares each output with diffusers' own forward. After uncompile_pipe(), the output equals to the bit the
    one before compile_pipe()."""
    peft = pytest.importorskip("peft")
    transformer = network()
    with torch.no_grad():
        expected = transformer(**call()).sample
    pipe = SimpleNamespace(transformer=transformer)
    lib_onediff.compile_pipe(pipe)
    layers = ["to_q", "to_v", "to_gate", "to_out.0", "up", "down", "img_in", "projector", "time_mod_proj", "linear_2"]
    transformer.add_adapter(peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False), "a")
    assert relative_error(ours(transformer, call()), expected) > 1e-2
    transformer.unload_lora()
    assert relative_error(ours(transformer, call()), expected) < 1e-5
    lib_onediff.uncompile_pipe(pipe)
    assert "forward" not in vars(transformer)
    with torch.no_grad():
        assert torch.equal(transformer(**call()).sample, expected)


@pytest.mark.parametrize(("where", "change", "reason"), [
    (IN_BLOCK, {"attn.processor": type("Other", (code.Krea2AttnProcessor,), {})()}, "its processor is"),
    (IN_BLOCK, {"extra": nn.Linear(2, 2)}, "such as transformer_blocks.1.extra"),
    (IN_BLOCK, {"norm2": nn.LayerNorm(128)}, "expected Krea2RMSNorm"),
    (IN_BLOCK, {"attn.num_kv_heads": 4}, "heads of keys"),
    (IN_CALL, {"attention_kwargs": {"scale": 0.5}}, "passes attention_kwargs"),
    (IN_CALL, {"encoder_attention_mask": torch.ones(2, 7)}, "mask has"),
    (IN_CALL, {"timestep": torch.ones(1)}, "different batch sizes"),
    (IN_CALL, {"position_ids": torch.zeros(3, 22, 3)}, "positions have"),
    (IN_CALL, {"position_ids": torch.zeros(21, 3)}, "22 tokens"),
    (IN_CALL, {"hidden_states": None}, "not a tensor"),
], ids=lambda value: "" if isinstance(value, dict) else value)
@torch.no_grad()
def test_unsupported_blocks_and_calls_are_left_to_the_forward_of_diffusers(
    where: str, change: dict[str, Any], reason: str
) -> None:
    """where: whether `change` is made in a block or in the arguments of a call. The output, or the error, equals that
    of diffusers' own forward, and the status has the reason."""
    check_left_to_the_host(network, "transformer_blocks.1", call(), where, change, reason)
