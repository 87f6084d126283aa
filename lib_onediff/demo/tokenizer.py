"""CLIP's tokenizer: its vocabulary is found on this machine, or made of single bytes for the random model."""
from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ModelProblem

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

VOCABULARY, MERGES = "vocab.json", "merges.txt"
MERGES_ARCHIVE = "bpe_simple_vocab_16e6.txt.gz"
MERGES_OF_CLIP = 49152 - 256 - 2
START, END = "<|startoftext|>", "<|endoftext|>"
BYTE_TOKENS = 2 * 256 + 2
PACKAGES_WITH_ARCHIVE = ("open_clip", "clip")
CACHED_REPOSITORIES = (
    "openai/clip-vit-large-patch14",
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-v1-5",
    "CompVis/stable-diffusion-v1-4",
    "stabilityai/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-xl-base-1.0",
)


def copy_vocabulary(checkpoint: Path, folder: Path) -> None:
    """Put vocab.json and merges.txt for a checkpoint file into folder.

    Looked for beside the checkpoint, in the local Hugging Face cache, and in installed packages that carry it.
    Raises ModelProblem, saying what to put where, when there is none.
    """
    for place in [*places_beside(checkpoint), *places_in_cache()]:
        if (place / VOCABULARY).is_file() and (place / MERGES).is_file():
            shutil.copyfile(place / VOCABULARY, folder / VOCABULARY)
            shutil.copyfile(place / MERGES, folder / MERGES)
            return
    for archive in archives(checkpoint):
        if archive.is_file():
            write_from_archive(archive, folder)
            return
    raise ModelProblem(
        f"{checkpoint.name} holds no tokenizer, and CLIP's vocabulary was not found on this machine. Put a folder "
        f"named tokenizer with {VOCABULARY} and {MERGES} beside it (every Stable Diffusion folder in diffusers' "
        "layout has one)."
    )


def places_beside(checkpoint: Path) -> Iterator[Path]:
    """Folders near the checkpoint that may hold the vocabulary."""
    parent = checkpoint.resolve().parent
    yield from (parent / "tokenizer", parent / checkpoint.stem / "tokenizer", parent)


def places_in_cache() -> Iterator[Path]:
    """Folders of the local Hugging Face cache that hold the vocabulary."""
    from huggingface_hub import try_to_load_from_cache

    for repository in CACHED_REPOSITORIES:
        for name in (VOCABULARY, f"tokenizer/{VOCABULARY}"):
            found = try_to_load_from_cache(repository, name)
            if isinstance(found, str):
                yield Path(found).parent


def archives(checkpoint: Path) -> Iterator[Path]:
    """Where the list of merges that CLIP was published with may be."""
    yield checkpoint.resolve().parent / MERGES_ARCHIVE
    for package in PACKAGES_WITH_ARCHIVE:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(place) / MERGES_ARCHIVE


def write_from_archive(archive: Path, folder: Path) -> None:
    """Write vocab.json and merges.txt from CLIP's published list of merges, from which both follow."""
    with gzip.open(archive, "rt", encoding="utf-8") as lines:
        write_vocabulary(folder, lines.read().split("\n")[1 : MERGES_OF_CLIP + 1])


def write_vocabulary(folder: Path, merges: list[str]) -> None:
    """Write both files: tokens are each byte inside a word, each at the end of one, the merges, start and end."""
    from transformers.models.clip.tokenization_clip import bytes_to_unicode

    symbols = list(bytes_to_unicode().values())
    words = ["".join(merge.split()) for merge in merges]
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *words, START, END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / VOCABULARY).write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / MERGES).write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def byte_tokenizer(pad_token: str = END) -> CLIPTokenizer:
    """A CLIPTokenizer of 77 positions whose tokens are single bytes (75 characters of ASCII fill one chunk)."""
    from transformers import CLIPTokenizer

    with tempfile.TemporaryDirectory(prefix="onediff-tokenizer-") as folder:
        write_vocabulary(Path(folder), [])
        return CLIPTokenizer(
            f"{folder}/{VOCABULARY}", f"{folder}/{MERGES}", unk_token=END, bos_token=START, eos_token=END,
            pad_token=pad_token, model_max_length=77,
        )
