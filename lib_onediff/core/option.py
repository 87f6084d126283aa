"""What an option is: a field of settings.Settings with what an interface needs to show it, its values, its words."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field
from difflib import get_close_matches
from typing import Any

WORD_OF_BOOL = {True: "on", False: "off"}
BOOL_OF_WORD = {word: value for value, word in WORD_OF_BOOL.items()}
TYPE_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def option(
    default: Any, label: str, explanation: str, choices: tuple[str, ...] = (), *, group: str = "",
    bounds: tuple[float, float] | None = None, step: float | None = None, per_run: bool = False,
    check: Callable[[Any], object] | None = None, no_effect_when: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """A dataclass field that carries what a user interface needs to show it.

    explanation: at most 90 characters; the rest stands in .readme. group: the heading on the settings page.
    bounds: the smallest and the largest number. step: of the slider between them. per_run: one generation may have
    another value. check: raises ValueError with a sentence for a value of the right kind that makes no sense.
    no_effect_when: other options, and their values with which this one does nothing.
    """
    return field(default=default, metadata={
        "label": label, "explanation": explanation, "choices": choices, "bounds": bounds, "step": step or 1,
        "per_run": per_run, "check": check, "group": group, "no_effect_when": no_effect_when or {},
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


def format_value(value: Any) -> str:
    """How a value is written in infotext and in presets."""
    return WORD_OF_BOOL[value] if isinstance(value, bool) else str(value)


def parse_value(option_field: Field[Any], word: str) -> Any:
    """The value that a word means for an option. Raises ValueError for one that it does not take."""
    kind: type[Any] = type(option_field.default)
    if kind is bool:
        # Python and plots write True and On.
        word = {"true": "on", "false": "off"}.get(word.lower(), word.lower())
    if kind is bool and word not in BOOL_OF_WORD:
        raise ValueError(f"OneDiff option {option_field.name} is on or off, not {word!r}.")
    value = BOOL_OF_WORD[word] if kind is bool else kind(word)
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
