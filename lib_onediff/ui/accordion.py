"""The OneDiff accordion in the txt2img and img2img tabs.

The text box of extra options holds the settings; the sliders and lists hold none. When a user moves a slider or chooses
from a list, javascript/onediff_accordion.js writes the value into the text box, and all sliders and lists show the
values of the run that results. A run's settings are the settings tab's, overridden by the preset, then by the text,
then by an API client's arguments.
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
from .effects import notes_by_option
from .events import ANSWERED, HIDDEN, QUIET, UNCHANGED, in_the_browser, kept_out_of_defaults, live_html
from .infotext import SWITCH, names_by_label, shortest
from .markup import folded, sentence
from .presets import AS_IN_SETTINGS, EXACT, PRESETS, preset_options
from .run_settings import AS_AT_FIRST, EXAMPLE

# A hidden text box of A1111 and Forge that receives the description of every generation. The visible line under the
# images cannot be used: gradio 4 reports a change of an HTML component whenever anything on the page is redrawn.
CHANGES_AFTER_GENERATION = "generation_info_{tab}"
# Texts on the page.
EXTRA_OPTIONS = "Extra options"
WEBUI_ALONE = "This run: the WebUI alone."
OFF_FOR_THIS_RUN = "off for this run"
# The options that have a control, by row. The first row begins with the list of presets; the last is under "Expert".
ROWS = (("vae_precision",), ("deepcache_interval", "deepcache_depth"), ("low_bit", "skip_negative_after"))
# Returns the status as markup: for the accordion's title, and for its inside.
StatusLines = Callable[[], tuple[str, str]]


def build_accordion(
    tab: str, status_lines: StatusLines, settings_of: Callable[..., Settings],
) -> tuple[list[Any], tuple[Any, ...]]:
    """Create the accordion of a tab ("txt2img" or "img2img") inside the open gradio context.

    Returns a list and a tuple of three components each. The values of the list's components are our script's arguments:
    checkbox, list of presets, extra options. The tuple is for `connect`: status in the title, status inside, the button
    of connect_controls.

    status_lines: called when the page loads; see `connect` for later calls. settings_of: returns a run's settings,
        given the values of the script arguments; raises ValueError with a sentence for the user.

    The WebUI's own InputAccordion cannot be used: closing it would switch OneDiff off.
    """
    used, preset_at_first, changes_at_first = AS_AT_FIRST
    with gr.Column(elem_id=f"onediff_{tab}", elem_classes="onediff-accordion"):
        # style.css places this row in the accordion's title.
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
                changes = extra_options_box(tab, value=changes_at_first)
            # Text that changes by itself comes last, in a box with room for it (style.css), so that no control moves.
            with gr.Column(elem_classes="onediff-told"):
                message = live_html(f"{tab}_told")
                status = live_html(f"{tab}_status", value=lambda: status_lines()[1])
        if tab == "txt2img":
            # Here and not in the settings tab: gradio 6 builds that tab when it is first opened.
            with gr.Column(elem_classes=HIDDEN):
                settings_tab.build_for_the_browser()
        arguments = [enabled, preset, changes]
        ask = connect_controls(tab, arguments, controls, message, set_here, settings_of)
    return arguments, (summary, status, ask)


def a_control(tab: str, name: str) -> Any:
    """The control of an option of a run, at the option's default: a slider if it has bounds, otherwise a list of its
    values as words. The setting itself is in the text box (see the module)."""
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


def extra_options_box(owner: str, label: str = EXTRA_OPTIONS, value: str = "") -> Any:
    """A text box for extra options, with the id onediff_<owner>_changes. owner: a tab, or a side of the Compare page.
    """
    return gr.Textbox(
        value, label=label, placeholder=EXAMPLE, lines=1, max_lines=1, elem_id=f"onediff_{owner}_changes",
        info="Any option for this run, by its name or label.",
    )


def connect_controls(
    tab: str, run: list[Any], controls: list[Any], message: Any, set_here: Any, settings_of: Callable[..., Settings],
) -> Any:
    """Connect the controls with the text box, and show the resulting run as a sentence in `message`. If settings_of
    raises ValueError, `message` keeps its sentence while the user types, and shows the error when the user leaves the
    text box or presses Enter.

    Returns a hidden button that renews the message, the title and the controls; javascript/onediff_accordion.js clicks
    it.
    run: the components whose values settings_of takes: checkbox, list of presets, text box.
    controls: the sliders and lists, made by a_control.
    set_here: the HTML component of the title that shows set_here_html.
    """
    *choices, changes = run
    names = [control.elem_id.removeprefix(f"onediff_{tab}_") for control in controls]

    def show_run(*values: Any) -> list[Any]:
        """The sentence on the run, or an error, the title's note (set_here_html), and the values of the controls."""
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
        return [run_html(settings) + for_the_browser(base, wanted[-2:]), title, *changed]

    def show_run_if_valid(*values: Any) -> list[Any]:
        """The result of show_run, or no change while settings_of raises: the user may still be typing."""
        try:
            settings_of(*values[:len(run)])
        except ValueError:
            return [UNCHANGED] * (2 + len(controls))
        return show_run(*values)

    ask = kept_out_of_defaults(gr.Button("", elem_id=f"onediff_{tab}_ask", elem_classes=HIDDEN))
    everything = {"inputs": [*run, *controls], "outputs": [message, set_here, *controls], "queue": False, **QUIET}
    for event in (ask.click, *(choice.change for choice in choices), changes.submit, changes.blur):
        event(show_run, **everything)
    changes.change(show_run_if_valid, **everything)
    # A preset sets all of its options, so their earlier values are removed from the text.
    choices[-1].input(None, inputs=[changes], outputs=[changes], api_name=False, **in_the_browser(
        f'text => onediffAccordion.presetChosen("{tab}", text)'
    ))
    for name, control in zip(names, controls, strict=True):
        # In the browser, without waiting for the server: the next click may be on Generate.
        control.input(None, inputs=[changes, control], outputs=[changes], api_name=False, **in_the_browser(
            f'(text, value) => onediffAccordion.changed("{tab}", "{name}", text, value)'
        ))
    return ask


def of_control(value: Any) -> Any:
    """An option's value in the form that its control shows: a number for a slider, otherwise a word such as "on"."""
    return value if type(value) in (int, float) else format_value(value)


def run_html(settings: Settings) -> str:
    """Markup with a run in words: its preset, the options that differ from the preset, and the notes of
    effects.notes_by_option. Only a sentence that OneDiff is off, if the settings tab or this run switches it off."""
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
    notes = [f"{labels[name]}: {note}" for name, note in notes_by_option(settings.changed_from(Settings())).items()]
    return said + folded(f"Notes on {len(notes)} options", notes)


def set_here_html(used: bool, preset: str | None, text: str | None) -> str:
    """Markup for the accordion's title: the preset and options that are set in the accordion, since they override the
    settings tab even while the accordion is closed. No visible text if text is empty and preset is None or
    AS_IN_SETTINGS. If the checkbox (used) is off, the visible text is only that OneDiff is off for this run.

    The markup also has preset and text as hidden JSON: javascript/onediff.js sends them with a comparison.
    """
    held = html.escape(json.dumps([preset, text or ""]))
    parts = "; ".join(filter(None, (preset if preset != AS_IN_SETTINGS else "", text)))
    words = html.escape(f"Set here: {parts}")
    shown = f'<span class="onediff-set-here" title="{words}">{words}</span>' if parts else ""
    if not used:
        shown = f'<span class="onediff-off">{OFF_FOR_THIS_RUN}</span>'
    return f'{shown}<span hidden data-onediff-set-here="{held}"></span>'


def for_the_browser(base: Settings, said_of: Sequence[str | None]) -> str:
    """Hidden markup with data for javascript/onediff_accordion.js: the values of base, the names of the options that
    presets set, the options' labels, and said_of.

    base: the settings that the run would have if the text box were empty. said_of: the preset and the text that the
    sentence on the page describes.
    """
    known = {
        "base": {name: format_value(getattr(base, name)) for name in options_of_a_run() if name != SWITCH},
        "of_presets": list(preset_options()), "labels": names_by_label(), "said_of": said_of,
    }
    return f'<span hidden data-onediff-run="{html.escape(json.dumps(known))}"></span>'


def connect(component: Any, tab: str, built: tuple[Any, ...], status_lines: StatusLines) -> None:
    """If `component` is the tab's CHANGES_AFTER_GENERATION, have the page renew the status after each generation, and
    when the button of connect_controls is clicked; do nothing for any other component.

    Called for every component that the WebUI creates; every WebUI creates CHANGES_AFTER_GENERATION after the accordion.
    built: the second value of build_accordion; empty if build_accordion failed, and then nothing is connected.
    """
    if component.elem_id != CHANGES_AFTER_GENERATION.format(tab=tab) or not built:
        return
    summary, status, ask = built
    for event in (ask.click, component.change):
        event(status_lines, inputs=[], outputs=[summary, status], queue=False, **QUIET)
    component.change(None, inputs=[], outputs=[], api_name=False, **in_the_browser(
        f"() => {{ onediffAccordion.ask({tab!r}); return []; }}"
    ))
