"""Tokenises captions by the tokenizer of emoji-sd."""
from __future__ import annotations

from pathlib import Path
from typing import Any

POSITIONS = 77


def read_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def tokens_of(tokenizer: Any, captions: list[str]) -> list[list[int]]:
    """POSITIONS tokens for each caption, padded as in Stable Diffusion."""
    return list(tokenizer(captions, padding="max_length", truncation=True, max_length=POSITIONS)["input_ids"])
