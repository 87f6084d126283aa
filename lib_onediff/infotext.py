"""What a picture's infotext says of OneDiff, and reading it back.

The form is "on" or "off", then every other option that a generation may be given and that is not at its default, with
semicolons between: "on; backend eager; verify off". It has neither comma nor colon, which hosts would have to quote.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from .settings import Settings

KEY = "OneDiff"
SWITCH = "enabled"
SEPARATOR = ";"
SWITCHES = {True: "on", False: "off"}
SWITCHED = {word: value for value, word in SWITCHES.items()}
PasteFunction = Callable[[dict[str, Any]], "bool | None"]


def options_of_a_run() -> dict[str, Field]:
    """The options that a generation may be given, by name."""
    return {option.name: option for option in fields(Settings) if option.metadata["per_run"]}


def describe(settings: Settings) -> str:
    """The infotext of a generation that was made with these settings."""
    parts = [SWITCHES[settings.enabled]]
    for name, option in options_of_a_run().items():
        value = getattr(settings, name)
        if name != SWITCH and value != option.default:
            parts.append(f"{name} {SWITCHES[value] if isinstance(value, bool) else value}")
    return f"{SEPARATOR} ".join(parts)


def parse(text: str) -> dict[str, Any]:
    """The options in an infotext of describe, as Settings.from_mapping takes them; empty for any other text.

    Anybody may have written it, with any version of OneDiff: what is not an option here, or not a value of it, is left
    out.
    """
    switch, *parts = (part.strip() for part in str(text).split(SEPARATOR))
    if switch not in SWITCHED:
        return {}
    found = {SWITCH: SWITCHED[switch]}
    options = options_of_a_run()
    for name, _, written in (part.partition(" ") for part in parts):
        if name in options and name != SWITCH:
            found.update(value_of(options[name], written.strip()))
    return found


def value_of(option: Field, written: str) -> dict[str, Any]:
    """{name: value} for a value as describe writes it; empty for one that the option does not take."""
    kind = type(option.default)
    try:
        value = SWITCHED[written] if kind is bool else kind(written)
        Settings.from_mapping({option.name: value})
    except (KeyError, ValueError):
        return {}
    return {option.name: value}


def pasted_switch(parameters: dict[str, Any]) -> bool | None:
    """What pasting an infotext does to the accordion's checkbox; None leaves it as it is.

    parameters: the pasted infotext as the host has read it.
    """
    return parse(parameters.get(KEY, "")).get(SWITCH)


def paste_fields(enabled: Any) -> list[tuple[Any, PasteFunction]]:
    """What a script puts into infotext_fields; enabled is the accordion's checkbox."""
    return [(enabled, pasted_switch)]
