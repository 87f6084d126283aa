"""What users read on the page: short, and in the words of the docs."""
from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

pytest.importorskip("gradio")

from test_readme import BANNED

from lib_onediff.options.presets import PRESETS
from lib_onediff.options.settings import Settings
from lib_onediff.ui import texts

MOST_LETTERS = 90
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


def test_explanations_are_short() -> None:
    explanations = {option.name: option.metadata["explanation"] for option in fields(Settings)}
    explanations |= {preset.name: preset.explanation for preset in PRESETS.values()}
    assert not {name: len(text) for name, text in explanations.items() if not 0 < len(text) <= MOST_LETTERS}


def test_texts_of_the_page_are_short() -> None:
    assert len(constants()) > 20
    assert not {name: len(text) for name, text in constants().items() if len(text) > MOST_LETTERS}


def test_banned_words_do_not_stand_on_the_page() -> None:
    options = [f'{option.metadata["label"]}. {option.metadata["explanation"]}' for option in fields(Settings)]
    assert not ON_THE_PAGE.findall("\n".join([*options, inspect.getsource(texts)]))
