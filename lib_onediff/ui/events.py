"""How our components hang on gradio and on the WebUI, which gradio 3 and 4 take in different words."""
from __future__ import annotations

import inspect
from typing import Any

import gradio as gr

# The style of markup that is renewed while something runs.
LIVE = "onediff-live"
# No spinner over what is being renewed, and no entry in the page's API.
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_name": False}


def live() -> dict[str, Any]:
    """Arguments for a handler that yields for as long as something runs: any number of pages may wait in it."""
    takes_limit = "concurrency_limit" in inspect.signature(gr.Blocks.load).parameters
    return {"concurrency_limit": None} if takes_limit else {}


def kept_out_of_defaults(component: Any) -> Any:
    """A1111 and Forge write what components show into a file of defaults, but not those that say so."""
    component.do_not_save_to_config = True
    return component
