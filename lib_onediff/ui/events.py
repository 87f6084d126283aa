"""Components and events in the forms that gradio 3, 4 and 6 take.

No handler is a generator: gradio 3 never ends the connection of a page that was left while one was running, and then
the WebUI's "Reload UI" waits for it for ever. What takes long goes on in a thread, and javascript/onediff.js looks at
it, by a click on a hidden button, as long as a bar can be seen.
"""
from __future__ import annotations

from typing import Any

import gradio as gr

# The style of markup that is renewed while something runs.
LIVE = "onediff-live"
# In the page, but not to be seen.
HIDDEN = "onediff-hidden"
# A button that throws something away.
DANGER = "onediff-danger"
CONTROLS = ["onediff-controls"]
ACTIONS = ["onediff-controls", "onediff-actions"]
# No spinner over what is being renewed, and no entry in the page's API.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_name": False}
UNCHANGED: Any = gr.update()
GRADIO = int(gr.__version__.split(".")[0])
# gradio raises for a choice that a list no longer has, as where a page is older than its server's last answer. What a
# list sends gets an answer of ours, whatever it is.
ANSWERED: dict[str, Any] = {"allow_custom_value": True}
COPY_BUTTON: dict[str, Any] = {"buttons": ["copy"]} if GRADIO >= 6 else {"show_copy_button": True}


def kept_out_of_defaults(component: Any) -> Any:
    """A1111 and Forge write what components show into a file of defaults, but not those that say so."""
    component.do_not_save_to_config = True
    return component


def in_the_browser(function: str) -> dict[str, Any]:
    """The argument of an event that has JavaScript turn the inputs' values into others before they are sent.

    function: takes the values of all inputs and then of all outputs, and returns a list of the inputs' values.
    """
    return {"js" if GRADIO >= 4 else "_js": function}


def a_button(text: str, name: str, **more: Any) -> gr.Button:
    return kept_out_of_defaults(gr.Button(text, elem_id=f"onediff_{name}", **{"scale": 0, "min_width": 110, **more}))


def a_list(label: str, choices: list[str], value: str, name: str) -> gr.Dropdown:
    """A list of which one is chosen."""
    return kept_out_of_defaults(gr.Dropdown(
        choices=choices, value=value, label=label, elem_id=f"onediff_{name}", scale=1, min_width=140, **ANSWERED,
    ))


def a_text(label: str, name: str, value: str = "", **more: Any) -> gr.Textbox:
    return kept_out_of_defaults(gr.Textbox(value, label=label, elem_id=f"onediff_{name}", **more))


def live_html(name: str, *classes: str, **more: Any) -> gr.HTML:
    """An HTML component whose markup changes."""
    return gr.HTML(elem_id=f"onediff_{name}", elem_classes=[LIVE, *classes], **more)


def nothing_seen() -> gr.Textbox:
    """A hidden text box whose value JavaScript fills in."""
    return kept_out_of_defaults(gr.Textbox("", visible=False))


def forget_when_changed(fields: list[Any], output: Any) -> None:
    """Clear a message about these fields as soon as the user changes one of them."""
    for field in fields:
        field.input(None, inputs=[], outputs=[output], api_name=False, **in_the_browser("() => ''"))
