"""The page of presets in the OneDiff tab."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ...options.preset_data import QUALITY
from ..cache.panel import ACTIONS, a_button, a_list, nothing_seen
from ..events import LIVE, QUIET, in_the_browser, kept_out_of_defaults
from .panel import PresetsPanel

ELEM_ID = "onediff_presets"
SHOW_IN_SETTINGS = "(values) => { window.onediffSettings.show(values); return []; }"
EXPLANATION = (
    "A preset chosen in the accordion holds for that picture and adapts to its checkpoint. <i>Use these settings</i> "
    "puts the values of this table into the settings tab, where they stay. Options that choose who computes (OneDiff, "
    "backend, check of the first use) are no preset's."
)


def build_presets_page(panel: PresetsPanel, opened: Callable[..., Any]) -> None:
    """The presets, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>Presets</h3>")
        checkpoint, table = markup("checkpoint"), markup("table")
        gr.HTML(f'<p class="onediff-reason">{EXPLANATION}</p>')
        with gr.Row(elem_classes=ACTIONS):
            chosen = a_list("Preset", panel.names(), QUALITY, "preset_chosen")
            use = a_button("Use these settings", "preset_use", variant="primary")
            delete = a_button("Delete", "preset_delete")
        with gr.Row(elem_classes=ACTIONS):
            name = kept_out_of_defaults(gr.Textbox(
                "", label="Name of a preset of your own", placeholder="my drafts", lines=1, max_lines=1, scale=1,
                min_width=140, elem_id="onediff_preset_name",
            ))
            save = a_button("Save the current settings", "preset_save")
        told = markup("told")
        to_show = nothing_seen()
    shown = [checkpoint, table, chosen, told, to_show]
    opened(panel.look, inputs=[], outputs=shown, queue=False, **QUIET)
    for event, handler, asked in (
        (use.click, panel.use, chosen), (delete.click, panel.delete, chosen), (save.click, panel.save, name),
        (name.submit, panel.save, name),
    ):
        done = event(handler, inputs=[asked], outputs=shown, queue=False, **QUIET)
        done.then(None, inputs=[to_show], outputs=[], api_name=False, **in_the_browser(SHOW_IN_SETTINGS))


def markup(name: str) -> gr.HTML:
    """A place for markup that changes."""
    return gr.HTML(elem_id=f"{ELEM_ID}_{name}", elem_classes=LIVE)
