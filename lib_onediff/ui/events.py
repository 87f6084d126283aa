"""Components and events in the forms that gradio 3, 4 and 6 take.

No handler is a generator: if a page is closed while a generator runs, gradio 3 never ends its connection, and the
WebUI's "Reload UI" waits for that for ever. Long work runs in a thread instead, and javascript/onediff.js asks for its
progress by clicking a hidden button while the page is visible.
"""
from __future__ import annotations

from typing import Any

import gradio as gr

# Classes of style.css. LIVE: markup that is renewed while something runs. HIDDEN: a component that the page has but
# does not show. DANGER: a button that deletes something.
LIVE = "onediff-live"
HIDDEN = "onediff-hidden"
DANGER = "onediff-danger"
# Lists of classes: of a row of fields, and of a row of buttons.
CONTROLS = ["onediff-controls"]
ACTIONS = ["onediff-controls", "onediff-actions"]
# Arguments of an event: no spinner over the outputs while the handler runs, and no entry in the page's API.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_name": False}
# A handler returns this for an output that stays as it is.
UNCHANGED: Any = gr.update()
# The major version of gradio.
GRADIO = int(gr.__version__.split(".")[0])
# Argument of a drop-down list. Without it, gradio raises for a choice that the list no longer has, for example on a
# page that was loaded before a purge. With it, our handler gets the value and answers.
ANSWERED: dict[str, Any] = {"allow_custom_value": True}
# Arguments of a text box with a button that copies its text.
COPY_BUTTON: dict[str, Any] = {"buttons": ["copy"]} if GRADIO >= 6 else {"show_copy_button": True}


def kept_out_of_defaults(component: Any) -> Any:
    """Mark a component so that A1111 and Forge do not write its value into their file of defaults (ui-config.json).
    Returns the same component."""
    component.do_not_save_to_config = True
    return component


def in_the_browser(function: str) -> dict[str, Any]:
    """The keyword argument of a gradio event by which a JavaScript function runs in the browser before the handler.

    function: its source. It takes the values of all inputs, then of all outputs; it returns the list of values that the
    handler gets as inputs, or that the outputs show if there is no handler.
    """
    return {"js" if GRADIO >= 4 else "_js": function}


def a_button(text: str, name: str, **more: Any) -> gr.Button:
    """A button with the id onediff_<name>. more: further arguments of gr.Button."""
    return kept_out_of_defaults(gr.Button(text, elem_id=f"onediff_{name}", **{"scale": 0, "min_width": 110, **more}))


def a_list(label: str, choices: list[str], value: str, name: str) -> gr.Dropdown:
    """A drop-down list with the id onediff_<name>. value: the one chosen at first."""
    return kept_out_of_defaults(gr.Dropdown(
        choices=choices, value=value, label=label, elem_id=f"onediff_{name}", scale=1, min_width=140, **ANSWERED,
    ))


def a_text(label: str, name: str, value: str = "", **more: Any) -> gr.Textbox:
    """A text box with the id onediff_<name>. more: further arguments of gr.Textbox."""
    return kept_out_of_defaults(gr.Textbox(value, label=label, elem_id=f"onediff_{name}", **more))


def live_html(name: str, *classes: str, **more: Any) -> gr.HTML:
    """An HTML component with the id onediff_<name>, for markup that handlers renew while the page is open. classes:
    further classes of style.css. more: further arguments of gr.HTML."""
    return gr.HTML(elem_id=f"onediff_{name}", elem_classes=[LIVE, *classes], **more)


def browser_input() -> gr.Textbox:
    """An invisible text component, to be an input of a handler. The event's JavaScript (in_the_browser) computes the
    value that the handler gets for it."""
    return kept_out_of_defaults(gr.Textbox("", visible=False))


def forget_when_changed(fields: list[Any], output: Any) -> None:
    """Have the browser clear the message in `output` as soon as the user changes one of these fields: the message was
    about their old values."""
    for field in fields:
        field.input(None, inputs=[], outputs=[output], api_name=False, **in_the_browser("() => ''"))
