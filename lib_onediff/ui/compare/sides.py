"""The two settings that are compared: a choice from a list, and changes on top of it as infotext writes them."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...options import infotext
from ...options.changes import read_changes
from ...options.option import did_you_mean
from ...options.settings import Settings
from ..texts import no_settings

CURRENT, OFF = "Current settings", "Off: the WebUI's own"
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
        raise ValueError(no_settings(choice, did_you_mean(str(choice), [CURRENT, OFF, *known])))
    # Nothing else counts where OneDiff is off.
    changed = {} if choice == OFF else read_changes(str(changes or ""))
    name = choice if not changed else f"{choice} + {str(changes).strip()}"
    return Side(name, settings.for_run(changed))
