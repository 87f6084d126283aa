"""OneDiff's section in the WebUI's settings tab, made from the fields of Settings.

A WebUI makes one component for every option, in a list. javascript/onediff_settings.js adds headings, the Speed
buttons, and what is not at its default or has no effect on this machine.
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
from .effects import described, why_no_effect
from .events import HIDDEN, QUIET, in_the_browser, kept_out_of_defaults, live_html, nothing_seen
from .presets import PRESETS

SECTION = ("onediff", "OneDiff")
# A slider cannot tell more.
MOST_STEPS_OF_A_SLIDER = 1000
log = logging.getLogger("onediff")


def add_options(opts: Any, option_info: Callable[..., Any], changed: Callable[[], None]) -> None:
    """Register every field of Settings as an option of the WebUI and use the values that the WebUI has stored.

    opts: the WebUI's shared.opts; option_info: its OptionInfo; changed: called after every change of the settings.
    """

    def apply() -> None:
        # A WebUI takes an option back whose onchange raises, or prints a traceback.
        runtime.guard.attempt("reading the settings", read)
        changed()

    def read() -> None:
        before = runtime.settings
        try:
            runtime.configure(settings_from(opts))
        except Exception as error:
            # What could not be looked at is not taken.
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
    """All options in the order of the page."""
    return sorted(fields(Settings), key=lambda option: GROUPS.index(option.metadata["group"]))


def for_the_browser() -> str:
    """What javascript/onediff_settings.js needs: the options in the order of the page, and what the Speed buttons set.
    """
    known = {host_key(option.name): option_for_the_browser(option) for option in in_groups()}
    speeds = {}
    for name, preset in PRESETS.items():
        values = {host_key(option): value for option, value in preset.all_values.items()}
        speeds[name] = {"values": values, "explained": preset.explanation}
    data = html.escape(json.dumps({"options": known, "speeds": speeds}))
    return f'<span hidden data-onediff-settings="{data}"></span>'


def build_for_the_browser() -> None:
    """What javascript/onediff_settings.js needs, inside the gradio context that is open: the options, and a button that
    asks for what holds of those chosen. Unseen and elsewhere, as a WebUI makes the settings page itself."""
    gr.HTML(for_the_browser())
    chosen = nothing_seen()
    checked = live_html("settings_checked")
    ask = kept_out_of_defaults(gr.Button("", elem_id="onediff_settings_ask", elem_classes=HIDDEN))
    ask.click(
        checked_for_the_browser, inputs=[chosen], outputs=[checked], queue=False, **QUIET,
        **in_the_browser("() => [window.onediffSettings.chosen()]"),
    )


def checked_for_the_browser(chosen: Any) -> str:
    """What is in force beside the options that somebody has chosen (as JSON, by their keys), and a sentence for each
    that is not what its option takes."""
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
    """Why an option does not take a value as a page has it, for under its field; "" where it does."""
    kind = type(option.default)
    try:
        if kind in (int, float):
            try:
                value = kind(value)
            except (TypeError, ValueError):
                return f"This is no number: {value!r}."
        check_value(option, value)
    except ValueError as problem:
        return str(problem).replace(f"OneDiff option {option.name} ", "This ")
    return ""


def option_for_the_browser(option: Field[Any]) -> dict[str, Any]:
    """An option as javascript/onediff_settings.js takes it."""
    metadata = option.metadata
    return {
        "group": metadata["group"], "default": option.default, "shown": format_value(option.default),
        "no_effect_when": {host_key(name): values for name, values in metadata["no_effect_when"].items()},
        "notes": notes(option), "label": metadata["label"], "useless": why_useless(option),
    }


def notes(option: Field[Any]) -> dict[str, str]:
    """A sentence for each value of an option that has no effect on this machine, or needs one; by the value's word."""
    found = {}
    for word in words_of(option):
        note = described({option.name: parse_value(option, word)}).get(option.name)
        if note:
            found[word] = note
    return found


def why_useless(option: Field[Any]) -> str:
    """Why no value of an option but its default has an effect on this machine; "" if one has."""
    reason = None
    for word in words_of(option):
        value = parse_value(option, word)
        if value == option.default:
            continue
        reason = why_no_effect(option.name, value)
        if not reason:
            return ""
    return reason or ""


def tell_of_trouble() -> None:
    """Say at the start that the cache folder cannot be used, not when something is lost."""
    if runtime.history.trouble:
        log.warning(
            "%s Set the environment variable ONEDIFF_CACHE to a folder that can be written.", runtime.history.trouble,
        )


def tell(text: str) -> None:
    """Say it in the log and, when somebody is using the page, there."""
    log.warning(text)
    with warnings.catch_warnings():
        # Without a page, gradio hands it to Python's own warnings, which would repeat the log.
        warnings.simplefilter("ignore")
        # gradio shows it as markup.
        gr.Warning(html.escape(text, quote=False))


def component_of(option: Field) -> tuple[type, dict[str, Any]]:
    """The gradio component for an option and its arguments."""
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
    """The settings that the WebUI's options say now, a generation's overrides included.

    An option that the WebUI does not know, because it makes no page (--nowebui), is as the runtime has it. Raises
    ValueError with a sentence for a wrong value.
    """
    return Settings.from_mapping({
        option.name: getattr(opts, host_key(option.name), getattr(runtime.settings, option.name))
        for option in fields(Settings)
    })


def stored_settings(opts: Any) -> Settings:
    """The settings that the WebUI has stored, before its options are registered. An option that is not stored has its
    default.

    A wrong value is replaced by the default, since a page with a value that is not a choice cannot be applied. Unknown
    options are removed. Both are told in the log.
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
        log.warning("OneDiff has no options of these names, so the WebUI's settings lose them: %s.", names)
        for key in unknown:
            del opts.data[key]
    return settings
