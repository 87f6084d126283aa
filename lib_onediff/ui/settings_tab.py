"""OneDiff's section in the WebUI's settings tab, made from the fields of Settings.

The WebUI shows one component for each option, in a list. javascript/onediff_settings.js adds headings, the Speed
buttons, and notes on options that are not at their defaults, are not applied yet, or have no effect on this machine.
"""
from __future__ import annotations

import html
import json
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Any

import gradio as gr

from ..core.settings import (
    GROUPS,
    HOST_KEY_PREFIX,
    Settings,
    check_value,
    format_value,
    host_key,
    parse_value,
    words_of,
)
from ..runtime.runtime import runtime
from .effects import notes_by_option, why_no_effect
from .events import HIDDEN, QUIET, browser_input, in_the_browser, kept_out_of_defaults, live_html
from .presets import PRESETS

# The section's name in the WebUI, and its title on the page.
SECTION = ("onediff", "OneDiff")
# The end of a warning that OneDiff's files cannot be written.
OTHER_FOLDER = (
    " To use another folder, set the environment variable ONEDIFF_CACHE before you start the WebUI. Images stay the "
    "same."
)
# An option whose range has more steps than this gets a number field, because a slider could not reach each value.
MOST_STEPS_OF_A_SLIDER = 1000
log = logging.getLogger("onediff")


def add_options(opts: Any, option_info: Callable[..., Any], changed: Callable[[], None]) -> None:
    """Register every field of Settings as an option of the WebUI, and configure the runtime with the WebUI's values,
    now and after every change of an option.

    If a user sets a wrong value, all options keep their old values, and the page and the log say so.

    opts: the WebUI's shared.opts. option_info: the WebUI's class OptionInfo. changed: called after each time that the
    runtime was to be configured, also if the values were wrong.
    """

    def apply() -> None:
        """Called by the WebUI after a change of one of our options."""
        # If this raised, the WebUI would undo the change or print a traceback.
        runtime.guard.attempt("reading the settings", read)
        changed()

    def read() -> None:
        """Configure the runtime with the WebUI's values, or give the WebUI the old values back if they are wrong."""
        before = runtime.settings
        try:
            runtime.configure(settings_from(opts))
        except Exception as error:
            # The new values could not be read, so the WebUI gets the old ones back.
            for option in fields(Settings):
                opts.data[host_key(option.name)] = getattr(before, option.name)
            if not isinstance(error, ValueError):
                raise
            tell(f"{error} The setting stays as it was.")

    for option in in_groups():
        about = option.default, option.metadata["label"], *component_of(option)
        info = option_info(*about, section=SECTION, onchange=apply)
        opts.add_option(host_key(option.name), info.info(option.metadata["explanation"]))
    apply()


def in_groups() -> list[Field]:
    """All fields of Settings in the order of the page: group by group."""
    return sorted(fields(Settings), key=lambda option: GROUPS.index(option.metadata["group"]))


def for_the_browser() -> str:
    """A hidden HTML element with data for javascript/onediff_settings.js, as JSON: option_for_the_browser of each
    option, in the order of the page, and for each Speed button the values that it sets and its explanation."""
    known = {host_key(option.name): option_for_the_browser(option) for option in in_groups()}
    speeds = {}
    for name, preset in PRESETS.items():
        values = {host_key(option): value for option, value in preset.all_values.items()}
        speeds[name] = {"values": values, "explained": preset.explanation}
    data = html.escape(json.dumps({"options": known, "speeds": speeds}))
    return f'<span hidden data-onediff-settings="{data}"></span>'


def build_for_the_browser() -> None:
    """Build hidden components for javascript/onediff_settings.js inside the open gradio context: the data on all
    options, and a button that checks the values on the settings page. The WebUI builds the settings page itself, so
    these components are elsewhere."""
    gr.HTML(for_the_browser())
    chosen = browser_input()
    checked = live_html("settings_checked")
    ask = kept_out_of_defaults(gr.Button("", elem_id="onediff_settings_ask", elem_classes=HIDDEN))
    ask.click(
        checked_for_the_browser, inputs=[chosen], outputs=[checked], queue=False, **QUIET,
        **in_the_browser("() => [window.onediffSettings.chosen()]"),
    )


def checked_for_the_browser(chosen: Any) -> str:
    """A hidden HTML element with data for javascript/onediff_settings.js, as JSON: the chosen values ("of"), the values
    in force of all options ("in_force"), and a sentence for each wrong chosen value ("problems"); each by the WebUI's
    names of the options (host_key).

    chosen: the values on the page, as a JSON object; any other text, and None, counts as an empty object.
    """
    try:
        values = dict(json.loads(chosen))
    except (TypeError, ValueError):
        values = {}
    problems = {}
    for option in fields(Settings):
        key = host_key(option.name)
        if key in values:
            problems[key] = problem_of_value(option, values[key])
    in_force = {host_key(option.name): getattr(runtime.settings, option.name) for option in fields(Settings)}
    told = {"of": values, "in_force": in_force, "problems": {key: said for key, said in problems.items() if said}}
    return f'<span hidden data-onediff-checked="{html.escape(json.dumps(told))}"></span>'


def problem_of_value(option: Field[Any], value: Any) -> str:
    """Why a value from the page is wrong for its option, as a sentence to be shown below its field; "" if it is right.
    A number may come as text, and a whole number as 2.0."""
    kind = type(option.default)
    try:
        if kind in (int, float):
            try:
                number = float(value)
            except (OverflowError, TypeError, ValueError):
                return f"This is not a number: {value!r}."
            value = int(number) if kind is int and number.is_integer() else number
        check_value(option, value)
    except ValueError as problem:
        return str(problem).replace(f"OneDiff option {option.name} ", "This ")
    return ""


def option_for_the_browser(option: Field[Any]) -> dict[str, Any]:
    """The data of one option for javascript/onediff_settings.js: its group, label, default (also as a word), notes(),
    why_useless(), and the values of other options at which it has no effect."""
    metadata = option.metadata
    return {
        "group": metadata["group"], "default": option.default, "shown": format_value(option.default),
        "no_effect_when": {host_key(name): values for name, values in metadata["no_effect_when"].items()},
        "notes": notes(option), "label": metadata["label"], "useless": why_useless(option),
    }


def notes(option: Field[Any]) -> dict[str, str]:
    """Sentences for users, by value (as a word), on those values of an option that have no effect on this machine or
    need an explanation; {} for an option without a list of values."""
    found = {}
    for word in words_of(option):
        note = notes_by_option({option.name: parse_value(option, word)}).get(option.name)
        if note:
            found[word] = note
    return found


def why_useless(option: Field[Any]) -> str:
    """Why an option has no effect on this machine, whatever value a user sets in place of its default; "" if a value
    has an effect. Tries all values of a list, only the bounds of a number, and none of an option without either."""
    reason = None
    values = [parse_value(option, word) for word in words_of(option)] or option.metadata["bounds"] or ()
    for value in values:
        if value == option.default:
            continue
        reason = why_no_effect(option.name, value)
        if not reason:
            return ""
    return reason or ""


def tell_of_trouble() -> None:
    """Warn in the log if the cache folder cannot be used, or a file in it was damaged. Called once at the start, so
    that the user can act before something is lost. After damage, nothing is to be done: a new file is in use."""
    if runtime.history.trouble:
        log.warning("%s%s", runtime.history.trouble, "" if runtime.history.saves else OTHER_FOLDER)


def tell(text: str) -> None:
    """Show a warning in the log, and on the page if one of the page's handlers calls this."""
    log.warning(text)
    with warnings.catch_warnings():
        # Without a page, gradio turns it into a Python warning, which would repeat the log's line.
        warnings.simplefilter("ignore")
        # gradio shows it as markup.
        gr.Warning(html.escape(text, quote=False))


def component_of(option: Field) -> tuple[type, dict[str, Any]]:
    """The gradio component class for an option, and its keyword arguments: Radio for a list of choices, Checkbox for a
    bool, Slider for a number with few steps between its bounds, Number for other numbers, Textbox for texts."""
    choices = option.metadata["choices"]
    if choices:
        return gr.Radio, {"choices": list(choices)}
    if isinstance(option.default, bool):
        return gr.Checkbox, {}
    least, most = option.metadata["bounds"] or (0, math.inf)
    if most - least <= MOST_STEPS_OF_A_SLIDER * option.metadata["step"]:
        return gr.Slider, {"minimum": least, "maximum": most, "step": option.metadata["step"]}
    if isinstance(option.default, (int, float)):
        return gr.Number, {"precision": 0} if isinstance(option.default, int) else {}
    return gr.Textbox, {}


def settings_from(opts: Any) -> Settings:
    """The settings in the WebUI's options (shared.opts). While a generation overrides options (override_settings), the
    overriding values are in the settings.

    Options that the WebUI has not registered have the runtime's present values: with --nowebui, the WebUI registers
    none. Raises ValueError with a sentence for a wrong value.
    """
    return Settings.from_mapping({
        option.name: getattr(opts, host_key(option.name), getattr(runtime.settings, option.name))
        for option in fields(Settings)
    })


def stored_settings(opts: Any) -> Settings:
    """The settings that the WebUI has stored, before our options are registered. Options that are not stored have
    their defaults.

    A wrong value is replaced by the option's default, in the WebUI's stored options too: the WebUI could not apply a
    page that shows a wrong choice. Unknown options with our prefix are removed there. Each of these is logged.
    """
    stored = {key for key in opts.data if key.startswith(HOST_KEY_PREFIX)}
    settings = Settings()
    for option in fields(Settings):
        key = host_key(option.name)
        if key not in stored:
            continue
        try:
            settings = replace(settings, **{option.name: opts.data[key]})
        except ValueError as problem:
            log.warning("%s Its default is used.", problem)
        opts.data[key] = getattr(settings, option.name)
    unknown = sorted(stored.difference(host_key(option.name) for option in fields(Settings)))
    if unknown:
        names = ", ".join(unknown)
        log.warning("OneDiff no longer has these options, so they are removed from the WebUI's settings: %s.", names)
        for key in unknown:
            del opts.data[key]
    return settings
