"""OneDiff's section in the WebUI's settings tab, made from the fields of Settings."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import gradio as gr

from ..accelerator import runtime
from ..settings import Settings, host_key

SECTION = ("onediff", "OneDiff")
log = logging.getLogger("onediff")


def add_options(opts: Any, option_info: Callable[..., Any]) -> None:
    """Register every field of Settings as an option of the WebUI and use the values that the WebUI has stored.

    opts: the WebUI's shared.opts; option_info: its OptionInfo.
    """

    def apply() -> None:
        try:
            runtime.configure(settings_from(opts))
        except ValueError as problem:
            # A WebUI prints a traceback for what an onchange raises; so the old values are put back here instead.
            log.warning("%s The setting stays as it was.", problem)
            for option in fields(Settings):
                opts.data[host_key(option.name)] = getattr(runtime.settings, option.name)

    for option in fields(Settings):
        info = option_info(
            option.default,
            option.metadata["label"],
            *component_of(option),
            section=SECTION,
            onchange=apply,
        )
        opts.add_option(host_key(option.name), info.info(option.metadata["explanation"]))
    apply()


def component_of(option: Field) -> tuple[type, dict[str, Any]]:
    """The gradio component for an option and its arguments."""
    choices = option.metadata["choices"]
    if choices:
        return gr.Radio, {"choices": list(choices)}
    if isinstance(option.default, bool):
        return gr.Checkbox, {}
    if isinstance(option.default, (int, float)):
        return gr.Number, {"precision": 0} if isinstance(option.default, int) else {}
    return gr.Textbox, {}


def settings_from(opts: Any) -> Settings:
    """The settings that the WebUI's options say now. Raises ValueError with a sentence for a wrong value."""
    return Settings.from_mapping({option.name: getattr(opts, host_key(option.name)) for option in fields(Settings)})
