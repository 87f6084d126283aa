"""Sliders and lists of a run, in the accordion.

They hold no settings themselves: what a user moves is written into the text box of extra options, by
javascript/onediff_accordion.js, and each shows what the run will be by that text. So a run has one source: the settings
tab, then the preset, then the text, then what a client of the API gives.
"""
from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

import gradio as gr

from ..core.option import format_value, words_of
from ..core.settings import OFF_IN_SETTINGS, Settings
from ..runtime.runtime import runtime
from .effects import described
from .events import HIDDEN, QUIET, UNCHANGED, in_the_browser, kept_out_of_defaults
from .infotext import SWITCH, describe, options_of_a_run
from .markup import sentence
from .presets import AS_IN_SETTINGS, preset_options
from .run_settings import EXAMPLE
from .settings_tab import label_of

EXTRA_OPTIONS = "Extra options"
# Rows of options that have a control; the last one is for experts.
ROWS = (("vae_precision",), ("deepcache_interval", "deepcache_depth"), ("low_bit", "guidance_end"))


def a_control(tab: str, name: str) -> Any:
    """The slider or the list of an option, with its default value."""
    option = options_of_a_run()[name]
    about = {"label": option.metadata["label"], "elem_id": f"onediff_{tab}_{name}", "min_width": 160}
    if option.metadata["bounds"] is not None:
        least, most = option.metadata["bounds"]
        slider = gr.Slider(least, most, value=option.default, step=option.metadata["step"], **about)
        return kept_out_of_defaults(slider)
    return kept_out_of_defaults(gr.Dropdown(words_of(option), value=format_value(option.default), **about))


def a_text_of_changes(tab: str, label: str = EXTRA_OPTIONS, value: str = "") -> Any:
    """The text box of extra options."""
    return gr.Textbox(
        value, label=label, placeholder=EXAMPLE, lines=1, max_lines=1, elem_id=f"onediff_{tab}_changes",
    )


def connect_controls(
    tab: str, run: list[Any], controls: list[Any], told: Any, set_here: Any, settings_of: Callable[..., Settings],
) -> None:
    """Have the controls write the text box and show what the run will be, and told say it. A hidden button asks for it,
    which javascript/onediff_accordion.js clicks.

    run: the components that settings_of takes; the last two are the list of presets and the text box. set_here: shows
    what differs from the settings tab.
    """
    *choices, changes = run
    names = [control.elem_id.removeprefix(f"onediff_{tab}_") for control in controls]

    def tell(*values: Any) -> list[Any]:
        """What the run will be, what is set here, and what the controls show of it."""
        wanted, now = values[:len(run)], values[len(run):]
        title = set_here_html(*wanted[-2:])
        try:
            base, settings = settings_of(*wanted[:-1], ""), settings_of(*wanted)
        except ValueError as problem:
            said = sentence(f"{problem} Fix this, or the image is made without OneDiff.", wrong=True)
            return [said, title, *[UNCHANGED] * len(now)]
        return [what_it_will_be(settings) + for_the_browser(base), title, *shown_values(names, settings, now)]

    def tell_if_readable(*values: Any) -> list[Any]:
        """While somebody types, what is not finished is no mistake yet."""
        try:
            settings_of(*values[:len(run)])
        except ValueError:
            return [UNCHANGED] * (2 + len(controls))
        return tell(*values)

    ask = kept_out_of_defaults(gr.Button("", elem_id=f"onediff_{tab}_ask", elem_classes=HIDDEN))
    everything = {"inputs": [*run, *controls], "outputs": [told, set_here, *controls], "queue": False, **QUIET}
    for event in (ask.click, *(choice.change for choice in choices), changes.submit, changes.blur):
        event(tell, **everything)
    changes.change(tell_if_readable, **everything)
    # A preset sets all of its options: what was changed of them before goes.
    choices[-1].input(None, inputs=[changes], outputs=[changes], api_name=False, **in_the_browser(
        f'text => onediffAccordion.presetChosen("{tab}", text)'
    ))
    for name, control in zip(names, controls, strict=True):
        # At once: the next click may be on Generate.
        control.input(None, inputs=[changes, control], outputs=[changes], api_name=False, **in_the_browser(
            f'(text, value) => onediffAccordion.changed("{tab}", "{name}", text, value)'
        ))


def what_it_will_be(settings: Settings) -> str:
    if not runtime.settings.enabled:
        return sentence(f"{OFF_IN_SETTINGS}.", wrong=True)
    notes = [f"{label_of(name)}: {said}" for name, said in described(settings.changed_from(Settings())).items()]
    return sentence(" ".join([f"This run: {describe(settings)}.", *notes]))


def set_here_html(preset: str | None, text: str | None) -> str:
    """For the accordion's title, as it counts more than the settings tab, also where the accordion is closed."""
    parts = "; ".join(filter(None, (preset if preset != AS_IN_SETTINGS else "", text)))
    words = html.escape(f"Set here: {parts}")
    return f'<span class="onediff-set-here" title="{words}">{words}</span>' if parts else ""


def shown_values(names: list[str], settings: Settings, shown: tuple[Any, ...]) -> list[Any]:
    """What the controls of these options change to, from what they show."""
    values = [getattr(settings, name) for name in names]
    words = [value if type(value) in (int, float) else format_value(value) for value in values]
    return [UNCHANGED if word == now else word for word, now in zip(words, shown, strict=True)]


def for_the_browser(base: Settings) -> str:
    """What javascript/onediff_accordion.js needs: the run's options without the text box, and which ones presets set.
    """
    known = {
        "base": {name: format_value(getattr(base, name)) for name in options_of_a_run() if name != SWITCH},
        "of_presets": list(preset_options()),
    }
    return f'<span hidden data-onediff-run="{html.escape(json.dumps(known))}"></span>'
