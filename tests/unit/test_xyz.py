"""OneDiff's axes of the X/Y/Z plot: one for every option that a generation can set. A value on an axis holds for its
own cell, and a wrong value is refused."""
from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from lib_onediff.core.settings import Settings
from lib_onediff.ui import xyz
from lib_onediff.ui.presets import BALANCED, FAST, PRESETS

OWN = Settings(memory_budget=500)


@dataclass
class AxisOption:
    """An axis with the fields that A1111 and Forge give it."""

    label: str
    type: Callable[[Any], Any]
    apply: Callable[[Any, Any, list[Any]], None]
    format_value: Callable[[Any, Any, Any], Any] | None = None
    confirm: Callable[[Any, list[Any]], None] | None = None
    cost: float = 0.0
    choices: Callable[[], list[str]] | None = None


@dataclass
class Generation:
    prompt: str = "a fox"
    override_settings: dict[str, Any] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)

    def comment(self, text: str) -> None:
        self.comments.append(text)


def scripts_of(plot: Any) -> list[Any]:
    """A WebUI's list of loaded scripts: two of them in the plot's module, and one in another."""
    return [SimpleNamespace(module=plot), SimpleNamespace(module=SimpleNamespace()), SimpleNamespace(module=plot)]


def plot_of(run_settings: Settings = OWN) -> Any:
    plot = SimpleNamespace(AxisOption=AxisOption, axis_options=[AxisOption("Seed", int, setattr)])
    xyz.add_axes(scripts_of(plot), lambda: run_settings)
    return plot


def axis_of(name: str, run_settings: Settings = OWN) -> AxisOption:
    """The axis of an option, or of presets."""
    label = "Speed" if name == xyz.PRESET else Settings.__dataclass_fields__[name].metadata["label"]
    (found,) = [axis for axis in plot_of(run_settings).axis_options if axis.label == f"[OneDiff] {label}"]
    return found


def values_on(axis: AxisOption, text: str) -> list[Any]:
    """The values that a plot parses from the user's text or choices; without ranges."""
    values = [axis.type(word.strip()) for word in text.split(",") if word.strip()]
    axis.confirm(Generation(), values)
    return values


def cell(p: Generation, **written: str) -> Generation:
    """The generation of a cell. written: the values of the axes by option, in the order of the axes."""
    made = copy(p)
    for name, word in written.items():
        axis = axis_of(name)
        (value,) = values_on(axis, word)
        axis.apply(made, value, [value])
    return made


def settings_with(run_settings: Settings = OWN, **written: str) -> Settings:
    return xyz.settings_of_cell(cell(Generation(), **written), run_settings)


# --- which axes there are ---------------------------------------------------------------------------------------------


def test_adding_the_axes_twice_adds_nothing_and_removing_them_restores_the_plot() -> None:
    plot = plot_of()
    listed = plot.axis_options
    others = plot.axis_options[:1]
    labels = [axis.label for axis in plot.axis_options]
    xyz.add_axes(scripts_of(plot), lambda: OWN)
    assert [axis.label for axis in plot.axis_options] == labels
    xyz.remove_axes(scripts_of(plot))
    assert plot.axis_options is listed and listed == others


def test_every_option_of_a_generation_has_an_axis_and_each_of_its_choices_sets_the_option() -> None:
    """Labels are unique. An option without choices has an axis whose values have the option's type."""
    options = [option for option in fields(Settings) if option.metadata["per_run"]]
    labels = [axis.label for axis in plot_of().axis_options]
    assert len(options) >= 10 and len(set(labels)) == len(labels)
    assert labels == ["Seed", "[OneDiff] Speed", *(f"[OneDiff] {option.metadata['label']}" for option in options)]
    for option in options:
        axis = axis_of(option.name)
        if option.metadata["choices"]:
            assert axis.choices() == list(option.metadata["choices"])
        elif isinstance(option.default, bool):
            assert axis.choices() == ["on", "off"]
        else:
            assert axis.choices is None and axis.type is type(option.default)
        for word in axis.choices() if axis.choices else [str(option.default)]:
            meant = {"on": True, "off": False}[word] if isinstance(option.default, bool) else type(option.default)(word)
            assert getattr(settings_with(**{option.name: word}), option.name) == meant


@pytest.mark.parametrize(("word", "meant"), [("True", True), ("On", True), ("False", False), ("OFF", False)])
def test_switches_accept_the_usual_words_for_on_and_off(word: str, meant: bool) -> None:
    assert settings_with(low_bit_only=word).low_bit_only is meant


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_value_holds_for_its_cell_alone() -> None:
    """For each cell, a WebUI makes a shallow copy of the generation, whose dictionaries are shared."""
    p = Generation()
    before = dict(vars(p))
    overrides = dict(p.override_settings)
    first = cell(p, deepcache_interval="3", preset="Off")
    second = cell(p, deepcache_interval="5")
    assert xyz.settings_of_cell(cell(second, low_bit="fp8"), OWN) == replace(OWN, deepcache_interval=5, low_bit="fp8")
    assert vars(p) == before and p.override_settings == overrides
    assert xyz.settings_of_cell(first, OWN) == replace(OWN, enabled=False, deepcache_interval=3)
    assert xyz.settings_of_cell(second, OWN) == replace(OWN, deepcache_interval=5)
    assert xyz.settings_of_cell(p, OWN) == OWN


def test_axes_override_the_options_of_the_generation() -> None:
    of_the_run = replace(OWN, enabled=False, deepcache_interval=7, low_bit="fp8")
    assert settings_with(of_the_run, enabled="on", deepcache_interval="2") == replace(
        of_the_run, enabled=True, deepcache_interval=2
    )
    assert settings_with(of_the_run, preset=BALANCED) == replace(
        of_the_run, enabled=True, **PRESETS[BALANCED].all_values
    )
    assert settings_with(replace(OWN, enabled=True), preset="Off").enabled is False


def test_single_options_override_a_preset_whatever_the_order_of_the_axes() -> None:
    """But "Off" as a preset, or the option "Use OneDiff" set to off, wins over all other options."""
    one = settings_with(preset=FAST, deepcache_interval="5")
    other = settings_with(deepcache_interval="5", preset=FAST)
    assert one == other and one.deepcache_interval == 5
    alone = settings_with(preset=FAST)
    assert replace(one, deepcache_interval=alone.deepcache_interval) == alone
    assert settings_with(enabled="off", preset=BALANCED).enabled is False
    assert settings_with(deepcache_interval="5", preset="Off").enabled is False


def test_a_cell_whose_option_has_no_effect_because_onediff_is_off_gets_a_comment() -> None:
    off = replace(OWN, enabled=False)

    def comments(**written: str) -> list[str]:
        p = cell(Generation(), **written)
        xyz.settings_of_cell(p, off)
        return p.comments

    assert comments(deepcache_interval="3") == [xyz.OFF_FOR_THIS_RUN]
    assert comments() == comments(enabled="off") == comments(preset=FAST) == []
    assert comments(preset="Off", deepcache_interval="3") == []


# --- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text", "part"), [
    ("backend", "eager, warp", "not 'warp'"), ("low_bit_only", "on, maybe", "must be on or off, not 'maybe'"),
    ("deepcache_interval", "1, 0", "from 1"), ("deepcache_interval", " , ", "no values"),
    ("skip_negative_after", "100", "100"), ("low_bit_budget", "nan", "nan"),
    (xyz.PRESET, "Balanced, Best", "no preset 'Best'"),
])
def test_a_wrong_value_on_an_xyz_plot_axis_is_refused_with_a_sentence(name: str, text: str, part: str) -> None:
    """name: the option of the axis. text: the values as the user writes them, at least one of them wrong. part: a part
    of the message."""
    axis = axis_of(name)
    with pytest.raises(RuntimeError) as refusal:
        values_on(axis, text)
    said = str(refusal.value)
    assert part in said and said.startswith(axis.label) and said.endswith(".")


def test_a_plot_with_our_axes_is_refused_while_onediff_is_switched_off() -> None:
    """Otherwise all its cells would be equal."""
    axis = axis_of("deepcache_interval", replace(OWN, enabled=False))
    with pytest.raises(RuntimeError, match="switched off in the settings tab"):
        axis.confirm(Generation(), [3])
