"""OneDiff's axes in the WebUI's X/Y/Z plot: one for each option of a run, and one for presets.

An axis writes its value only onto the generation of its cell, which is a copy that the plot makes; settings_of_cell
reads it there. So nothing has to be undone, however the plot ends.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field
from functools import partial
from typing import Any

from ..core.settings import Settings, check_value, options_of_a_run, parse_value, words_of
from .infotext import SWITCH
from .presets import PRESETS, preset_of, with_preset

# The beginning of our axes' labels.
PREFIX = "[OneDiff] "
# The key of the presets' axis in a cell's values, and its value that switches OneDiff off.
PRESET = "preset"
OFF = "Off"
# The attribute of a cell's generation that holds its values by option.
CELL = "onediff_axes"
# Values are rounded to so many digits: a plot that counts in steps of 0.1 reaches 0.30000000000000004.
DIGITS = 8
# An error that ends the plot, and a note below a cell's images.
SWITCHED_OFF = "OneDiff is switched off in the settings tab, so this axis would change nothing."
OFF_FOR_THIS_RUN = "OneDiff is off for this run, so the plot's OneDiff axes change nothing; tick 'Use OneDiff'."
Standing = Callable[[], Settings]


def add_axes(scripts_data: Iterable[Any], standing: Standing) -> None:
    """Add the axes to the WebUI's X/Y/Z plot, if it has one. Axes of an earlier call are replaced.

    scripts_data: modules.scripts.scripts_data, the WebUI's list of loaded scripts. standing: returns the settings tab's
    settings.
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
    """Remove from the plots' lists of axes those that add_axes has added, also at an earlier load of the script."""
    for plot in plots(scripts_data):
        plot.axis_options[:] = [axis for axis in plot.axis_options if not axis.label.startswith(PREFIX)]


def plots(scripts_data: Iterable[Any]) -> Iterator[Any]:
    """The Python modules of X/Y/Z plots among the WebUI's scripts, each once. They are found by their attributes, since
    their names differ between WebUIs."""
    modules = {id(module): module for module in (getattr(script, "module", None) for script in scripts_data)}
    for module in modules.values():
        if isinstance(getattr(module, "axis_options", None), list) and hasattr(module, "AxisOption"):
            yield module


def an_axis(
    plot: Any, name: str, label: str, kind: type, words: list[str], read: Callable[[Any], Any], standing: Standing,
) -> Any:
    """A new AxisOption of the plot for one option, or for the presets.

    plot: the plot's module. name: the option's, or PRESET. label: for users.
    kind: the type of its values, for the plot's parser. words: the values to choose from; [] for an option that takes
        any number or text.
    read: converts a value that the plot passes to the option's value; raises ValueError with a sentence for a wrong
        one. standing: see add_axes.
    """

    def confirm(p: Any, values: list[Any]) -> None:
        """Called by the plot before it draws. Raises RuntimeError with a sentence, as the plot's own axes do."""
        if not standing().enabled:
            raise RuntimeError(SWITCHED_OFF)
        if not values:
            raise RuntimeError(f"{PREFIX}{label} has no values: type or choose at least one.")
        for value in values:
            try:
                read(value)
            except ValueError as problem:
                raise RuntimeError(f"{PREFIX}{label}: {problem}") from problem

    def write_on_cell(p: Any, value: Any, values: list[Any]) -> None:
        """Called by the plot with a cell's generation: a shallow copy, so the attribute is replaced, not changed."""
        setattr(p, CELL, {**getattr(p, CELL, {}), name: read(value)})

    def legend(p: Any, axis: Any, value: Any) -> str:
        """Called by the plot for the label of a row or column."""
        return f"{label}: {round(value, DIGITS) if isinstance(value, float) else value}"

    return plot.AxisOption(
        PREFIX + label, kind, write_on_cell, format_value=legend, confirm=confirm,
        choices=(lambda: words) if words else None,
    )


def preset_value(name: str) -> str:
    """The value of the presets' axis for a text from the plot: a preset's name as PRESETS has it, or OFF. Raises
    ValueError with a sentence for an unknown one."""
    return OFF if name == OFF else preset_of(name).name


def option_value(option: Field[Any], value: Any) -> Any:
    """The option's value for a value that the plot passes: a text such as "int8", or a number, which is rounded to
    DIGITS. Raises ValueError with a sentence for a wrong one."""
    if isinstance(value, str):
        return parse_value(option, value)
    value = round(value, DIGITS) if isinstance(value, float) else value
    check_value(option, value)
    return value


def settings_of_cell(p: Any, settings: Settings) -> Settings:
    """The settings of a run with the values of the plot's cell for which p is made; unchanged if p belongs to no plot.

    The preset of a presets' axis is applied first, and switches OneDiff on; OFF switches it off. Single options
    override the preset, whichever axis they are on. If OneDiff is off for the run, and neither a presets' axis nor an
    axis of `enabled` decides about that, the values have no effect, and a note below the images says so. Raises
    ValueError with a sentence for a wrong value.
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
