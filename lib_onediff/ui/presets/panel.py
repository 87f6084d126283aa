"""The handlers of the Presets page."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr

from ...options.presets import all_presets, name_of, with_own, without_own
from ...options.settings import Settings, host_key
from ..progress import sentence
from ..settings_tab import label_of
from .table import EVERYTHING_AT_ITS_DEFAULT, checkpoint_html, presets_html, words_of

# What the page shows: the checkpoint, the table, the list, what came of a click, what the settings tab has to show now.
Shown = tuple[Any, ...]
Store = Callable[[Mapping[str, Any]], list[str]]


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
            return self._refused(f"There is no preset called {name!r}; choose one from the list.")
        return self._stored(known[name], lambda changed: used(name, known[name], changed, self._standing().enabled))

    def save(self, name: Any) -> Shown:
        """Keep the settings as a preset of the user's own."""
        name, settings = str(name or "").strip(), self._standing()
        if not name:
            return self._refused("A preset needs a name: write it beside the button.")
        try:
            own = with_own(settings.own_presets, name, settings)
        except ValueError as problem:
            return self._refused(str(problem))
        replaced = name in self._presets()
        sets = sets_of(self._values_in(own)[name])
        told = f"Saved {name!r}{', in place of the one before' if replaced else ''}: {sets}."
        return self._stored({"own_presets": own}, lambda changed: told)

    def delete(self, name: Any) -> Shown:
        """Forget a preset of the user's own."""
        name, known = str(name or ""), self._presets()
        if name not in known:
            return self._refused(f"There is no preset called {name!r}; choose one from the list.")
        own = without_own(self._standing().own_presets, name)
        if name in self._values_in(own):
            return self._refused(f"{name!r} is a preset of OneDiff's; only your own can be deleted.")
        told = f"Deleted {name!r}, which was: {sets_of(known[name])}."
        return self._stored({"own_presets": own}, lambda changed: told)

    # --- how it goes on -------------------------------------------------------------------------------------------

    def _presets(self) -> dict[str, dict[str, Any]]:
        return self._values_in(self._standing().own_presets)

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

    def _shown(self, told: str, to_show: str = "") -> Shown:
        presets, checkpoint = self._presets(), self._checkpoint()
        in_force = name_of(self._standing(), self._standing().own_presets, checkpoint)
        return (
            checkpoint_html(checkpoint), presets_html(presets, in_force), gr.update(choices=list(presets)), told,
            to_show,
        )


def used(name: str, values: Mapping[str, Any], changed: list[str], enabled: bool) -> str:
    """What putting a preset into the settings has done."""
    if not changed:
        return f"The settings were those of {name!r} already."
    off = "" if enabled else " OneDiff itself is switched off in the settings tab."
    return f"The settings are those of {name!r} now. Changed: {', '.join(map(label_of, changed))}.{off}"


def sets_of(values: Mapping[str, Any]) -> str:
    """What a preset sets, in words."""
    return "; ".join(words_of(values)) or EVERYTHING_AT_ITS_DEFAULT
