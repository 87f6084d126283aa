"""The presets in the OneDiff tab, as markup."""
from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from ...options.preset_data import PRESETS
from ...options.presets import differing, profile_of
from ...options.settings import Settings
from ..cache.table import heading, table_cells

COLUMNS = ("Preset", "What it is for", "What it sets")
OWN = "Your own."
EVERYTHING_AT_ITS_DEFAULT = "every option at its default"
EXPLANATIONS = {preset.name: preset.explanation for preset in PRESETS}


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
    cells = html.escape(EXPLANATIONS.get(name, OWN)), sets or EVERYTHING_AT_ITS_DEFAULT
    return f'<tr><th scope="row">{html.escape(name)}{standing if in_force else ""}</th>{table_cells(cells)}</tr>'


def words_of(values: Mapping[str, Any]) -> list[str]:
    """What a preset sets that is not the default, each as infotext writes it."""
    return [f"{name} {word}" for name, word in differing(values, Settings).items()]


def checkpoint_html(checkpoint: str) -> str:
    """Which checkpoint the presets are adapted to, and why. checkpoint: its name."""
    if not checkpoint:
        return '<p class="onediff-reason">No checkpoint is loaded: these are the presets for most of them.</p>'
    name, profile = f"<b>{html.escape(checkpoint)}</b>", profile_of(checkpoint)
    if profile is None:
        return f'<p class="onediff-reason">{name}: nothing special is known of it.</p>'
    adapted = " and ".join(profile.changes)
    return (
        f'<p class="onediff-reason">{name} is one of {html.escape(profile.name)}. {html.escape(profile.reason)} '
        f"For it, {html.escape(adapted)} {'differ' if len(profile.changes) > 1 else 'differs'} from the usual.</p>"
    )
