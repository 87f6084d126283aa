"""A CLIP tokenizer of few tokens: byte pairs merged in the order in which captions need them."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..tokenizer import write_vocabulary
from .captions import BACKGROUNDS, PLACES
from .sources import Catalogue

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

MOST_TOKENS = 2048
BYTES, START_AND_END = 2 * 256, 2
POSITIONS = 77
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS_AROUND = (
    "a", "an", "and", "background", "beside", "flat", "on", "small", "large", "with", "the", "of", "in", "emoji",
    "next", "to",
)
WORD = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]+")


def texts_of(catalogue: Catalogue) -> Iterable[str]:
    """What captions are made of. Names count more than keywords: their words should be single tokens."""
    for _ in range(4):
        yield from WORDS_AROUND
        yield from (f"{name} background" for name in BACKGROUNDS)
        yield from PLACES
        for emoji in catalogue.emoji:
            yield emoji.name
    for emoji in catalogue.emoji:
        yield from emoji.keywords


def merges_of(texts: Iterable[str], most: int) -> list[str]:
    """The byte pairs to merge, most frequent first."""
    from tokenizers import Tokenizer, models, trainers

    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    words = [word for text in texts for word in WORD.findall(text)]
    trainer = trainers.BpeTrainer(
        vocab_size=BYTES + most, end_of_word_suffix="</w>", show_progress=False, min_frequency=1,
    )
    # Without a pre-tokenizer each text is one word.
    trained.train_from_iterator(words, trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges][:most]


def write_tokenizer(catalogue: Catalogue, folder: Path) -> CLIPTokenizer:
    """A tokenizer for the captions of a catalogue, as files too."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder, merges_of(texts_of(catalogue), MOST_TOKENS - BYTES - START_AND_END))
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), unk_token=END, bos_token=START, eos_token=END,
        pad_token=END, model_max_length=POSITIONS,
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def read_tokenizer(folder: Path) -> CLIPTokenizer:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def tokens_of(tokenizer: CLIPTokenizer, captions: list[str]) -> list[list[int]]:
    """Rows of POSITIONS tokens, filled up as Stable Diffusion does."""
    return list(tokenizer(captions, padding="max_length", truncation=True, max_length=POSITIONS)["input_ids"])
