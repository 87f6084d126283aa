"""What an option is: a field of settings.Settings with what an interface needs to show it, its values, its words."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field
from difflib import get_close_matches
from functools import cache
from typing import Any

log = logging.getLogger("onediff")

WORD_OF_BOOL = {True: "on", False: "off"}
BOOL_OF_WORD = {word: value for value, word in WORD_OF_BOOL.items()}
TYPE_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def option(
    default: Any, label: str, explanation: str, choices: tuple[str, ...] = (), *, group: str = "",
    bounds: tuple[float, float] | None = None, step: float | None = None, per_run: bool = False,
    check: Callable[[Any], object] | None = None, no_effect_when: Mapping[str, tuple[Any, ...]] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field that carries what a user interface needs to show it.

    explanation: at most 90 characters; what is more stands in .readme. group: where it stands on the settings page.
    bounds: the least and the most that a number may be. step: what a slider between them moves by; 1 by default.
    per_run: one generation may be given another value. check: raises ValueError with a sentence for a value that is of
    the right kind but makes no sense. no_effect_when: other options, and their values with which this one does nothing.
    replaced: words that an earlier OneDiff took, and what stands for each of them now.
    """
    return field(default=default, metadata={
        "label": label, "explanation": explanation, "choices": choices, "bounds": bounds, "step": step or 1,
        "per_run": per_run, "check": check, "group": group, "no_effect_when": no_effect_when or {},
        "replaced": replaced or {},
    })


def check_value(option_field: Field[Any], value: Any) -> None:
    """Raise ValueError with a sentence for the user if value does not fit the option."""
    name, kind, metadata = option_field.name, type(option_field.default), option_field.metadata
    if metadata["choices"] and (type(value) is not kind or value not in metadata["choices"]):
        raise ValueError(f"OneDiff option {name} is one of {', '.join(metadata['choices'])}, not {value!r}.")
    if type(value) is not kind:
        raise ValueError(f"OneDiff option {name} takes {TYPE_NAMES[kind]}, not {value!r}.")
    if metadata["bounds"] is not None:
        least, most = metadata["bounds"]
        if not least <= value <= most:
            raise ValueError(f"OneDiff option {name} is from {number(least)} to {number(most)}, not {value!r}.")
    if metadata["check"] is not None:
        metadata["check"](value)


def current_value(option_field: Field[Any], value: Any) -> Any:
    """The value, or what stands for it now where only an earlier OneDiff took it; the log says so once."""
    replaced = option_field.metadata["replaced"]
    if not isinstance(value, str) or value not in replaced:
        return value
    warn_of_replaced(option_field.name, value, replaced[value])
    return replaced[value]


@cache
def warn_of_replaced(name: str, value: str, current: str) -> None:
    log.warning("OneDiff has no %s %r any more: %s is used.", name, value, current)


def format_value(value: Any) -> str:
    """How a value is written in infotext and in presets."""
    return WORD_OF_BOOL[value] if isinstance(value, bool) else str(value)


def parse_value(option_field: Field[Any], word: str) -> Any:
    """The value that a word means for an option. Raises ValueError for one that it does not take."""
    kind: type[Any] = type(option_field.default)
    if kind is bool and word not in BOOL_OF_WORD:
        raise ValueError(f"OneDiff option {option_field.name} is on or off, not {word!r}.")
    value = BOOL_OF_WORD[word] if kind is bool else current_value(option_field, kind(word))
    check_value(option_field, value)
    return value


def words_of(option_field: Field[Any]) -> list[str]:
    """The words to choose from for an option; none where it takes any number or text."""
    return list(BOOL_OF_WORD) if isinstance(option_field.default, bool) else list(option_field.metadata["choices"])


def allowed_values(option_field: Field[Any]) -> str:
    """For people, what an option takes; nothing where it is any text."""
    metadata = option_field.metadata
    if metadata["choices"]:
        return ", ".join(metadata["choices"])
    if metadata["bounds"] is not None:
        return " to ".join(map(number, metadata["bounds"]))
    return "on, off" if isinstance(option_field.default, bool) else ""


def number(value: float) -> str:
    """For people; 1.0 as 1."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, or all of them where none is near."""
    known = list(names)
    lower = {other.lower(): other for other in known}
    near = get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[near[0]]!r}?" if near else f" Choose from {', '.join(known)}."
