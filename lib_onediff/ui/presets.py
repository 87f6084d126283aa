"""Four presets: options that are set together, from exact to fastest.

A preset sets every option that can change an image; those that it does not name get their defaults. It does not set
whether OneDiff is used, nor the backend.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, replace
from typing import Any

from ..core.settings import Settings, did_you_mean, options_of_a_run

# In the list of presets, this choice means no preset.
AS_IN_SETTINGS = "As in the settings"
EXACT = "Exact"
BALANCED = "Balanced"
FAST = "Fast"
DRAFT = "Draft"
# The options of a run that presets leave as they are.
NOT_OF_PRESETS = frozenset({"enabled", "backend"})
# Options that compute each layer faster and less precisely, independent of those that skip steps.
FASTER_LAYERS: Mapping[str, Any] = {
    "low_bit": "int8", "accumulation": "half", "vae_precision": "fp16",
}


@dataclass(frozen=True)
class Preset:
    """Options that are set together.

    name: for users. images: a clause for users on how its images differ from the WebUI's.
    seconds: the duration of one image of SDXL at 1024x1024 on an H100, as measured in .readme/measurements.md.
    values: the options that the preset sets to another value than their default, by name.
    """

    name: str
    images: str
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """A sentence for users: the preset's measured speed as a multiple of Exact's, on which card, and how its images
        differ; for Exact only the latter."""
        if self.name == EXACT:
            return f"{self.images}."
        return f"{PRESETS[EXACT].seconds / self.seconds:.1f}x as fast as Exact with SDXL on an H100; {self.images}."

    @property
    def all_values(self) -> dict[str, Any]:
        """The preset's values of all options that presets set (preset_options), by name."""
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
    """The fields of Settings that every preset sets, by name: all options of a run except NOT_OF_PRESETS."""
    return {name: option for name, option in options_of_a_run().items() if name not in NOT_OF_PRESETS}


def preset_of(name: str) -> Preset:
    """The preset with this name; upper and lower case do not matter. Raises ValueError with a sentence for an unknown
    name."""
    found = PRESETS.get(name.capitalize())
    if found is None:
        raise ValueError(f"OneDiff has no preset {name!r}.{did_you_mean(name, PRESETS)}")
    return found


def with_preset(settings: Settings, name: str) -> Settings:
    """New settings: all options that presets set have this preset's values, and the others stay. name: see preset_of.
    Raises ValueError with a sentence for an unknown one."""
    return replace(settings, **preset_of(name).all_values)
