"""What an earlier OneDiff has written, in today's options: stored settings, infotexts, calls of the API."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .deepcache_values import AS_FIRST, EARLY, OFF


def migrate_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, with values or words, as an earlier OneDiff wrote them, in today's."""
    values = migrate_low_bit(values)
    if values.get("deepcache_schedule") == "uneven":
        # Its center and power are gone.
        values["deepcache_schedule"] = EARLY
    if values.get("deepcache_hires") != "own values":
        return values
    # The hires pass had options of its own. An interval of 1, the default, means that every step is whole.
    own_interval = str(values.get("deepcache_hires_interval", 1))
    return {**values, "deepcache_hires": OFF if own_interval == "1" else AS_FIRST}


def migrate_low_bit(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with low_bit in the place of fp8, which was a switch of its own; low_bit counts where both are there.
    """
    values = dict(values)
    if "fp8" in values:
        switch = values.pop("fp8")
        meaning = {"True": "fp8", "on": "fp8", "False": "off", "off": "off"}
        values.setdefault("low_bit", meaning.get(str(switch), switch))
    return values
