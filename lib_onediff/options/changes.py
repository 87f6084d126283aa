"""Options changed for one run, as a text: "deepcache_interval 3; vae_precision fp16", also as infotext has it."""
from __future__ import annotations

import re
from typing import Any

from .infotext import KEY, SWITCH, options_of_a_run
from .migration import migrate_values
from .option import BOOL_OF_WORD, allowed_values, did_you_mean, parse_value

PARTS = re.compile(r"[;\n]")


def read_changes(text: str) -> dict[str, Any]:
    """The options that a text changes, by name; of two values of one option the last counts.

    Raises ValueError with a sentence for anything that it cannot mean.
    """
    options, words = options_of_a_run(), {}
    found: dict[str, Any] = {}
    text = text.strip().removeprefix(f"{KEY}:").strip().strip('"')
    for part in filter(None, map(str.strip, PARTS.split(text))):
        if part in BOOL_OF_WORD:
            found[SWITCH] = BOOL_OF_WORD[part]
            continue
        name, _, value = (piece.strip() for piece in part.replace("=", " ").partition(" "))
        words[name] = value
    for name, value in migrate_values(words).items():
        if name not in options:
            raise ValueError(f"OneDiff has no option {name!r} for a run.{did_you_mean(name, options)}")
        try:
            found[name] = parse_value(options[name], value)
        except ValueError:
            takes = allowed_values(options[name])
            if not value:
                raise ValueError(f"{name} needs a value: {takes}.") from None
            raise ValueError(f"{name} does not take {value!r}; it takes {takes}.") from None
    return found
