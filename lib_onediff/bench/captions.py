"""Captions that emoji-sd never saw in training: what the bench has it draw."""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = Path(__file__).with_name("held_out.json")
# The background of a caption that names none.
WHITE = "white"


@dataclass(frozen=True)
class Caption:
    """A prompt, and what its image has to show."""

    prompt: str
    names: tuple[str, ...]
    background: str


def held_out_captions() -> list[Caption]:
    """100 emoji on a background and 50 pairs, chosen before the training."""
    held_out = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    alone = [
        Caption(f"{with_article(name)} on {with_article(ground)} background", (name,), ground)
        for name, ground in held_out["backgrounds"]
    ]
    pairs = [
        Caption(f"{with_article(first)} and {with_article(second)}", (first, second), WHITE)
        for first, second in held_out["pairs"]
    ]
    return alone + pairs


def with_article(name: str) -> str:
    """A plural has none."""
    if name.endswith("s") and not name.endswith("ss"):
        return name
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
