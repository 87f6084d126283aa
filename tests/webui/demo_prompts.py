"""Prompts as a WebUI encodes them: of any length, in chunks of 75 tokens, each with its start and end. The demo itself
leaves it to the pipeline, which cuts them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 75


@dataclass(frozen=True)
class EncodedPrompts:
    """An encoded batch of prompts: context (batch, 77 * chunks, width); pooled (batch, width), or None for SD1/SD2."""

    context: Tensor
    pooled: Tensor | None

    def rows(self, part: slice) -> EncodedPrompts:
        """Some of the prompts."""
        return EncodedPrompts(self.context[part], None if self.pooled is None else self.pooled[part])


def encode(
    pipeline: Any, prompts: list[str], negative_prompts: list[str]
) -> tuple[EncodedPrompts, EncodedPrompts]:
    """Encode prompts and negative prompts (one of each per image) to the same number of tokens."""
    texts, sdxl = [*prompts, *negative_prompts], is_sdxl(pipeline)
    pairs = [
        (pipeline.tokenizer, pipeline.text_encoder),
        (getattr(pipeline, "tokenizer_2", None), getattr(pipeline, "text_encoder_2", None)),
    ]
    # A refiner has the second only.
    encoders = [(tokenizer, encoder) for tokenizer, encoder in pairs if encoder is not None]
    tokens = [tokens_of(tokenizer, texts) for tokenizer, _ in encoders]
    chunks = max(1, *(-(-len(row) // CHUNK) for rows in tokens for row in rows))
    contexts, pooled = [], None
    for (tokenizer, encoder), rows in zip(encoders, tokens, strict=True):
        parts = [encode_chunk(tokenizer, encoder, rows, chunk, sdxl) for chunk in range(chunks)]
        contexts.append(torch.cat([context for context, _ in parts], dim=1))
        pooled = parts[0][1]
    dtype = pipeline.unet.dtype
    both = EncodedPrompts(torch.cat(contexts, dim=-1).to(dtype), None if pooled is None else pooled.to(dtype))
    return both.rows(slice(None, len(prompts))), both.rows(slice(len(prompts), None))


def is_sdxl(pipeline: Any) -> bool:
    """Whether the UNet takes SDXL's pooled text and size embedding."""
    return pipeline.unet.config.addition_embed_type == "text_time"


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text. A text is read once: most are the same for every image of a batch."""
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    read = {text: tokenizer(text, **options).input_ids for text in dict.fromkeys(texts)}
    return [read[text] for text in texts]


def encode_chunk(
    tokenizer: Any, encoder: Any, texts: list[list[int]], chunk: int, penultimate: bool
) -> tuple[Tensor, Tensor | None]:
    """(context, pooled) of one chunk: start, up to 75 tokens, end, padding. pooled is None if the encoder has none."""
    rows = []
    for tokens in texts:
        row = [tokenizer.bos_token_id, *tokens[chunk * CHUNK : (chunk + 1) * CHUNK], tokenizer.eos_token_id]
        rows.append(row + [tokenizer.pad_token_id] * (CHUNK + 2 - len(row)))
    output = encoder(torch.tensor(rows, device=encoder.device), output_hidden_states=penultimate)
    context = output.hidden_states[-2] if penultimate else output.last_hidden_state
    return context, getattr(output, "text_embeds", None)


def long_prompts(p: Any, count: int) -> dict[str, Any]:
    """In the place of a StableDiffusionProcessing's prompts."""
    positive, negative = encode(p.sd_model.pipeline, [p.prompt] * count, [p.negative_prompt] * count)
    inputs: dict[str, Any] = {"prompt_embeds": positive.context, "negative_prompt_embeds": negative.context}
    if positive.pooled is not None:
        inputs.update(pooled_prompt_embeds=positive.pooled, negative_pooled_prompt_embeds=negative.pooled)
    return inputs
