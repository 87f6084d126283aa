"""The two settings that are compared: a choice from a list, and changes on top of it as infotext writes them."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...options import infotext
from ...options.option import BOOL_OF_WORD, allowed_values, parse_value
from ...options.settings import Settings

CURRENT, OFF = "Current settings", "Off: the WebUI's own"
PARTS = re.compile(r"[;\n]")
# Name of a preset to the options that it sets.
Presets = Callable[[], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Side:
    """Settings, and what they are called."""

    name: str
    settings: Settings

    @property
    def described(self) -> str:
        """The settings as infotext writes them."""
        return infotext.describe(self.settings)


def choices(presets: Presets) -> list[str]:
    """What the list offers."""
    return [CURRENT, OFF, *presets()]


def side_of(choice: Any, changes: Any, standing: Settings, presets: Presets) -> Side:
    """The settings for a side.

    choice: one of choices(presets). changes: such as "backend eager; verify off", also as an image's infotext has it.
    standing: the settings tab's. Raises ValueError with a sentence.
    """
    if choice == OFF:
        settings = replace(standing, enabled=False)
    elif choice == CURRENT:
        settings = standing
    elif choice in (known := presets()):
        settings = standing.for_run(dict(known[choice]))
    else:
        raise ValueError(f"There are no settings called {choice!r}; choose from the list.")
    changed = read_changes(str(changes or ""))
    name = choice if not changed else f"{choice} + {str(changes).strip()}"
    return Side(name, settings.for_run(changed))


def read_changes(text: str) -> dict[str, Any]:
    """The options that a text changes, by name. Raises ValueError with a sentence for anything that it cannot mean."""
    found: dict[str, Any] = {}
    text = text.strip().removeprefix(f"{infotext.KEY}:").strip().strip('"')
    for part in filter(None, map(str.strip, PARTS.split(text))):
        if part in BOOL_OF_WORD:
            found[infotext.SWITCH] = BOOL_OF_WORD[part]
            continue
        name, _, value = part.replace("=", " ").partition(" ")
        options = infotext.options_of_a_run()
        if name not in options:
            raise ValueError(f"An image has no option {name!r}; its options are {', '.join(options)}.")
        try:
            found[name] = parse_value(options[name], value.strip())
        except ValueError:
            takes = allowed_values(options[name])
            raise ValueError(f"{name} does not take {value.strip()!r}; it takes {takes}.") from None
    return found
