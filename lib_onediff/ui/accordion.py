"""The OneDiff accordion in the txt2img and img2img tabs.

Its sliders and lists hold no settings themselves: what a user moves is written into the text box of extra options, by
javascript/onediff_accordion.js, and each shows what the run will be by that text. So a run has one source: the settings
tab, then the preset, then the text, then what a client of the API gives.
"""
from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import gradio as gr

from ..core.settings import OFF_IN_SETTINGS, Settings, format_value, options_of_a_run, words_of
from ..runtime.runtime import runtime
from . import settings_tab
from .effects import described
from .events import ANSWERED, HIDDEN, QUIET, UNCHANGED, in_the_browser, kept_out_of_defaults, live_html
from .infotext import SWITCH, names_by_label, shortest
from .markup import folded, sentence
from .presets import AS_IN_SETTINGS, EXACT, PRESETS, preset_options
from .run_settings import AS_AT_FIRST, EXAMPLE

# A hidden text box of A1111 and Forge that gets the description of every generation. The visible line under the
# images will not do: gradio 4 reports a change of an HTML component whenever anything on the page is redrawn.
CHANGES_AFTER_GENERATION = "generation_info_{tab}"
EXTRA_OPTIONS = "Extra options"
WEBUI_ALONE = "This run: the WebUI alone."
OFF_FOR_THIS_RUN = "off for this run"
# Rows of options that have a control; the last one is for experts.
ROWS = (("vae_precision",), ("deepcache_interval", "deepcache_depth"), ("low_bit", "skip_negative_after"))
# The status in the accordion's title, and the one inside it.
StatusLines = Callable[[], tuple[str, str]]


def build_accordion(
    tab: str, status_lines: StatusLines, settings_of: Callable[..., Settings],
) -> tuple[list[Any], tuple[Any, ...]]:
    """Create the accordion of a tab ("txt2img" or "img2img") and return the components that are script arguments, and
    those that connect takes.

    status_lines: called when the page loads and after each generation. settings_of: a run's settings by the values of
    the script arguments; raises ValueError with a sentence.

    The WebUI's own InputAccordion will not do: with it, closing switches off.
    """
    used, preset_at_first, changes_at_first = AS_AT_FIRST
    with gr.Column(elem_id=f"onediff_{tab}", elem_classes="onediff-accordion"):
        # Stands in the title of the accordion, by style.css.
        with gr.Row(elem_classes="onediff-title"):
            enabled = gr.Checkbox(
                used, label="Use OneDiff for this run", elem_id=f"onediff_{tab}_enabled", container=False, scale=0,
                min_width=20,
            )
            set_here = live_html(f"{tab}_set_here")
            summary = live_html(f"{tab}_summary", value=lambda: status_lines()[0])
        with gr.Accordion("OneDiff", open=False, elem_id=f"onediff_{tab}_accordion"):
            with gr.Row(elem_classes="onediff-run"):
                preset = gr.Dropdown(
                    choices=[AS_IN_SETTINGS, *PRESETS], value=preset_at_first, label="Speed", min_width=160,
                    info="From exact to fastest.", elem_id=f"onediff_{tab}_preset", **ANSWERED,
                )
                controls = [a_control(tab, name) for name in ROWS[0]]
            for names in ROWS[1:-1]:
                with gr.Row(elem_classes="onediff-run"):
                    controls += [a_control(tab, name) for name in names]
            with gr.Accordion("Expert", open=False, elem_id=f"onediff_{tab}_advanced"):
                with gr.Row(elem_classes="onediff-run"):
                    controls += [a_control(tab, name) for name in ROWS[-1]]
                changes = a_text_of_changes(tab, value=changes_at_first)
            # What changes by itself stands last, in a place of its own (style.css): no control moves away.
            with gr.Column(elem_classes="onediff-told"):
                message = live_html(f"{tab}_told")
                status = live_html(f"{tab}_status", value=lambda: status_lines()[1])
        if tab == "txt2img":
            # gradio 6 makes other tabs when they are first opened, the settings among them.
            with gr.Column(elem_classes=HIDDEN):
                settings_tab.build_for_the_browser()
        arguments = [enabled, preset, changes]
        ask = connect_controls(tab, arguments, controls, message, set_here, settings_of)
    return arguments, (summary, status, ask)


def a_control(tab: str, name: str) -> Any:
    """The slider or the list of an option, with its default value."""
    option = options_of_a_run()[name]
    about: dict[str, Any] = {
        "label": option.metadata["label"], "info": option.metadata["explanation"], "elem_id": f"onediff_{tab}_{name}",
        "min_width": 160,
    }
    if option.metadata["bounds"] is not None:
        least, most = option.metadata["bounds"]
        value: Any = option.default
        return kept_out_of_defaults(gr.Slider(least, most, value, step=option.metadata["step"], **about))
    return kept_out_of_defaults(gr.Dropdown(words_of(option), value=format_value(option.default), **ANSWERED, **about))


def a_text_of_changes(tab: str, label: str = EXTRA_OPTIONS, value: str = "") -> Any:
    """The text box of extra options."""
    return gr.Textbox(
        value, label=label, placeholder=EXAMPLE, lines=1, max_lines=1, elem_id=f"onediff_{tab}_changes",
        info="Any option for this run, by its name or label.",
    )


def connect_controls(
    tab: str, run: list[Any], controls: list[Any], message: Any, set_here: Any, settings_of: Callable[..., Settings],
) -> Any:
    """Have the controls write the text box and show what the run will be in message. Returns the hidden button
    that asks for it, which javascript/onediff_accordion.js clicks.

    run: the components that settings_of takes; the last two are the list of presets and the text box. set_here: shows
    what differs from the settings tab.
    """
    *choices, changes = run
    names = [control.elem_id.removeprefix(f"onediff_{tab}_") for control in controls]

    def tell(*values: Any) -> list[Any]:
        """The sentence on the run, the title's note on what is set here, and the values of the controls."""
        wanted = values[:len(run)]
        now = values[len(run):]
        title = set_here_html(*wanted)
        if not wanted[0]:
            return [sentence(WEBUI_ALONE), title, *[UNCHANGED] * len(now)]
        try:
            base = settings_of(*wanted[:-1], "")
            settings = settings_of(*wanted)
        except ValueError as problem:
            said = sentence(f"{problem} Fix this, or the image is made without OneDiff.", wrong=True)
            return [said, title, *[UNCHANGED] * len(now)]
        chosen = [getattr(settings, name) for name in names]
        words = [of_control(value) for value in chosen]
        changed = [UNCHANGED if word == shown else word for word, shown in zip(words, now, strict=True)]
        return [what_it_will_be(settings) + for_the_browser(base, wanted[-2:]), title, *changed]

    def tell_if_readable(*values: Any) -> list[Any]:
        """While somebody types, what is not finished is no mistake yet."""
        try:
            settings_of(*values[:len(run)])
        except ValueError:
            return [UNCHANGED] * (2 + len(controls))
        return tell(*values)

    ask = kept_out_of_defaults(gr.Button("", elem_id=f"onediff_{tab}_ask", elem_classes=HIDDEN))
    everything = {"inputs": [*run, *controls], "outputs": [message, set_here, *controls], "queue": False, **QUIET}
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
    return ask


def of_control(value: Any) -> Any:
    """An option's value as its control has it: a number, or a word."""
    return value if type(value) in (int, float) else format_value(value)


def what_it_will_be(settings: Settings) -> str:
    """The run in words: its preset and what that means, what differs from it, and what has no effect on this machine.
    """
    if not runtime.settings.enabled:
        return sentence(f"{OFF_IN_SETTINGS}.", wrong=True)
    if not settings.enabled:
        return sentence(WEBUI_ALONE)
    labels = {option.name: option.metadata["label"].partition(" (")[0] for option in fields(Settings)}
    preset, changes = shortest(settings, Settings())
    if preset == AS_IN_SETTINGS and not settings.changed_from(Settings()).keys() & preset_options().keys():
        preset = EXACT
    words = [] if preset == AS_IN_SETTINGS else [preset]
    for change in changes:
        name, _, value = change.partition(" ")
        words.append(f"{labels[name]} {value}")
    said = sentence(f"This run: {', '.join(words)}.")
    if preset in PRESETS:
        said += f'<p class="onediff-reason">{PRESETS[preset].explanation}</p>'
    notes = [f"{labels[name]}: {note}" for name, note in described(settings.changed_from(Settings())).items()]
    return said + folded(f"Notes on {len(notes)} options", notes)


def set_here_html(used: bool, preset: str | None, text: str | None) -> str:
    """For the accordion's title, as it counts more than the settings tab, also where the accordion is closed; and for
    javascript/onediff.js, which compares with it."""
    held = html.escape(json.dumps([preset, text or ""]))
    parts = "; ".join(filter(None, (preset if preset != AS_IN_SETTINGS else "", text)))
    words = html.escape(f"Set here: {parts}")
    shown = f'<span class="onediff-set-here" title="{words}">{words}</span>' if parts else ""
    if not used:
        shown = f'<span class="onediff-off">{OFF_FOR_THIS_RUN}</span>'
    return f'{shown}<span hidden data-onediff-set-here="{held}"></span>'


def for_the_browser(base: Settings, said_of: Sequence[str | None]) -> str:
    """What javascript/onediff_accordion.js needs: the run's options without the text box, which ones presets set, and
    of which preset and text this is said."""
    known = {
        "base": {name: format_value(getattr(base, name)) for name in options_of_a_run() if name != SWITCH},
        "of_presets": list(preset_options()), "labels": names_by_label(), "said_of": said_of,
    }
    return f'<span hidden data-onediff-run="{html.escape(json.dumps(known))}"></span>'


def connect(component: Any, tab: str, built: tuple[Any, ...], status_lines: StatusLines) -> None:
    """Renew the status after each generation. component: any that the host has just created; the one that tells of new
    images comes after a tab's settings, in every host. built: by build_accordion; empty where that has failed."""
    if component.elem_id != CHANGES_AFTER_GENERATION.format(tab=tab) or not built:
        return
    summary, status, ask = built
    for event in (ask.click, component.change):
        event(status_lines, inputs=[], outputs=[summary, status], queue=False, **QUIET)
    component.change(None, inputs=[], outputs=[], api_name=False, **in_the_browser(
        f"() => {{ onediffAccordion.ask({tab!r}); return []; }}"
    ))
