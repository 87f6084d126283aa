"""OneDiff's axes of the WebUI's X/Y/Z plot: one for every option that a generation may be given, and one for presets.

An axis writes its value on the generation of its cell, which is a copy that the plot makes, and nowhere else; that
generation's run reads it there (settings_of_cell). So nothing is left of it, however the plot ends.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field
from functools import partial
from typing import Any

from ..core.settings import Settings, check_value, options_of_a_run, parse_value, words_of
from .infotext import SWITCH
from .presets import PRESETS, preset_of, with_preset

PREFIX = "[OneDiff] "
PRESET = "preset"
OFF = "Off"
# The attribute of a cell's generation that holds its values by option.
CELL = "onediff_axes"
# A plot counts in steps of 0.1 and the like, which add up to 0.30000000000000004.
DIGITS = 8
SWITCHED_OFF = "OneDiff is switched off in the settings tab, so this axis would change nothing."
OFF_FOR_THIS_RUN = "OneDiff is off for this run, so its axes change nothing; tick 'Use OneDiff'."
Standing = Callable[[], Settings]


def add_axes(scripts_data: Iterable[Any], standing: Standing) -> None:
    """Offer the axes in the WebUI's X/Y/Z plot, if it has one. Safe to call twice.

    scripts_data: what the WebUI knows of its scripts, in modules.scripts. standing: the settings tab's settings.
    """
    remove_axes(scripts_data)
    for plot in plots(scripts_data):
        plot.axis_options.append(an_axis(plot, PRESET, "Speed", str, [OFF, *PRESETS], preset_value, standing))
        for name, option in options_of_a_run().items():
            words = words_of(option)
            label = option.metadata["label"]
            kind = str if words else type(option.default)
            plot.axis_options.append(an_axis(plot, name, label, kind, words, partial(option_value, option), standing))


def remove_axes(scripts_data: Iterable[Any]) -> None:
    """Undo add_axes."""
    for plot in plots(scripts_data):
        plot.axis_options[:] = [axis for axis in plot.axis_options if not axis.label.startswith(PREFIX)]


def plots(scripts_data: Iterable[Any]) -> Iterator[Any]:
    """The modules of the X/Y/Z plot; some WebUIs and extensions have one under another name."""
    modules = {id(module): module for module in (getattr(script, "module", None) for script in scripts_data)}
    for module in modules.values():
        if isinstance(getattr(module, "axis_options", None), list) and hasattr(module, "AxisOption"):
            yield module


def an_axis(
    plot: Any, name: str, label: str, kind: type, words: list[str], read: Callable[[Any], Any], standing: Standing,
) -> Any:
    """An axis of the plot. kind: of its values, as the plot reads them. words: to choose from, if it takes no others.
    read: what a value means; raises ValueError with a sentence for one that means nothing."""

    def confirm(p: Any, values: list[Any]) -> None:
        """What the plot calls before it draws. Raises RuntimeError with a sentence, as its own axes do."""
        if not standing().enabled:
            raise RuntimeError(SWITCHED_OFF)
        if not values:
            raise RuntimeError(f"{PREFIX}{label} has no values to draw.")
        for value in values:
            try:
                read(value)
            except ValueError as problem:
                raise RuntimeError(f"{PREFIX}{label}: {problem}") from problem

    def write_on_cell(p: Any, value: Any, values: list[Any]) -> None:
        """What the plot calls with the generation of a cell, a shallow copy of the page's: nothing in it is changed."""
        setattr(p, CELL, {**getattr(p, CELL, {}), name: read(value)})

    def legend(p: Any, axis: Any, value: Any) -> str:
        """The label of a row or column."""
        return f"{label}: {round(value, DIGITS) if isinstance(value, float) else value}"

    return plot.AxisOption(
        PREFIX + label, kind, write_on_cell, format_value=legend, confirm=confirm,
        choices=(lambda: words) if words else None,
    )


def preset_value(name: str) -> str:
    return OFF if name == OFF else preset_of(name).name


def option_value(option: Field[Any], value: Any) -> Any:
    if isinstance(value, str):
        return parse_value(option, value)
    value = round(value, DIGITS) if isinstance(value, float) else value
    check_value(option, value)
    return value


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
