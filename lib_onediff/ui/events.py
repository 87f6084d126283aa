"""How our components hang on gradio and on the WebUI, which gradio 3 and 4 take in different words."""
from __future__ import annotations

from typing import Any

import gradio as gr

# The style of markup that is renewed while something runs.
LIVE = "onediff-live"
# In the page, but not to be seen.
HIDDEN = "onediff-hidden"
# No spinner over what is being renewed, and no entry in the page's API.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_name": False}


def kept_out_of_defaults(component: Any) -> Any:
    """A1111 and Forge write what components show into a file of defaults, but not those that say so."""
    component.do_not_save_to_config = True
    return component


def in_the_browser(function: str) -> dict[str, str]:
    """The argument of an event that has JavaScript turn the inputs' values into others before they are sent.

    function: takes the values of all inputs and then of all outputs, and returns a list of the inputs' values.
    """
    return {"js" if int(gr.__version__.split(".")[0]) >= 4 else "_js": function}
