"""A run's options as a text: as an image's infotext has them, and as a user writes what shall differ for one run.

The form is "on" or "off", then every other option that a generation may be given and that is not at its default, with
semicolons between: "on; backend eager; low_bit fp8". It has neither comma nor colon, which hosts would have to quote.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from dataclasses import Field, fields, replace
from typing import Any

from ..core.settings import (
    BOOL_OF_WORD,
    WORD_OF_BOOL,
    Settings,
    allowed_values,
    did_you_mean,
    format_value,
    migrate_values,
    parse_value,
)
from .presets import AS_IN_SETTINGS

KEY = "OneDiff"
# Why a run did not get what it asked of OneDiff: all that a client of the WebUI's API hears of it.
PROBLEM = "OneDiff problem"
SWITCH = "enabled"
NOT_SERVED = "not accelerated"
PARTS = re.compile(r"[;\n]")
PasteFunction = Callable[[dict[str, Any]], "bool | str | None"]


def options_of_a_run() -> dict[str, Field[Any]]:
    """The options that a generation may be given, by name."""
    return {option.name: option for option in fields(Settings) if option.metadata["per_run"]}


def describe(settings: Settings, resting: Collection[str] = (), is_served: bool = True) -> str:
    """The infotext of a generation that was made with these settings. resting: options that did not count. is_served:
    whether its model is one that OneDiff serves; pasting from another one sets nothing."""
    word = WORD_OF_BOOL[settings.enabled] if is_served or not settings.enabled else NOT_SERVED
    return "; ".join([word, *differences(settings, Settings(), resting)])


def differences(settings: Settings, others: Settings, left_out: Collection[str] = ()) -> list[str]:
    """Every option of a run but the switch that has another value in others, with its value in settings, in words."""
    names = options_of_a_run().keys() - {SWITCH, *left_out}
    return [
        f"{name} {format_value(value)}" for name, value in settings.changed_from(others).items() if name in names
    ]


def words_in(text: str) -> dict[str, Any]:
    """The words of each option in a text, by name; of two of one option the last counts."""
    words: dict[str, str] = {}
    for part in filter(None, map(str.strip, PARTS.split(text))):
        name, _, value = (piece.strip() for piece in part.replace("=", " ").partition(" "))
        words.update({SWITCH: part} if part in BOOL_OF_WORD else {name: value})
    return migrate_values(words)


def read_changes(text: str) -> dict[str, Any]:
    """The options that a text changes, by name: "deepcache_interval 3; vae_precision=fp16", also as infotext has it.

    Raises ValueError with a sentence for anything that it cannot mean.
    """
    options, found = options_of_a_run(), {}
    for name, value in words_in(text.strip().removeprefix(f"{KEY}:").strip().strip('"')).items():
        if name not in options:
            raise ValueError(f"OneDiff has no option {name!r} for a run.{did_you_mean(name, options)}")
        try:
            found[name] = parse_value(options[name], value)
        except ValueError:
            takes = allowed_values(options[name])
            wrong = f"{name} does not take {value!r}; it takes {takes}." if value else f"{name} needs a value: {takes}."
            raise ValueError(wrong) from None
    return found


def parse(text: Any) -> dict[str, Any]:
    """The options in an infotext of describe, as Settings.from_mapping takes them; empty for any other text.

    Anybody may have written it, with any version of OneDiff: what is not an option here, or not a value of it, is left
    out.
    """
    options, words, found = options_of_a_run(), words_in(str(text)), {}
    for name in options.keys() & words.keys():
        with contextlib.suppress(ValueError):
            found[name] = parse_value(options[name], words[name])
    return found if SWITCH in found else {}


def paste_functions(standing: Callable[[], Settings]) -> tuple[PasteFunction, PasteFunction, PasteFunction]:
    """What fills the accordion's checkbox, list of presets and text of changes from a pasted infotext, as the host has
    read it; each returns what the component is set to, or None to leave it as it is.

    The run then has the settings of the infotext. Only what the settings tab (standing) has otherwise is written into
    the accordion, where the title shows it: everything else goes on following the settings. A preset would hold every
    option that presets set.

    Make them once for all tabs: hosts hand a component's value on, when an image is sent from one tab to another, where
    both tabs' functions are equal.
    """

    def pasting(value_of: Callable[[Settings], bool | str]) -> PasteFunction:
        def paste(parameters: dict[str, Any]) -> bool | str | None:
            found = parse(parameters.get(KEY, ""))
            return value_of(replace(Settings(), **found)) if found else None

        return paste

    return (
        pasting(lambda wanted: wanted.enabled), pasting(lambda wanted: AS_IN_SETTINGS),
        pasting(lambda wanted: "; ".join(differences(wanted, standing()))),
    )
