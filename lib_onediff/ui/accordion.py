"""The OneDiff accordion in the txt2img and img2img tabs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

# A hidden text box of A1111 and Forge that gets the description of every generation. The visible line under the
# pictures will not do: gradio 4 reports a change of an HTML component whenever anything on the page is redrawn.
CHANGES_AFTER_GENERATION = "generation_info_{tab}"


def build_accordion(tab: str, status_line: Callable[[], str]) -> list[Any]:
    """Create the accordion of a tab ("txt2img" or "img2img") and return the components that are script arguments.

    status_line: makes the status line's markup; called when the page loads and after each generation.
    """
    with gr.Accordion("OneDiff", open=True, elem_id=f"onediff_{tab}_accordion"):
        enabled = gr.Checkbox(True, label="Use OneDiff for this run", elem_id=f"onediff_{tab}_enabled")
        gr.HTML(status_line, elem_id=status_id(tab))
    return [enabled]


def refresh_after_generation(component: Any, tab: str, status_line: Callable[[], str]) -> None:
    """Renew the status line of a tab whenever component, just created by the host, tells of new pictures."""
    if component.elem_id != CHANGES_AFTER_GENERATION.format(tab=tab):
        return
    status = find_component(status_id(tab))
    if status is not None:
        component.change(status_line, inputs=[], outputs=[status], show_progress="hidden", api_name=False)


def status_id(tab: str) -> str:
    return f"onediff_{tab}_status"


def find_component(elem_id: str) -> Any | None:
    """The component of this id on the page that is being built."""
    from gradio.context import Context

    blocks = Context.root_block.blocks.values() if Context.root_block else ()
    return next((block for block in blocks if getattr(block, "elem_id", None) == elem_id), None)
