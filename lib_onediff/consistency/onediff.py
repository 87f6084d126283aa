"""What of OneDiff decides about the last digits of an image."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..ops.inductor.artifact import IN_STORE
from ..options.settings import Settings
from .report import Facts, as_fact

DIGITS = 12


def onediff_facts(settings: Settings, status: Mapping[str, Any], tuned: Mapping[str, Any]) -> Facts:
    """Our settings, how the last image was made (runtime.status()), and what was tuned on this machine."""
    # No two machines compile to the same bytes.
    tuned = {name: value for name, value in tuned.items() if not name.startswith(IN_STORE)}
    return {
        "OneDiff": {
            "Backend in use": as_fact(status.get("backend")), "Route of the last call": as_fact(status.get("route")),
            "Tuned choices": digest(tuned),
        },
        "OneDiff settings": {
            option.name: as_fact(getattr(settings, option.name)) for option in fields(Settings)
        },
    }


def digest(choices: Mapping[str, Any]) -> str:
    """How many choices there are, and a hash that is equal where all of them are."""
    if not choices:
        return "none"
    text = json.dumps(dict(choices), sort_keys=True, default=str)
    return f"{len(choices)}, {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"
