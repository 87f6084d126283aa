"""What an image's infotext says of OneDiff, and reading it back.

The form is "on" or "off", then every other option that a generation may be given and that is not at its default, with
semicolons between: "on; backend eager; low_bit fp8". It has neither comma nor colon, which hosts would have to quote.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Any

from .migration import migrate_values
from .option import BOOL_OF_WORD, WORD_OF_BOOL, format_value, parse_known
from .presets import AS_IN_SETTINGS
from .settings import Settings

KEY = "OneDiff"
# Why a run did not get what it asked of OneDiff: all that a client of the WebUI's API hears of it.
PROBLEM = "OneDiff problem"
SWITCH = "enabled"
SEPARATOR = ";"
PasteFunction = Callable[[dict[str, Any]], "bool | str | None"]


def options_of_a_run() -> dict[str, Field[Any]]:
    """The options that a generation may be given, by name."""
    return {option.name: option for option in fields(Settings) if option.metadata["per_run"]}


def describe(settings: Settings) -> str:
    """The infotext of a generation that was made with these settings."""
    return f"{SEPARATOR} ".join([WORD_OF_BOOL[settings.enabled], *differences(settings, Settings())])


def differences(settings: Settings, others: Settings) -> list[str]:
    """Every option of a run but the switch that has another value in others, with its value in settings, in words."""
    of_a_run = options_of_a_run()
    return [
        f"{name} {format_value(value)}" for name, value in settings.changed_from(others).items()
        if name != SWITCH and name in of_a_run
    ]


def parse(text: str) -> dict[str, Any]:
    """The options in an infotext of describe, as Settings.from_mapping takes them; empty for any other text.

    Anybody may have written it, with any version of OneDiff: what is not an option here, or not a value of it, is left
    out.
    """
    switch, *parts = (part.strip() for part in str(text).split(SEPARATOR))
    if switch not in BOOL_OF_WORD:
        return {}
    options = {name: option for name, option in options_of_a_run().items() if name != SWITCH}
    words = {name: word.strip() for name, _, word in (part.partition(" ") for part in parts)}
    return {SWITCH: BOOL_OF_WORD[switch], **parse_known(migrate_values(words), options)}


class Pasting:
    """What pasting an infotext does to the accordion: the run then has the settings of the infotext. Only what the
    settings tab has otherwise is written into the accordion, one option at a time, where the title shows it: everything
    else goes on following the settings. A preset would hold every option that presets set.

    Its methods take the pasted infotext as the host has read it, and return what a component is set to; None leaves it
    as it is.
    """

    def __init__(self, standing: Callable[[], Settings]) -> None:
        """standing: the settings tab's settings."""
        self._standing = standing

    def switch(self, parameters: dict[str, Any]) -> bool | None:
        """The checkbox."""
        wanted = pasted_settings(parameters)
        return None if wanted is None else wanted.enabled

    def preset(self, parameters: dict[str, Any]) -> str | None:
        """The preset: none."""
        return None if pasted_settings(parameters) is None else AS_IN_SETTINGS

    def changes(self, parameters: dict[str, Any]) -> str | None:
        """The changed options: all that the settings tab has otherwise."""
        wanted = pasted_settings(parameters)
        return None if wanted is None else f"{SEPARATOR} ".join(differences(wanted, self._standing()))

    def fields(self, enabled: Any, preset: Any, changes: Any) -> list[tuple[Any, PasteFunction]]:
        """What a script puts into infotext_fields: the accordion's components, and what fills each.

        The functions are equal in all tabs: given as paste_field_names too, they have hosts hand these components'
        values on when an image is sent from one tab to another.
        """
        return [(enabled, self.switch), (preset, self.preset), (changes, self.changes)]


def pasted_settings(parameters: dict[str, Any]) -> Settings | None:
    """The settings of a pasted infotext; None where it says nothing of OneDiff."""
    found = parse(parameters.get(KEY, ""))
    return replace(Settings(), **found) if found else None
