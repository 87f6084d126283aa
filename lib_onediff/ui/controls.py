"""The accordion's sliders and lists. They hold nothing themselves: what a user moves is written into the text box of
changed options, by javascript/onediff_accordion.js, and each shows what the run will be by that text.

So a run has one source: the settings tab, then the preset, then the text, then what a client of the API gives.
"""
from __future__ import annotations

import html
import json
from dataclasses import Field
from typing import Any

import gradio as gr

from ..options.infotext import SWITCH, options_of_a_run
from ..options.option import WORD_OF_BOOL, format_value
from ..options.presets import preset_options
from ..options.settings import Settings
from .events import UNCHANGED, in_the_browser, kept_out_of_defaults

# Rows of options that have a control.
ROWS = (("vae_precision", "fp8"), ("deepcache_interval", "deepcache_depth"))
HIRES = "deepcache_hires"


def a_control(tab: str, name: str) -> Any:
    """The slider or the list of an option, with its value in the settings tab's defaults."""
    option = options_of_a_run()[name]
    about = {"label": option.metadata["label"], "elem_id": f"onediff_{tab}_{name}", "min_width": 160}
    if type(option.default) is int:
        least, most = option.metadata["bounds"]
        return kept_out_of_defaults(gr.Slider(least, most, value=option.default, step=1, **about))
    return kept_out_of_defaults(gr.Dropdown(words_of(option), value=format_value(option.default), **about))


def words_of(option: Field[Any]) -> list[str]:
    """The values of an option as the text box takes them; nothing where it takes any number."""
    return [*WORD_OF_BOOL.values()] if isinstance(option.default, bool) else list(option.metadata["choices"])


def connect_control(tab: str, control: Any, changes: Any) -> None:
    """Write what the user chooses into the text box, at once: the next click may be on Generate."""
    name = control.elem_id.removeprefix(f"onediff_{tab}_")
    control.input(None, inputs=[changes, control], outputs=[changes], api_name=False, **in_the_browser(
        f'(text, value) => onediffAccordion.changed("{tab}", "{name}", text, value)'
    ))


def connect_preset(tab: str, preset: Any, changes: Any) -> None:
    """A preset sets all of its options: what was changed of them before goes."""
    preset.input(None, inputs=[changes], outputs=[changes], api_name=False, **in_the_browser(
        f'text => onediffAccordion.presetChosen("{tab}", text)'
    ))


def shown_values(names: list[str], settings: Settings, shown: tuple[Any, ...]) -> list[Any]:
    """What the controls of these options change to, from what they show."""
    values = [getattr(settings, name) for name in names]
    words = [value if type(value) is int else format_value(value) for value in values]
    return [UNCHANGED if word == now else word for word, now in zip(words, shown, strict=True)]


def for_the_browser(base: Settings) -> str:
    """What javascript/onediff_accordion.js needs to know. base: the run without the text box."""
    in_presets = preset_options(base)
    known = {
        name: {"base": format_value(getattr(base, name)), "words": words_of(option), "of_presets": name in in_presets}
        for name, option in options_of_a_run().items() if name != SWITCH
    }
    return f'<span hidden data-onediff-options="{html.escape(json.dumps(known))}"></span>'
