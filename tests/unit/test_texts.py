"""What users read: short, and in the words of the docs."""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from test_readme import BANNED

from lib_onediff.core.settings import Settings
from lib_onediff.ui.presets import PRESETS

UI = Path(__file__).parents[2] / "lib_onediff" / "ui"
MOST_LETTERS = 90


def test_explanations_are_short() -> None:
    explanations = {option.name: option.metadata["explanation"] for option in fields(Settings)}
    explanations |= {preset.name: preset.explanation for preset in PRESETS.values()}
    assert not {name: len(text) for name, text in explanations.items() if not 0 < len(text) <= MOST_LETTERS}


def texts_of(file: Path) -> Iterator[str]:
    """The strings of a file but its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_banned_words_do_not_stand_on_the_page() -> None:
    options = [f'{option.metadata["label"]}. {option.metadata["explanation"]}' for option in fields(Settings)]
    # A text with blanks; others are names of code.
    on_the_page = [text for file in sorted(UI.rglob("*.py")) for text in texts_of(file) if " " in text.strip()]
    assert len(on_the_page) > 100
    assert not re.findall(rf"\b(?:{'|'.join(BANNED)})\b", "\n".join([*options, *on_the_page]), re.IGNORECASE)
