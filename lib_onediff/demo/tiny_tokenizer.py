"""A CLIP tokenizer made as code: bytes are its vocabulary, so that it needs no downloaded files."""
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY_SIZE = 2 * 256 + 2


def byte_tokenizer(pad_token: str = END) -> CLIPTokenizer:
    """A CLIPTokenizer of 77 positions whose tokens are single bytes (75 characters of ASCII fill one chunk)."""
    from transformers import CLIPTokenizer

    with tempfile.TemporaryDirectory(prefix="onediff-tokenizer-") as folder:
        vocabulary_file, merges_file = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary_file.write_text(json.dumps(byte_vocabulary()), encoding="utf-8")
        merges_file.write_text("#version: 0.2\n", encoding="utf-8")
        return CLIPTokenizer(
            str(vocabulary_file),
            str(merges_file),
            unk_token=END,
            bos_token=START,
            eos_token=END,
            pad_token=pad_token,
            model_max_length=77,
        )


def byte_vocabulary() -> dict[str, int]:
    """Token to id: each byte inside a word, each byte at the end of a word, start and end of text."""
    from transformers.models.clip.tokenization_clip import bytes_to_unicode

    symbols = list(bytes_to_unicode().values())
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), START, END]
    return {token: index for index, token in enumerate(tokens)}
