"""Prompts in the standalone host: encoded as a WebUI does, in bounded time, and refused with a sentence."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from tiny_sdxl import tiny_sdxl_pipeline

from lib_onediff.demo import limits, prompts
from lib_onediff.demo.loaded_model import LoadedModel
from lib_onediff.demo.modules import processing, shared
from lib_onediff.demo.refusal import Refusal
from lib_onediff.demo.tiny_model import tiny_sd15_pipeline


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(tiny_sd15_pipeline(), "small")

def test_prompts_of_one_chunk_are_encoded_as_the_pipeline_does() -> None:
    for pipeline in (tiny_sd15_pipeline(), tiny_sdxl_pipeline()):
        with torch.no_grad():
            positive, negative = prompts.encode(pipeline, ["a fox"], ["rain"])
            expected = pipeline.encode_prompt("a fox", negative_prompt="rain", device="cpu", num_images_per_prompt=1,
                                              do_classifier_free_guidance=True)
        assert torch.allclose(positive.context, expected[0], atol=1e-5)
        assert torch.allclose(negative.context, expected[1], atol=1e-5)
        if positive.pooled is not None:
            assert torch.allclose(positive.pooled, expected[2], atol=1e-5)
            assert torch.allclose(negative.pooled, expected[3], atol=1e-5)


@pytest.mark.parametrize("characters, tokens", [(0, 77), (75, 77), (76, 154), (151, 231)])
def test_long_prompts_take_more_chunks(characters: int, tokens: int) -> None:
    with torch.no_grad():
        positive, negative = prompts.encode(tiny_sd15_pipeline(), ["a" * characters], ["b"])
    assert positive.context.shape[1] == negative.context.shape[1] == tokens


class CountingTokenizer:
    """The pipeline's tokenizer, and how many letters it has read."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.letters = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.letters += len(text)
        return self.tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_a_long_prompt_is_read_once() -> None:
    pipeline = tiny_sd15_pipeline()
    counting = CountingTokenizer(pipeline.tokenizer)
    pipeline = SimpleNamespace(unet=pipeline.unet, text_encoder=pipeline.text_encoder, tokenizer=counting)
    with torch.no_grad():
        prompts.encode(pipeline, ["a " * 300] * 4, [""] * 4)
    assert counting.letters == 600


def test_no_word_is_longer_than_a_tokenizer_bears() -> None:
    read: list[str] = []

    def tokenizer(text: str, **options: Any) -> Any:
        read.append(text)
        return SimpleNamespace(input_ids=[])

    emoji = "\N{FOX FACE}" * 1500
    prompts.tokens_of(tokenizer, [emoji, "a fox, a castle"])
    assert max(map(len, read[0].split())) <= 256 and read[0].replace(" ", "") == emoji
    assert read[1] == "a fox, a castle"


@pytest.mark.parametrize("text", ["\N{FOX FACE}" * 10_000, "a" * 6001, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 2001])
def test_prompts_that_take_long_to_encode_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match="at most"):
        limits.check_prompt("prompt", text)
    limits.check_prompt("prompt", text[:1500])


def test_encoding_a_prompt_can_be_interrupted() -> None:
    answers = iter([False, False, True])
    with torch.no_grad():
        assert prompts.encode(tiny_sd15_pipeline(), ["a" * 600], ["b"], lambda: next(answers)) is None


def test_interrupt_before_the_sampling_makes_no_picture(model: LoadedModel) -> None:
    class InterruptedGeneration(processing.StableDiffusionProcessingTxt2Img):
        def setup_conds(self) -> bool:
            shared.state.interrupt()
            return super().setup_conds()

    p = InterruptedGeneration(prompt="a", seed=1, width=64, height=64, n_iter=3)
    p.sd_model = model
    shared.state.begin("test")
    try:
        assert processing.process_images(p).images == []
    finally:
        shared.state.end()
