"""Four presets: options that are set together, from exact to fastest.

A preset sets every option that changes an image: what it does not name is at its default. It leaves alone the switch
and who computes.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, replace
from typing import Any

from ..core.settings import Settings, did_you_mean, options_of_a_run

# Where a preset can be chosen: none.
AS_IN_SETTINGS = "As in the settings"
EXACT = "Exact"
BALANCED = "Balanced"
FAST = "Fast"
DRAFT = "Draft"
NOT_OF_PRESETS = frozenset({"enabled", "backend"})
# What computes each layer faster than exactly, whichever steps are left out.
FASTER_LAYERS: Mapping[str, Any] = {
    "low_bit": "int8", "accumulation": "half", "vae_precision": "fp16",
}


@dataclass(frozen=True)
class Preset:
    """what: how its images differ. seconds: an image of SDXL 1024x1024 on an H100, see .readme/measurements.md.
    values: what differs from the options' defaults."""

    name: str
    what: str
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """One sentence with what was measured."""
        if self.name == EXACT:
            return f"{self.what}."
        return f"{PRESETS[EXACT].seconds / self.seconds:.1f}x as fast as Exact with SDXL on an H100; {self.what}."

    @property
    def all_values(self) -> dict[str, Any]:
        """Every option that presets set, with its value in this one."""
        return {name: self.values.get(name, option.default) for name, option in preset_options().items()}


# Measured as .readme/measurements.md says.
PRESETS = {preset.name: preset for preset in (
    Preset(EXACT, "The same images as without OneDiff", 0.98),
    Preset(BALANCED, "fine details differ", 0.46, {
        "deepcache_interval": 3, "deepcache_depth": 3, "transformer_interval": 2,
    }),
    Preset(FAST, "fine details differ, a little more than with Balanced", 0.40, {
        "deepcache_interval": 3, "transformer_interval": 3, **FASTER_LAYERS,
    }),
    Preset(DRAFT, "details differ, in some images clearly", 0.34, {
        "deepcache_interval": 5, "deepcache_depth": 2, "transformer_interval": 3, **FASTER_LAYERS,
    }),
)}


def preset_options() -> dict[str, Field[Any]]:
    """The options that presets set, by name: all that a run may be given, but for NOT_OF_PRESETS."""
    return {name: option for name, option in options_of_a_run().items() if name not in NOT_OF_PRESETS}


def preset_of(name: str) -> Preset:
    """The preset of a name, in any case of letters. Raises ValueError with a sentence."""
    found = PRESETS.get(name.capitalize())
    if found is None:
        raise ValueError(f"OneDiff has no preset {name!r}.{did_you_mean(name, PRESETS)}")
    return found


def with_preset(settings: Settings, name: str) -> Settings:
    """Settings with a preset's values. Raises ValueError with a sentence for an unknown name."""
    return replace(settings, **preset_of(name).all_values)
