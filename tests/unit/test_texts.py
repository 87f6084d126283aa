"""What users read on the page: short, and in the words of the docs."""
from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("gradio")

from test_readme import BANNED

from lib_onediff.options.presets import PRESETS
from lib_onediff.options.settings import Settings
from lib_onediff.ui import texts

MOST_LETTERS = 90
UI = Path(texts.__file__).parent
# "picture" is banned for "image"; "ours" stands in names of classes.
A_SENTENCE = re.compile(r"[a-z]+ [a-z]+ [a-z]+[^;{}()]*[.?!]\s*$", re.IGNORECASE)
ON_THE_PAGE = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)


def constants() -> dict[str, str]:
    """Every text that ui/texts.py has under a name, those in tables too."""
    found: dict[str, str] = {}
    for name, value in vars(texts).items():
        if name.isupper() and isinstance(value, str):
            found[name] = value
        elif name.isupper() and isinstance(value, tuple):
            found.update({f"{name}.{number}": text for number, text in enumerate(value)})
        elif name.isupper() and isinstance(value, dict):
            found.update({f"{name}.{key}": text for key, text in value.items()})
    return found


def sentences_in(file: Path) -> Iterator[str]:
    """What a file of ours writes for people: its strings with a blank in them, but for docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if " " in node.value.strip():
            yield re.sub(r"<[^>]*>?|[\w-]*onediff-[\w-]*", " ", node.value)


def test_explanations_of_options_are_short() -> None:
    long = {
        option.name: len(option.metadata["explanation"]) for option in fields(Settings)
        if not 0 < len(option.metadata["explanation"]) <= MOST_LETTERS
    }
    assert not long


def test_explanations_of_presets_are_short() -> None:
    assert all(len(preset.explanation) <= MOST_LETTERS for preset in PRESETS.values())


def test_texts_of_the_page_are_short() -> None:
    assert len(constants()) > 20
    assert not {name: len(text) for name, text in constants().items() if len(text) > MOST_LETTERS}


@pytest.mark.parametrize("option", fields(Settings), ids=lambda option: option.name)
def test_banned_words_are_no_option_s(option) -> None:
    assert not ON_THE_PAGE.findall(f'{option.metadata["label"]}. {option.metadata["explanation"]}')


def test_sentences_of_the_pages_stand_in_one_place() -> None:
    """progress.py and amounts.py are words themselves, run_settings.py's are the API's, settings_tab.py's the log's."""
    files = [UI / f"{name}.py" for name in ("accordion", "presets", "consistency")]
    files += [*UI.glob("cache/*.py"), *UI.glob("compare/*.py")]
    found = {
        f"{file.relative_to(UI)}: {text.strip()}" for file in files for text in sentences_in(file)
        if A_SENTENCE.search(text)
    }
    assert len(files) > 10 and not found


def test_banned_words_do_not_stand_on_the_page() -> None:
    found = {
        f"{file.relative_to(UI)}: {text}" for file in sorted(UI.rglob("*.py")) for text in sentences_in(file)
        if ON_THE_PAGE.search(text)
    }
    assert not found
    assert not ON_THE_PAGE.search(inspect.getsource(texts))
