"""The presets page: what each preset sets, and a button that puts one into the settings."""
from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from ..options.option import format_value
from ..options.presets import EXACT, PRESETS, Preset, preset_in_force, preset_of
from ..options.settings import Settings, host_key
from . import texts
from .cache.table import heading, table_cells
from .events import ACTIONS, QUIET, a_button, a_list, in_the_browser, markup, nothing_seen
from .progress import sentence
from .settings_tab import label_of

ELEM_ID = "onediff_presets"
SHOW_IN_SETTINGS = "(values) => { window.onediffSettings.show(values); return []; }"
COLUMNS = ("Preset", "What it does", "What it sets")
# Sets options of the settings tab and keeps them; returns the names of those that have changed. Raises ValueError with
# a sentence.
Store = Callable[[Mapping[str, Any]], list[str]]
# What the page shows: the table, what came of a click, and what the settings tab has to show now.
Shown = tuple[str, str, str]


def build_presets_page(panel: PresetsPanel, opened: Callable[..., Any]) -> None:
    """The presets, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>Presets</h3>")
        table = markup("presets_table")
        gr.HTML(f'<p class="onediff-reason">{" ".join(texts.PRESETS_EXPLAINED)}</p>')
        with gr.Row(elem_classes=ACTIONS):
            chosen = a_list("Preset", list(PRESETS), EXACT, "preset_chosen")
            use = a_button("Use these settings", "preset_use", variant="primary")
        told, to_show = markup("presets_told"), nothing_seen()
    shown = [table, told, to_show]
    opened(panel.look, inputs=[], outputs=shown, queue=False, **QUIET)
    used = use.click(panel.use, inputs=[chosen], outputs=shown, queue=False, **QUIET)
    used.then(None, inputs=[to_show], outputs=[], api_name=False, **in_the_browser(SHOW_IN_SETTINGS))


class PresetsPanel:
    """Shows the presets and puts them into the settings."""

    def __init__(self, standing: Callable[[], Settings], store: Store) -> None:
        """standing: the settings tab's."""
        self._standing, self._store = standing, store

    def look(self) -> Shown:
        """The page as it is now."""
        return presets_html(preset_in_force(self._standing())), "", ""

    def use(self, name: Any) -> Shown:
        """Put a preset into the settings."""
        try:
            values = preset_of(str(name or "")).all_values
            changed = self._store(values)
        except ValueError as problem:
            return self.look()[0], sentence(str(problem), wrong=True), ""
        told = texts.preset_used(name, [*map(label_of, changed)], self._standing().enabled)
        to_show = json.dumps({host_key(option): value for option, value in values.items()})
        return self.look()[0], sentence(told), to_show


def presets_html(in_force: str) -> str:
    """The table. in_force: the preset that the settings are; "" for none."""
    head = "".join(map(heading, COLUMNS))
    body = "".join(row_html(preset, preset.name == in_force) for preset in PRESETS.values())
    return (
        '<div class="onediff-table onediff-wrapped" tabindex="0" role="region" aria-label="Presets">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def row_html(preset: Preset, in_force: bool) -> str:
    standing = ' <span class="onediff-pin" title="The settings are those of this preset">in force</span>'
    sets = "; ".join(f"<code>{name} {format_value(value)}</code>" for name, value in preset.values.items())
    cells = html.escape(preset.explanation), sets or texts.DEFAULTS
    return f'<tr><th scope="row">{preset.name}{standing if in_force else ""}</th>{table_cells(cells)}</tr>'
