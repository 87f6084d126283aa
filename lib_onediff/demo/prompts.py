"""Encoding prompts as the WebUI does: any length, in chunks of 75 tokens, each with its start and end."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 75
# Tokenizers compare all parts of a word with each other again and again: no word is longer than this.
LONG_WORD = re.compile(r"(\S{256})(?=\S)")


@dataclass(frozen=True)
class EncodedPrompts:
    """An encoded batch of prompts: context (batch, 77 * chunks, width); pooled (batch, width), or None for SD1/SD2."""

    context: Tensor
    pooled: Tensor | None


def encode(
    pipeline: Any, prompts: list[str], negative_prompts: list[str], interrupted: Callable[[], bool] = lambda: False
) -> tuple[EncodedPrompts, EncodedPrompts] | None:
    """Encode prompts and negative prompts (one of each per image) to the same number of tokens.

    interrupted: asked between the chunks of long prompts; where it says so, there is no result.
    """
    encoders = text_encoders(pipeline)
    texts = [*prompts, *negative_prompts]
    tokens = [tokens_of(tokenizer, texts) for tokenizer, _ in encoders]
    chunks = max(1, *(-(-len(row) // CHUNK) for rows in tokens for row in rows))
    contexts, pooled = [], None
    for (tokenizer, encoder), rows in zip(encoders, tokens, strict=True):
        encoded = encode_tokens(tokenizer, encoder, rows, chunks, is_sdxl(pipeline), interrupted)
        if encoded is None:
            return None
        context, pooled = encoded
        contexts.append(context)
    context = torch.cat(contexts, dim=-1).to(pipeline.unet.dtype)
    if pooled is not None:
        pooled = pooled.to(pipeline.unet.dtype)
    count = len(prompts)
    prompt, negative = (
        EncodedPrompts(context[part], None if pooled is None else pooled[part])
        for part in (slice(None, count), slice(count, None))
    )
    return prompt, negative


def text_encoders(pipeline: Any) -> list[tuple[Any, Any]]:
    """The pipeline's (tokenizer, text encoder) pairs; SDXL has two, its refiner only the second."""
    pairs = [
        (pipeline.tokenizer, pipeline.text_encoder),
        (getattr(pipeline, "tokenizer_2", None), getattr(pipeline, "text_encoder_2", None)),
    ]
    return [pair for pair in pairs if pair[1] is not None]


def is_sdxl(pipeline: Any) -> bool:
    """Whether the UNet takes SDXL's pooled text and size embedding."""
    return pipeline.unet.config.addition_embed_type == "text_time"


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text. A text is read once: most are the same for every image of a batch."""
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    read = {text: tokenizer(LONG_WORD.sub(r"\1 ", text), **options).input_ids for text in dict.fromkeys(texts)}
    return [read[text] for text in texts]


def encode_tokens(
    tokenizer: Any, encoder: Any, texts: list[list[int]], chunks: int, penultimate: bool,
    interrupted: Callable[[], bool],
) -> tuple[Tensor, Tensor | None] | None:
    """(context, pooled) of one text encoder; pooled is that of the first chunk, None if the encoder has none.

    texts: the tokens of each. None in place of both once interrupted.
    """
    parts, pooled = [], None
    for chunk in range(chunks):
        if interrupted():
            return None
        rows = [chunk_row(tokenizer, tokens[chunk * CHUNK : (chunk + 1) * CHUNK]) for tokens in texts]
        output = encoder(torch.tensor(rows, device=encoder.device), output_hidden_states=penultimate)
        parts.append(output.hidden_states[-2] if penultimate else output.last_hidden_state)
        if chunk == 0:
            pooled = getattr(output, "text_embeds", None)
    return torch.cat(parts, dim=1), pooled


def chunk_row(tokenizer: Any, tokens: list[int]) -> list[int]:
    """77 token ids: start, up to 75 tokens, end, padding."""
    row = [tokenizer.bos_token_id, *tokens, tokenizer.eos_token_id]
    return row + [tokenizer.pad_token_id] * (CHUNK + 2 - len(row))
