"""OneDiff's axes of the WebUI's X/Y/Z plot: one for every option that a generation may be given, and one for presets.

An axis writes its value on the generation of its cell, which is a copy that the plot makes, and nowhere else; that
generation's run reads it there (settings_of_cell). So nothing is left of it, however the plot ends.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field
from functools import partial
from typing import Any

from fastapi import HTTPException

from .infotext import SWITCH, options_of_a_run
from .option import check_value, parse_value, words_of
from .presets import PRESETS, preset_of, with_preset
from .settings import Settings

PREFIX = "[OneDiff] "
PRESET, PRESET_LABEL, OFF = "preset", "Speed", "Off"
# The attribute of a cell's generation that holds its values by option.
CELL = "onediff_axes"
# A plot counts in steps of 0.1 and the like, which add up to 0.30000000000000004.
DIGITS = 8
# What a plot takes for several numbers: 1-9, 1-9 (+2), 1-9 [3].
STEP = r"\s*(?:\((?P<step>[+-]{number})\s*\)|\[\d+\s*\])?"
RANGES = {
    kind: re.compile(rf"[+-]?{number}\s*-\s*[+-]?{number}{STEP.format(number=number)}")
    for kind, number in ((int, r"\d+"), (float, r"\d+(?:\.\d*)?"))
}
EXAMPLES = {int: "1, 2, 3 or 1-9 (+2)", float: "0.2, 0.5 or 0-1 (+0.25)"}
SWITCHED_OFF = "OneDiff is switched off in the settings tab, so this axis would change nothing."
OFF_FOR_THIS_RUN = "OneDiff is off for this run, so its axes change nothing; tick 'Use OneDiff'."
Standing = Callable[[], Settings]


class WrongAxisValue(HTTPException):
    """Ends a plot before it draws anything. A page shows it as it prints; clients of the API get it with status 422."""

    def __init__(self, sentence: str) -> None:
        super().__init__(422, sentence)

    def __str__(self) -> str:
        return self.detail


# --- registering ------------------------------------------------------------------------------------------------------


def add_axes(scripts_data: Iterable[Any], standing: Standing) -> None:
    """Offer the axes in the WebUI's X/Y/Z plot, if it has one. Safe to call twice.

    scripts_data: what the WebUI knows of its scripts, in modules.scripts. standing: the settings tab's settings.
    """
    for plot in plots(scripts_data):
        there = {axis.label for axis in plot.axis_options}
        plot.axis_options.extend(
            plot.AxisOption(**arguments) for arguments in axes(standing) if arguments["label"] not in there
        )


def remove_axes(scripts_data: Iterable[Any]) -> None:
    """Undo add_axes."""
    labels = {PREFIX + PRESET_LABEL, *(PREFIX + option.metadata["label"] for option in options_of_a_run().values())}
    for plot in plots(scripts_data):
        plot.axis_options[:] = [axis for axis in plot.axis_options if axis.label not in labels]


def plots(scripts_data: Iterable[Any]) -> Iterator[Any]:
    """The modules of the X/Y/Z plot; some WebUIs and extensions have one under another name."""
    modules = {id(module): module for module in (getattr(script, "module", None) for script in scripts_data)}
    for module in modules.values():
        if isinstance(getattr(module, "axis_options", None), list) and hasattr(module, "AxisOption"):
            yield module


def axes(standing: Standing) -> list[dict[str, Any]]:
    """The arguments of the plot's AxisOption for every axis."""
    return [preset_axis(standing), *(option_axis(option, standing) for option in options_of_a_run().values())]


def preset_axis(standing: Standing) -> dict[str, Any]:
    def read(name: str) -> str:
        return OFF if name == OFF else preset_of(name).name

    return {
        "label": PREFIX + PRESET_LABEL, "type": str,
        "apply": partial(write_on_cell, PRESET, read),
        "confirm": partial(confirm, PRESET_LABEL, read, standing),
        "format_value": lambda p, axis, name: "OneDiff off" if name == OFF else legend(PRESET_LABEL, name),
        "choices": lambda: [OFF, *PRESETS],
    }


def option_axis(option: Field[Any], standing: Standing) -> dict[str, Any]:
    label, kind, words = option.metadata["label"], type(option.default), words_of(option)
    read = partial(parse_axis_value, option)
    return {
        "label": PREFIX + label, "type": kind if kind in RANGES and not words else str,
        "apply": partial(write_on_cell, option.name, read),
        "confirm": partial(confirm, label, read, standing),
        "format_value": lambda p, axis, value: legend(label, value),
        "choices": (lambda: words) if words else None,
        "prepare": partial(split_numbers, label, kind) if kind in RANGES and not words else None,
    }


def legend(label: str, value: Any) -> str:
    """What stands beside a row or above a column."""
    return f"{label}: {round(value, DIGITS) if isinstance(value, float) else value}"


# --- values -----------------------------------------------------------------------------------------------------------


def split_numbers(label: str, kind: type[int] | type[float], text: Any) -> list[str]:
    """The numbers and ranges in what the user has typed, as the plot reads them. Raises WrongAxisValue."""
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    for part in parts:
        spans = RANGES[kind].fullmatch(part)
        if not (is_number(part, kind) or (spans and float(spans["step"] or 1))):
            raise WrongAxisValue(f"{PREFIX}{label} takes numbers such as {EXAMPLES[kind]}, not {part!r}.")
    return parts


def is_number(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def parse_axis_value(option: Field[Any], value: Any) -> Any:
    """The value for Settings that a value of an axis means. Raises ValueError with a sentence for one that is none."""
    if isinstance(value, str):
        return parse_value(option, value)
    value = round(value, DIGITS) if isinstance(value, float) else value
    check_value(option, value)
    return value


def confirm(label: str, read: Callable[[Any], Any], standing: Standing, p: Any, values: list[Any]) -> None:
    """What the plot calls before it draws. Raises WrongAxisValue for values that cannot be drawn."""
    if not standing().enabled:
        raise WrongAxisValue(SWITCHED_OFF)
    if not values:
        raise WrongAxisValue(f"{PREFIX}{label} has no values to draw.")
    for value in values:
        try:
            read(value)
        except ValueError as problem:
            raise WrongAxisValue(f"{PREFIX}{label}: {problem}") from problem


def write_on_cell(name: str, read: Callable[[Any], Any], p: Any, value: Any, values: list[Any]) -> None:
    """What the plot calls with the generation of a cell, a shallow copy of the page's: nothing in it is changed."""
    setattr(p, CELL, {**getattr(p, CELL, {}), name: read(value)})


def settings_of_cell(p: Any, settings: Settings) -> Settings:
    """The settings for the generation p: its cell's values upon settings; these themselves where p is none of a plot.

    A preset comes first and switches OneDiff on; single options come on top of it, whichever axis they are on.
    Raises ValueError with a sentence.
    """
    values = dict(getattr(p, CELL, {}))
    preset = values.pop(PRESET, None)
    if preset == OFF:
        settings = settings.for_run({SWITCH: False})
    elif preset is not None:
        settings = with_preset(settings, preset).for_run({SWITCH: True})
    settings = settings.for_run(values)
    if values and not settings.enabled and preset is None and SWITCH not in values:
        p.comment(OFF_FOR_THIS_RUN)
    return settings
