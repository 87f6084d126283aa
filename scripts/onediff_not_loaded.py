"""Shows on the page why OneDiff could not be loaded. Without it, a script that fails to load shows nothing there."""
from __future__ import annotations

import html
import logging
from importlib import metadata
from typing import Any

import gradio as gr
from modules import scripts

log = logging.getLogger("onediff")


def why_not_loaded() -> str | None:
    """Why OneDiff cannot be imported, as a sentence for the user; None if it can."""
    try:
        from lib_onediff import hosts, ui  # noqa: F401
        from lib_onediff.ui import accordion, infotext, onediff_tab, xyz  # noqa: F401
    except Exception as error:
        # The WebUI has printed the traceback for scripts/onediff.py already.
        log.debug("OneDiff could not be loaded", exc_info=True)
        installed = f"torch {metadata.version('torch')}, gradio {gr.__version__}"
        lines = str(error).splitlines() or [type(error).__name__]
        found = f"{installed}; OneDiff needs torch 2.1.2 or newer"
        return f"OneDiff could not be loaded, so images are made without it: {lines[0]} ({found})."
    return None


reason = why_not_loaded()
if reason is not None:
    log.warning(reason)

    class OneDiffNotLoaded(scripts.Script):
        """Shows the reason in an accordion, in the place of OneDiff's own."""

        def title(self) -> str:
            return "OneDiff"

        def show(self, is_img2img: bool) -> Any:
            return scripts.AlwaysVisible

        def ui(self, is_img2img: bool) -> list[Any]:
            """Build the accordion; it has no script arguments."""
            with gr.Accordion("OneDiff", open=True):
                gr.HTML(f"<p>{html.escape(reason)}</p>")
            return []
