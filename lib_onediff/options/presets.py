"""Presets: options that are set together, built in or the user's own, and adapted to the checkpoint.

Which options a preset sets is derived from the fields of settings.Settings: all that a generation may be given, but for
who computes and whether it is checked. What a preset does not name is at its default.

The user's own are kept as one option of the WebUI, in words: "my drafts: deepcache_interval 4; tf32 on, careful: tf32
off".
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from .deepcache_values import AS_FIRST, EARLY, OFF
from .option import check_value, did_you_mean, format_value, parse_value
from .preset_data import PRESETS, PROFILES, Preset, Profile

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SettingsLike = TypeVar("SettingsLike", bound="DataclassInstance")
# Where a preset can be chosen: none.
AS_IN_SETTINGS = "As in the settings"
# Who computes, and whether it is checked, changes no image.
NOT_OF_PRESETS = frozenset({"enabled", "backend", "verify"})
BETWEEN_PRESETS, AFTER_NAME, BETWEEN_VALUES = ",", ":", ";"
LONGEST_NAME = 60


def preset_options(settings: Any) -> dict[str, Field[Any]]:
    """The options that presets set, by name. settings: a settings.Settings, or its class."""
    return {
        option.name: option for option in fields(settings)
        if option.metadata["per_run"] and option.name not in NOT_OF_PRESETS
    }


def values_of(preset: Preset, settings: Any, checkpoint: str = "") -> dict[str, Any]:
    """Every option that presets set, with its value in this one. checkpoint: its name, whose profile counts."""
    profile = profile_of(checkpoint)
    changes = {} if profile is None else profile.changes.get(preset.name, {})
    return with_defaults({**preset.values, **changes}, settings)


def with_defaults(values: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """values, and the default of every other option that presets set; what is none, or is wrong, is left out."""
    options = preset_options(settings)
    kept = {name: value for name, value in values.items() if name in options and is_valid(options[name], value)}
    return {name: kept.get(name, option.default) for name, option in options.items()}


def is_valid(option: Field[Any], value: Any) -> bool:
    """Whether an option takes a value."""
    try:
        check_value(option, value)
    except ValueError:
        return False
    return True


def parse_values(words: Mapping[str, str], options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    """The values that words mean; what is no option, or no value of it, is left out."""
    values: dict[str, Any] = {}
    words = migrate_values(words)
    for name in options.keys() & words.keys():
        with contextlib.suppress(ValueError):
            values[name] = parse_value(options[name], words[name])
    return values


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


def with_preset(settings: SettingsLike, name: str, own: str = "", checkpoint: str = "") -> SettingsLike:
    """Settings with a preset's values. own: the user's own presets, in words; see the module.

    Raises ValueError with a sentence for a name that is none.
    """
    known = all_presets(settings, own, checkpoint)
    if name not in known:
        raise ValueError(f"OneDiff has no preset {name!r}.{did_you_mean(name, known)}")
    return replace(settings, **known[name])


def all_presets(settings: Any, own: str = "", checkpoint: str = "") -> dict[str, dict[str, Any]]:
    """The values of every preset by its name, the built-in first. What is wrong with own is left out."""
    known = {preset.name: values_of(preset, settings, checkpoint) for preset in PRESETS}
    try:
        written = parse(own)
    except ValueError:
        written = {}
    options = preset_options(settings)
    for name, words in written.items():
        known[name] = with_defaults(parse_values(words, options), settings)
    return known


def name_of(settings: Any, own: str = "", checkpoint: str = "") -> str | None:
    """The preset that settings are; None if they are none."""
    standing = {name: getattr(settings, name) for name in preset_options(settings)}
    return next((name for name, values in all_presets(settings, own, checkpoint).items() if values == standing), None)


def profile_of(checkpoint: str) -> Profile | None:
    """What is known of a checkpoint by its name; None for most."""
    plain = "".join(character for character in checkpoint.lower() if character.isalnum())
    return next((profile for profile in PROFILES if any(mark in plain for mark in profile.marks)), None)


# --- the user's own ---------------------------------------------------------------------------------------------------


def parse(own: str) -> dict[str, dict[str, str]]:
    """The user's own presets: of each name the words of its options. Raises ValueError with a sentence.

    Options are not looked up: an older or a newer OneDiff may have had others.
    """
    found: dict[str, dict[str, str]] = {}
    for part in own.split(BETWEEN_PRESETS):
        if not part.strip():
            continue
        name, colon, words = part.partition(AFTER_NAME)
        name = name.strip()
        if not colon:
            raise ValueError(f"A preset is a name, a colon and its options, such as 'sketches: tf32 on', not {name!r}.")
        check_name(name)
        if name in found:
            raise ValueError(f"There are two presets called {name!r}.")
        found[name] = {}
        for pair in filter(None, (pair.strip() for pair in words.split(BETWEEN_VALUES))):
            option, _, value = pair.partition(" ")
            if not value.strip():
                raise ValueError(f"Preset {name!r}: {option!r} has no value; write such as 'tf32 on'.")
            found[name][option] = value.strip()
    return found


def check_name(name: str) -> None:
    """Raise ValueError with a sentence for what cannot be the name of a preset of the user's own."""
    marks = BETWEEN_PRESETS + AFTER_NAME + BETWEEN_VALUES
    if not name or len(name) > LONGEST_NAME or any(mark in name for mark in marks):
        raise ValueError(
            f"A preset's name has up to {LONGEST_NAME} characters and none of , : ; among them, unlike {name[:80]!r}."
        )
    if name in {AS_IN_SETTINGS, *(preset.name for preset in PRESETS)}:
        raise ValueError(f"{name!r} is a name of OneDiff's own; take another one.")


def written(presets: Mapping[str, Mapping[str, str]]) -> str:
    """What parse() reads."""
    return f"{BETWEEN_PRESETS} ".join(
        f"{name}{AFTER_NAME} {f'{BETWEEN_VALUES} '.join(f'{option} {word}' for option, word in words.items())}".rstrip()
        for name, words in presets.items()
    )


def with_own(own: str, name: str, settings: Any) -> str:
    """own, with these settings as the preset of this name; one of the same name goes. Raises ValueError."""
    check_name(name)
    values = {option: getattr(settings, option) for option in preset_options(settings)}
    return written({**parse(own), name: differing(values, settings)})


def differing(values: Mapping[str, Any], settings: Any) -> dict[str, str]:
    """In words, the values that are not the defaults. settings: a settings.Settings, or its class."""
    options = preset_options(settings)
    return {name: format_value(value) for name, value in values.items() if value != options[name].default}


def without_own(own: str, name: str) -> str:
    """own, without the preset of this name."""
    return written({other: values for other, values in parse(own).items() if other != name})
