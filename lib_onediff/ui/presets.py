"""The presets page: settings under a name, their table, and what its buttons do."""
from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from ..options.option import did_you_mean
from ..options.preset_data import PRESETS, QUALITY
from ..options.presets import all_presets, differing, name_of, profile_of, with_own, without_own
from ..options.settings import Settings, host_key
from . import texts
from .cache.table import heading, table_cells
from .events import (
    ACTIONS,
    DANGER,
    QUIET,
    a_button,
    a_list,
    a_text,
    forget_when_changed,
    in_the_browser,
    markup,
    nothing_seen,
)
from .progress import sentence
from .settings_tab import label_of

ELEM_ID = "onediff_presets"
SHOW_IN_SETTINGS = "(values) => { window.onediffSettings.show(values); return []; }"
COLUMNS = ("Preset", "What it is for", "What it sets")
EXPLANATIONS = {preset.name: preset.explanation for preset in PRESETS}
# What the page shows: the checkpoint, the table, the list, what came of a click, what the settings tab has to show now,
# what is asked before something is deleted, and the row that asks it.
Shown = tuple[Any, ...]
Store = Callable[[Mapping[str, Any]], list[str]]


def build_presets_page(panel: PresetsPanel, opened: Callable[..., Any]) -> None:
    """The presets, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>Presets</h3>")
        checkpoint, table = markup("presets_checkpoint"), markup("presets_table")
        gr.HTML(f'<p class="onediff-reason">{" ".join(texts.PRESETS_EXPLAINED)}</p>')
        with gr.Row(elem_classes=ACTIONS):
            chosen = a_list("Preset", panel.names(), QUALITY, "preset_chosen")
            use = a_button("Use these settings", "preset_use", variant="primary")
            delete = a_button("Delete", "preset_delete", elem_classes=DANGER, interactive=False)
        with gr.Row(elem_classes=[*ACTIONS, "onediff-confirm"], elem_id="onediff_preset_confirm", visible=False) as row:
            question = markup("preset_question")
            confirm = a_button("Delete it", "preset_delete_confirm", variant="stop")
            keep = a_button("Keep it", "preset_keep")
        with gr.Row(elem_classes=ACTIONS):
            name = a_text(
                "Name of a preset of your own", "preset_name", placeholder="my drafts", lines=1, max_lines=1, scale=1,
                min_width=140,
            )
            save = a_button("Save the current settings", "preset_save")
        told = markup("presets_told")
        to_show = nothing_seen()
    shown = [checkpoint, table, chosen, told, to_show, question, row]
    # Another preset is chosen: the question was about the one before.
    for event in (opened, chosen.input, keep.click):
        event(panel.look, inputs=[], outputs=shown, queue=False, **QUIET)
    chosen.change(panel.may_delete, inputs=[chosen], outputs=[delete], queue=False, **QUIET)
    delete.click(panel.ask_delete, inputs=[chosen], outputs=shown, queue=False, **QUIET)
    forget_when_changed([name], told)
    for event, handler, asked in (
        (use.click, panel.use, chosen), (confirm.click, panel.delete, chosen), (save.click, panel.save, name),
        (name.submit, panel.save, name),
    ):
        done = event(handler, inputs=[asked], outputs=shown, queue=False, **QUIET)
        done.then(panel.may_delete, inputs=[chosen], outputs=[delete], queue=False, **QUIET)
        done.then(None, inputs=[to_show], outputs=[], api_name=False, **in_the_browser(SHOW_IN_SETTINGS))


class PresetsPanel:
    """Shows presets, puts them into the settings, and keeps the user's own."""

    def __init__(self, standing: Callable[[], Settings], checkpoint: Callable[[], str], store: Store) -> None:
        """standing: the settings tab's. checkpoint: the name of the loaded one. store: sets options of the settings tab
        and keeps them, and tells which have changed; raises ValueError with a sentence."""
        self._standing, self._checkpoint, self._store = standing, checkpoint, store

    def names(self) -> list[str]:
        return list(self._presets())

    def look(self) -> Shown:
        """The page as it is now."""
        return self._shown("")

    def use(self, name: Any) -> Shown:
        """Put a preset into the settings."""
        name, known = str(name or ""), self._presets()
        if name not in known:
            return self._refused(texts.no_preset(name, did_you_mean(name, known)))
        return self._stored(known[name], lambda changed: texts.preset_used(
            name, [*map(label_of, changed)], self._standing().enabled,
        ))

    def save(self, name: Any) -> Shown:
        """Keep the settings as a preset of the user's own."""
        name, settings = str(name or "").strip(), self._standing()
        if not name:
            return self._refused(texts.NAME_FIRST)
        try:
            own = with_own(settings.own_presets, name, settings)
        except ValueError as problem:
            return self._refused(str(problem))
        equal = next((other for other in self._equal_to(settings) if other != name), None)
        if equal is not None:
            return self._refused(texts.preset_is_equal(equal))
        replaced = name in self._presets()
        told = texts.preset_saved(name, sets_of(self._values_in(own)[name]), replaced)
        return self._stored({"own_presets": own}, lambda changed: told)

    def ask_delete(self, name: Any) -> Shown:
        """Ask before a preset of the user's own is forgotten."""
        name = str(name or "")
        refusal = self._why_not_deleted(name)
        if refusal:
            return self._refused(refusal)
        return self._shown("", question=texts.delete_question(name, sets_of(self._presets()[name])))

    def may_delete(self, name: Any) -> Any:
        """The Delete button: there is nothing to delete about a preset that comes with OneDiff."""
        return gr.update(interactive=not self._why_not_deleted(str(name or "")))

    def _why_not_deleted(self, name: str) -> str:
        if name not in self._presets():
            return texts.no_preset(name, did_you_mean(name, self._presets()))
        if name in self._values_in(without_own(self._standing().own_presets, name)):
            return texts.preset_is_ours(name)
        return ""

    def delete(self, name: Any) -> Shown:
        """Forget a preset of the user's own."""
        name, known = str(name or ""), self._presets()
        refusal = self._why_not_deleted(name)
        if refusal:
            return self._refused(refusal)
        own = without_own(self._standing().own_presets, name)
        told = texts.preset_deleted(name, sets_of(known[name]))
        return self._stored({"own_presets": own}, lambda changed: told)

    # --- how it goes on -------------------------------------------------------------------------------------------

    def _presets(self) -> dict[str, dict[str, Any]]:
        return self._values_in(self._standing().own_presets)

    def _equal_to(self, settings: Settings) -> list[str]:
        """The presets that these settings are."""
        return [
            name for name, values in self._presets().items()
            if all(getattr(settings, option) == value for option, value in values.items())
        ]

    def _values_in(self, own: str) -> dict[str, dict[str, Any]]:
        return all_presets(Settings, own, self._checkpoint())

    def _stored(self, values: Mapping[str, Any], told: Callable[[list[str]], str]) -> Shown:
        """Store options. told: what to say then of those that have changed."""
        try:
            changed = self._store(values)
        except ValueError as problem:
            return self._refused(str(problem))
        return self._shown(sentence(told(changed)), json.dumps({host_key(name): values[name] for name in values}))

    def _refused(self, problem: str) -> Shown:
        return self._shown(sentence(problem, wrong=True))

    def _shown(self, told: str, to_show: str = "", question: str = "") -> Shown:
        presets, checkpoint = self._presets(), self._checkpoint()
        in_force = name_of(self._standing(), self._standing().own_presets, checkpoint)
        return (
            checkpoint_html(checkpoint), presets_html(presets, in_force), gr.update(choices=list(presets)), told,
            to_show, sentence(question), gr.update(visible=bool(question)),
        )


def sets_of(values: Mapping[str, Any]) -> str:
    """What a preset sets, in words."""
    return "; ".join(words_of(values)) or texts.DEFAULTS


def presets_html(presets: Mapping[str, Mapping[str, Any]], in_force: str | None) -> str:
    """The table. presets: the values of each by its name. in_force: the one that the settings are, if any."""
    head = "".join(map(heading, COLUMNS))
    body = "".join(row_html(name, values, name == in_force) for name, values in presets.items())
    return (
        '<div class="onediff-table onediff-wrapped" tabindex="0" role="region" aria-label="Presets">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def row_html(name: str, values: Mapping[str, Any], in_force: bool) -> str:
    standing = ' <span class="onediff-pin" title="The settings are those of this preset">in force</span>'
    sets = "; ".join(f"<code>{html.escape(words)}</code>" for words in words_of(values))
    cells = html.escape(EXPLANATIONS.get(name, texts.OWN_PRESET)), sets or texts.DEFAULTS
    return f'<tr><th scope="row">{html.escape(name)}{standing if in_force else ""}</th>{table_cells(cells)}</tr>'


def words_of(values: Mapping[str, Any]) -> list[str]:
    """What a preset sets that is not the default, each as infotext writes it."""
    return [f"{name} {word}" for name, word in differing(values, Settings).items()]


def checkpoint_html(checkpoint: str) -> str:
    """Which checkpoint the presets are adapted to, and why. checkpoint: its name."""
    if not checkpoint:
        return '<p class="onediff-reason">' + texts.NO_CHECKPOINT + "</p>"
    name, profile = f"<b>{html.escape(checkpoint)}</b>", profile_of(checkpoint)
    if profile is None:
        return f'<p class="onediff-reason">{name}: {texts.NOTHING_KNOWN}</p>'
    adapted = html.escape(texts.adapted(profile.name, profile.reason, list(profile.changes)))
    return f'<p class="onediff-reason">{name} {adapted}</p>'
