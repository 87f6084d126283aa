"""Loads CLIP's tokenizer from a model folder that may be malicious.

A tokenizer.json describes a program, which a Rust library runs: its regular expressions can take forever, and some of
its numbers crash the process. tokenizer_config.json can name files elsewhere. So the vocabulary, the merges and plain
options are read and checked here, and the tokenizer is loaded from a temporary folder that contains nothing else.
"""
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ...core.logs import readable
from ...core.refusal import Refusal
from .model_files import read_json, read_text

# The files of a tokenizer. tokenizer.json has all that the other files have.
VOCABULARY = "vocab.json"
MERGES = "merges.txt"
WHOLE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
# The largest numbers of words, merges and added tokens, one more than the largest number of a word or token, and the
# largest length of a word or token in letters. CLIP's vocabulary has 49,408 words.
MOST_WORDS = 1_000_000
LONGEST_WORD = 1000
# The largest model_max_length.
MOST_TOKENS = 100_000
# Options of tokenizer_config.json that are copied, and their types.
OPTIONS: dict[str, type] = {
    "errors": str, "do_lower_case": bool, "add_prefix_space": bool, "clean_up_tokenization_spaces": bool,
}
# The entries of a configuration with special tokens.
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# The flags of a token that was added to the vocabulary (transformers' AddedToken).
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The first line of merges.txt, which transformers skips.
VERSION_LINE = "#version: 0.2"


def load_tokenizer(folder: Path, kind: Any) -> Any:
    """The tokenizer in one of a model's folders, such as tokenizer_2, loaded from a checked copy. kind: the class
    CLIPTokenizer of transformers. Raises Refusal if its files are missing or invalid."""
    with tempfile.TemporaryDirectory(prefix="onediff-tokenizer-") as copy:
        copy_tokenizer(folder, Path(copy))
        try:
            made = kind.from_pretrained(copy, local_files_only=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # A panic of the Rust library is a BaseException.
            raise damaged(folder, f"transformers cannot read its files ({error})") from None
    made.name_or_path = str(folder)
    return made


def copy_tokenizer(source: Path, target: Path) -> None:
    """Read the tokenizer's files in the folder source, check them, and write what is safe into target, an empty folder:
    vocab.json, merges.txt, and a tokenizer_config.json with known options only. Options of another type and an invalid
    model_max_length are left out. Raises Refusal if a file or a token is invalid, or the vocabulary or merges are
    missing; other files may be missing."""
    added = write_words(source, target)
    config = read_json(source / CONFIG) if (source / CONFIG).exists() else {}
    special = read_json(source / SPECIAL) if (source / SPECIAL).exists() else {}
    own = config.get("added_tokens_decoder")
    chosen: dict[str, Any] = {
        "tokenizer_class": "CLIPTokenizer", **tokens_in(special, source), **tokens_in(config, source),
        **{name: config[name] for name, of in OPTIONS.items() if isinstance(config.get(name), of)},
    }
    length = config.get("model_max_length")
    if isinstance(length, int) and 0 < length <= MOST_TOKENS:
        chosen["model_max_length"] = length
    decoder = added_tokens(own if isinstance(own, dict) else added, source)
    if decoder:
        chosen["added_tokens_decoder"] = decoder
    (target / CONFIG).write_text(json.dumps(chosen), encoding="utf-8")


def write_words(source: Path, target: Path) -> dict[str, Any]:
    """Write a checked vocab.json and merges.txt of the tokenizer in the folder source into the folder target. Returns
    the tokens that were added to the vocabulary, which are not checked yet; see read_words. Raises Refusal as
    read_words does."""
    words, merges, added = read_words(source)
    (target / VOCABULARY).write_text(json.dumps(words), encoding="utf-8")
    (target / MERGES).write_text("\n".join([VERSION_LINE, *merges, ""]), encoding="utf-8")
    return added


def read_words(folder: Path) -> tuple[dict[str, int], list[str], dict[str, Any]]:
    """(vocabulary, merges, added) of the tokenizer in a folder: {word: number}; the BPE merges, each as "a b"; and the
    tokens that were added to the vocabulary later, {number as text: token}, {} without any. Added tokens are not
    checked yet (added_tokens).

    If the folder has vocab.json and merges.txt, all come from these and from added_tokens.json; otherwise from
    tokenizer.json. Raises Refusal if tokenizer.json is missing then, or if the vocabulary or the merges are invalid.
    """
    added: dict[str, Any] = {}
    if (folder / VOCABULARY).exists() and (folder / MERGES).exists():
        words: Any = read_json(folder / VOCABULARY)
        lines = read_text(folder / MERGES).splitlines()
        merges: Any = [line for line in lines if line.strip() and not line.startswith("#version")]
        if (folder / ADDED).exists():
            added = {str(number): word for word, number in read_json(folder / ADDED).items()}
    elif (folder / WHOLE).exists():
        content = read_json(folder / WHOLE)
        model = content.get("model")
        more = content.get("added_tokens")
        words = model.get("vocab") if isinstance(model, dict) else None
        merges = model.get("merges") if isinstance(model, dict) else None
        for token in more if isinstance(more, list) else ():
            if isinstance(token, dict):
                added[str(token.get("id"))] = token
    else:
        raise damaged(folder, "vocab.json or merges.txt is missing")
    return checked_words(words, folder), checked_merges(merges, words, folder), added


def damaged(folder: Path, what: str) -> Refusal:
    """A Refusal of a model because of its tokenizer, which is in this folder. what: what is wrong with the tokenizer,
    without a period; may contain text from its files."""
    return Refusal(readable(f"The tokenizer in {folder.name} is damaged: {what}. Copy the model folder again."))


def checked_words(words: Any, folder: Path) -> dict[str, int]:
    """The given words as they are. Raises Refusal unless they are a vocabulary, {word: number}, of 1 to MOST_WORDS
    words that are not too long, in which each word has a valid number (is_number) of its own. words: from a file, so of
    any type. folder: for the message."""
    if not isinstance(words, dict) or not 0 < len(words) <= MOST_WORDS:
        raise damaged(folder, f"its vocabulary is missing, is empty or has more than {MOST_WORDS} words")
    numbers = {number for number in words.values() if is_number(number)}
    if len(numbers) != len(words) or any(len(word) > LONGEST_WORD for word in words):
        raise damaged(folder, "its vocabulary has invalid numbers or words")
    return words


def checked_merges(merges: Any, words: dict[str, int], folder: Path) -> list[str]:
    """The BPE merges, each as "a b". Raises Refusal unless merges is a list of at most MOST_WORDS, of which each joins
    two words of the vocabulary to a third one. An empty list is valid.

    merges: from a file, so of any type; each as "a b" or ["a", "b"]. words: the vocabulary. folder: for the message.
    """
    found = []
    for merge in merges if isinstance(merges, list) and len(merges) <= MOST_WORDS else [None]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise damaged(folder, "its merges are not pairs of words")
        if not all(one in words for one in (*pair, "".join(pair))):
            raise damaged(folder, f"its merges have words that are not in the vocabulary ({pair})")
        found.append(" ".join(pair))
    return found


def tokens_in(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The special tokens of TOKENS that a configuration has, by name ("bos_token"), each in the form of token_of.
    Raises Refusal for an invalid one. folder: for the message."""
    return {name: token_of(content[name], folder) for name in TOKENS if content.get(name) is not None}


def added_tokens(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The tokens that were added to a tokenizer's vocabulary, checked: {number as text: {"content": text, flags}}, as
    added_tokens_decoder in tokenizer_config.json. Raises Refusal for an invalid number or token.

    given: by number, each a text or a dictionary. folder: for the message.
    """
    if len(given) > MOST_WORDS or not all(str(number).isdecimal() and is_number(int(number)) for number in given):
        raise damaged(folder, "tokens that were added to its vocabulary have invalid numbers")
    found = {}
    for number, token in given.items():
        plain = token_of(token, folder)
        found[str(int(number))] = plain if isinstance(plain, dict) else {"content": plain}
        found[str(int(number))].pop("__type", None)
    return found


def token_of(token: Any, folder: Path) -> Any:
    """A token from a file, checked. For a text, the text. For a dictionary, a dictionary with the token's text
    ("content"), its flags in FLAGS that are booleans, and "__type", the mark by which transformers reads an AddedToken.

    Raises Refusal unless the text is a string, neither empty nor too long. folder: for the message.
    """
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not 0 < len(content) <= LONGEST_WORD:
        raise damaged(folder, f"it has a token that is empty, or longer than {LONGEST_WORD} letters")
    if not isinstance(token, dict):
        return content
    flags = {name: token[name] for name in FLAGS if isinstance(token.get(name), bool)}
    return {"__type": "AddedToken", "content": content, **flags}


def is_number(number: Any) -> bool:
    """Whether a value is an integer that can be a token's number: from 0 to MOST_WORDS - 1."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < MOST_WORDS
