"""Keys, values and label embedding of a prompt are computed once, and again as soon as anything about them changed."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served

import lib_onediff
from lib_onediff.model import bound
from lib_onediff.model import conditioning as prompts
from lib_onediff.model.call import UNetCall
from lib_onediff.model.conditioning import MOST_SAVED, MOST_SIZES
from lib_onediff.runtime.runtime import runtime

CROSS_ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn2"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shape of every context whose keys and values were computed, in order."""
    shapes: list[tuple[int, ...]] = []
    original = bound.condition

    def counting(layout: Any, weights: Any, ops: Any, context: Any, y: Any) -> Any:
        shapes.append(tuple(context.shape))
        return original(layout, weights, ops, context, y)

    monkeypatch.setattr(bound, "condition", counting)
    yield shapes


@pytest.fixture
def unet() -> Any:
    return lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))


def must_be_right(unet: Any, call: UNetCall) -> None:
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 1e-5
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def steps(call: UNetCall, count: int) -> list[UNetCall]:
    """The calls of one sampling: latent and timestep change, the prompt does not."""
    return [replace(call, latent=call.latent + step, timestep=call.timestep - step) for step in range(count)]


def copied(call: UNetCall) -> UNetCall:
    return replace(call, context=call.context.clone(), y=call.y.clone())


class Sampling:
    """A pipeline's calls: it hands over the very same prompt tensors at every step."""

    def __init__(self, unet: Any, call: UNetCall) -> None:
        self.unet, self.call = unet, call
        self.added = None if call.y is None else {"text_embeds": call.y, "time_ids": torch.empty(len(call.y), 0)}

    @torch.no_grad()
    def step(self, step: int = 0) -> None:
        call = self.call
        given = (call.latent + step, call.timestep, call.context)
        output = self.unet(*given, added_cond_kwargs=self.added).sample
        expected = type(self.unet).forward(self.unet, *given, added_cond_kwargs=self.added).sample
        assert relative_error(output, expected) < 1e-5
        assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_a_prompt_is_computed_once_for_all_steps(unet: Any, computed: list) -> None:
    sampling = Sampling(unet, a_call(unet))
    for step in range(5):
        sampling.step(step)
    assert len(computed) == 1


@pytest.mark.parametrize("other", [{"tokens": 154}, {"batch": 1}], ids=str)
def test_prompts_of_two_sizes_take_turns_and_are_computed_once_each(other: dict[str, int], computed: list) -> None:
    """A1111 calls with prompt and negative prompt in turn where their lengths differ."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    one, two = Sampling(unet, a_call(unet)), Sampling(unet, a_call(unet, **other))
    for step in range(3):
        one.step(step)
        two.step(step)
    assert len(computed) == 2


def test_another_resolution_shares_the_prompt(unet: Any, computed: list) -> None:
    small = a_call(unet, 8, 8)
    large = replace(small, latent=torch.randn(2, 4, 12, 16))
    sampling = Sampling(unet, small)
    sampling.step()
    sampling.call = large
    sampling.step()
    assert len(computed) == 1


def test_another_context_tensor_is_another_prompt(unet: Any, computed: list) -> None:
    call = a_call(unet)
    for seed in range(3):
        must_be_right(unet, replace(call, context=a_call(unet, seed=seed).context))
    assert len(computed) == 3


def test_a_context_edited_in_place_is_another_prompt(unet: Any, computed: list) -> None:
    sampling = Sampling(unet, a_call(unet))
    sampling.step()
    sampling.call.context.add_(1.0)
    sampling.step()
    assert len(computed) == 2


@pytest.mark.parametrize("name", ["text_embeds", "time_ids"])
@pytest.mark.parametrize("in_place", [True, False])
def test_another_label_is_another_prompt(unet: Any, computed: list, name: str, in_place: bool) -> None:
    width = SMALL_XL["projection_class_embeddings_input_dim"] - 6 * SMALL_XL["addition_time_embed_dim"]
    sampling = Sampling(unet, a_call(unet))
    sampling.added = {"text_embeds": torch.randn(2, width), "time_ids": 100 * torch.rand(2, 6)}
    sampling.step()
    sampling.step()
    assert len(computed) == 1
    if in_place:
        sampling.added[name].add_(1.0)
    else:
        sampling.added[name] = sampling.added[name] + 1.0
    sampling.step()
    assert len(computed) == 2


@pytest.mark.parametrize(("parameter", "again"), [
    (f"{CROSS_ATTENTION}.to_k.weight", True), (f"{CROSS_ATTENTION}.to_v.weight", True),
    ("add_embedding.linear_2.weight", True), ("add_embedding.linear_2.bias", True), ("conv_in.weight", False),
])
def test_an_edited_parameter_computes_the_prompt_again_where_it_depends_on_it(
    unet: Any, computed: list, parameter: str, again: bool
) -> None:
    sampling = Sampling(unet, a_call(unet))
    sampling.step()
    with torch.no_grad():
        unet.get_parameter(parameter).mul_(1.5).add_(0.5)
    sampling.step()
    sampling.step()
    assert len(computed) == 1 + again


def test_a_host_with_new_tensors_at_every_call_has_its_prompt_computed_in_the_call(unet: Any, computed: list) -> None:
    """WebUIs do so, and say when a sampling begins. Whether a prompt is the last one's is not asked: that waits."""
    call = a_call(unet)
    for _ in range(2):
        runtime.begin_sampling(unet)
        for step in steps(call, 3):
            must_be_right(unet, copied(step))
        must_be_right(unet, replace(copied(call), context=call.context + 1.0))
        must_be_right(unet, replace(copied(call), context=call.context + 1.0, y=call.y + 1.0))
    assert not computed and not runtime.totals().prompts


def test_an_edit_behind_autograds_back_is_seen_by_the_next_announced_sampling(unet: Any) -> None:
    call = a_call(unet)
    runtime.begin_sampling(unet)
    must_be_right(unet, copied(call))
    unet.get_submodule(CROSS_ATTENTION).to_k.weight.data.mul_(2.0)
    runtime.begin_sampling(unet)
    must_be_right(unet, copied(call))


def test_inference_tensors_have_their_prompt_computed_in_the_call(unet: Any, computed: list) -> None:
    with torch.inference_mode():
        call = a_call(unet)
        for step in steps(call, 3):
            must_be_right(unet, copied(step))
        call.context.add_(1.0)
        must_be_right(unet, call)
    assert not computed


def test_two_unets_do_not_share_a_prompt(unet: Any, computed: list) -> None:
    other = lib_onediff.compile_unet(diffusers_unet(1, **SMALL_XL))
    call = a_call(unet)
    for _ in range(2):
        must_be_right(unet, call)
        must_be_right(other, call)
    assert len(computed) >= 2


def test_a_prompts_own_tensors_are_not_kept_alive(unet: Any) -> None:
    sampling = Sampling(unet, a_call(unet))
    sampling.step()
    gone = weakref.ref(sampling.call.context), weakref.ref(sampling.added["text_embeds"])
    del sampling
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_prompt_and_negative_prompt_called_alone_at_equal_length_are_computed_until_one_comes_back(
    unet: Any, computed: list
) -> None:
    """A WebUI that has little memory calls with one after the other."""
    prompt, negative = Sampling(unet, a_call(unet, batch=1)), Sampling(unet, a_call(unet, batch=1, seed=1))
    for step in range(10):
        prompt.step(step)
        negative.step(step)
    assert len(computed) == 3


def test_more_prompts_than_are_kept_are_computed_again(unet: Any, computed: list) -> None:
    samplings = [Sampling(unet, a_call(unet, batch=1, seed=seed)) for seed in range(MOST_SAVED + 2)]
    for step in range(2):
        for sampling in samplings:
            sampling.step(step)
    assert len(computed) == 2 * len(samplings)


def test_prompts_that_take_turns_and_are_too_large_to_keep_are_computed_again(
    unet: Any, computed: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Sampling(unet, a_call(unet)), Sampling(unet, a_call(unet, seed=1))
    one.step()
    held = runtime.totals().prompts
    monkeypatch.setattr(prompts, "MOST_SAVED_BYTES", held - 1)
    for step in range(2):
        two.step(step)
        one.step(step)
    assert len(computed) == 5 and runtime.totals().prompts == held


def test_prompts_are_counted_and_given_back(unet: Any) -> None:
    before = runtime.totals().prompts
    samplings = [Sampling(unet, a_call(unet, batch=batch, seed=seed)) for batch in (1, 2) for seed in (0, 1)]
    for give_back in (runtime.purge, runtime.release_memory, runtime.free_graphs, lambda: runtime.release(unet)):
        for sampling in samplings:
            sampling.step()
        alone = runtime.totals().prompts - before
        for sampling in (*samplings, *samplings):
            sampling.step()
        # In each of the two sizes, both prompts are kept beside the address.
        assert runtime.totals().prompts - before == 3 * alone > 0
        give_back()
        assert runtime.totals().prompts == before


def test_prompts_of_one_sampling_after_the_other_are_not_kept(unet: Any, computed: list) -> None:
    Sampling(unet, a_call(unet)).step()
    held = runtime.totals().prompts
    for seed in range(1, 4):
        Sampling(unet, a_call(unet, seed=seed)).step()
    assert runtime.totals().prompts == held and len(computed) == 4


def test_many_sizes_of_prompts_do_not_pile_up(unet: Any) -> None:
    for batch in range(1, MOST_SIZES + 1):
        Sampling(unet, a_call(unet, batch=batch)).step()
    held = runtime.totals().prompts
    Sampling(unet, a_call(unet, batch=1, tokens=5)).step()
    assert runtime.totals().prompts < held


def test_the_prompts_of_a_unet_that_left_the_gpu_are_given_back(unet: Any) -> None:
    before = runtime.totals().prompts
    Sampling(unet, a_call(unet)).step()
    assert runtime.totals().prompts > before
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    runtime.rows()
    assert runtime.totals().prompts == before
