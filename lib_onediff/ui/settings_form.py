"""What OneDiff's settings show beside their fields: headings, what is not at its default, what is wrong.

A WebUI makes one component for every option, in a list. javascript/onediff_settings.js adds the rest with what stands
here, and asks for what there is to say of the values that somebody has typed, before they are applied.
"""
from __future__ import annotations

import html
import json
from dataclasses import Field
from typing import Any

import gradio as gr

from ..options.effects import Machine, described
from ..options.option import check_value, format_value
from ..options.settings import HOST_KEY_PREFIX, Settings, host_key
from . import texts
from .events import HIDDEN, QUIET, a_button, in_the_browser, markup, nothing_seen
from .settings_tab import in_groups


def build_settings_form() -> None:
    """What the browser needs, inside the page that is being built; nothing of it is seen."""
    gr.HTML(for_the_browser(), elem_classes=HIDDEN)
    ask, asked = a_button("", "settings_ask", elem_classes=HIDDEN), nothing_seen()
    found = markup("settings_found", HIDDEN)
    ask.click(answer, inputs=[asked], outputs=[found], queue=False, **QUIET,
              **in_the_browser("() => [window.onediffSettings.message()]"))


def for_the_browser() -> str:
    """The options of the page in its order, and the words that stand beside them."""
    known = {
        host_key(option.name): {
            "group": option.metadata["group"], "default": option.default, "shown": format_value(option.default),
            "no_effect_when": {host_key(name): values for name, values in option.metadata["no_effect_when"].items()},
        } for option in in_groups()
    }
    told = {"options": known, "texts": texts.SETTINGS_PAGE}
    return f'<span hidden data-onediff-settings="{html.escape(json.dumps(told))}"></span>'


def answer(message: Any) -> str:
    """What to say of a message {"number": 3, "values": {key: value}}, for the browser: of each option what is wrong
    with it, or why it has no effect on this machine."""
    try:
        asked = json.loads(message)
        number, values = int(asked["number"]), dict(asked["values"])
    except (TypeError, ValueError, KeyError):
        return ""
    told = html.escape(json.dumps({"number": number, "wrong": wrong_values(values), "notes": notes(values)}))
    return f'<span data-onediff-found="{told}"></span>'


def wrong_values(values: dict[str, Any]) -> dict[str, str]:
    """By key, what is wrong with a value. Keys of other options are ignored."""
    wrong = {}
    for option in in_groups():
        key = host_key(option.name)
        if key in values:
            try:
                check_value(option, as_typed(option, values[key]))
            except ValueError as problem:
                wrong[key] = str(problem)
    return wrong


def as_typed(option: Field[Any], value: Any) -> Any:
    """The value that a field of a page means: it holds words, also of numbers. Raises ValueError for what is no number.
    """
    if isinstance(option.default, (bool, str)) or isinstance(value, (bool, int, float)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{option.metadata['label']} takes a number, not {str(value)!r}.") from None
    return int(number) if isinstance(option.default, int) and number.is_integer() else number


def notes(values: dict[str, Any]) -> dict[str, str]:
    """By key, why a chosen value does nothing on this machine, or what to know of it."""
    chosen = {
        key.removeprefix(HOST_KEY_PREFIX): value for key, value in values.items()
        if key in map(host_key, Settings.__dataclass_fields__) and isinstance(value, (bool, str))
    }
    machine = Machine.now(chosen.get("backend") == "oneflow")
    return {host_key(name): said for name, said in described(chosen, machine).items()}
