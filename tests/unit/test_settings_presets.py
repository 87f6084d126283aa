"""Presets set what the fields of Settings say, adapted to the checkpoint; the user's own survive being written."""
from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.options import presets
from lib_onediff.options.preset_data import BALANCED, DISTANCES, DRAFTS, PRESETS, PROFILES, QUALITY, SPEED
from lib_onediff.options.presets import (
    AS_IN_SETTINGS,
    all_presets,
    name_of,
    parse,
    preset_options,
    profile_of,
    values_of,
    with_defaults,
    with_own,
    with_preset,
    without_own,
)
from lib_onediff.options.settings import Settings, option

# A name that Settings does not have yet, and may get: no preset may be wrong about one that it has.
PLANNED = {
    "matmul_accumulation", "convolution_accumulation", "reduced_precision_reduction", "tf32", "vae_precision",
    "low_bit", "deepcache_interval",
}


def check_even(number: int) -> None:
    if number % 2:
        raise ValueError("odd")


@dataclass(frozen=True)
class More(Settings):
    """Settings with options of every kind, under names that presets use and under others."""

    deepcache_interval: int = option(1, "a", "b", per_run=True)
    tf32: str = option("auto", "a", "b", choices=("auto", "on", "off"), per_run=True)
    bright: bool = option(False, "a", "b", per_run=True)
    vae_precision: str = option("auto", "a", "b", choices=("auto", "fp16", "bf16", "fp32"), per_run=True)
    even: int = option(2, "a", "b", check=check_even, per_run=True)
    share: float = option(0.5, "a", "b", per_run=True)
    folder: str = option("", "a", "b")


ALL = ("deepcache_interval", "tf32", "low_bit", "bright", "vae_precision", "even", "share")
DEFAULTS = {name: getattr(More(), name) for name in ALL}


def test_what_changes_images_names_its_distance_and_the_page_the_same() -> None:
    page = (Path(__file__).parents[2] / ".readme" / "presets.md").read_text(encoding="utf-8")
    for preset in PRESETS:
        if preset.values:
            assert f"(distance {DISTANCES[preset.name]})" in preset.explanation
            assert re.search(rf"^\| {preset.name} \|.*\| {DISTANCES[preset.name]} \|$", page, re.MULTILINE)


def own_options(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.__dict__.items() if name in ALL}


def test_which_options_presets_set_is_derived() -> None:
    names = list(preset_options(More))
    assert set(ALL) <= set(names)
    assert {"enabled", "backend", "verify", "folder", "memory_budget", "cache_folder"}.isdisjoint(names)


def test_the_built_in_names_and_values_are_sound() -> None:
    """What is an option of Settings must be one that a preset may set, at a value that it takes."""
    options, known = preset_options(Settings), {field.name for field in fields(Settings)}
    given = [preset.values for preset in PRESETS]
    given += [changes for profile in PROFILES for changes in profile.changes.values()]
    for values in given:
        for name, value in values.items():
            assert name in known | PLANNED, name
            assert name not in known or presets.is_valid(options[name], value), (name, value)
    assert [preset.name for preset in PRESETS] == [QUALITY, BALANCED, SPEED, DRAFTS]
    for profile in PROFILES:
        assert set(profile.changes) <= {preset.name for preset in PRESETS} and profile.reason.endswith(".")
        assert all(mark.isalnum() and mark == mark.lower() for mark in profile.marks)


def test_quality_first_is_every_default() -> None:
    changed = More(backend="eager", deepcache_interval=5, bright=True, share=0.1, memory_budget=7)
    best = with_preset(changed, QUALITY)
    assert own_options(best) == DEFAULTS
    assert (best.backend, best.memory_budget) == ("eager", 7), "what is no preset's stays"


def test_a_preset_sets_what_it_names_and_resets_the_rest() -> None:
    fast = with_preset(More(share=0.1), SPEED)
    assert own_options(fast) == {
        **DEFAULTS, "deepcache_interval": 3, "tf32": "on", "low_bit": "int8", "vae_precision": "fp16",
    }
    assert name_of(fast) == SPEED and name_of(More()) == QUALITY and name_of(replace(fast, even=4)) is None
    assert own_options(with_preset(fast, BALANCED)) == {**DEFAULTS, "deepcache_interval": 2}


def test_on_settings_as_they_are() -> None:
    for preset in PRESETS:
        assert type(with_preset(Settings(), preset.name)) is Settings
        assert name_of(with_preset(Settings(), preset.name)) is not None


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="'fastest'. Choose from Quality first, Balanced, Speed first, Fast drafts, x"):
        with_preset(More(), "fastest", own="x: tf32 on")


@pytest.mark.parametrize(("name", "value"), [
    ("nonsense", 1), ("backend", "eager"), ("folder", "/"), ("deepcache_interval", "3"), ("deepcache_interval", True),
    ("tf32", "maybe"), ("bright", "on"), ("even", 3), ("share", 1),
])
def test_what_is_wrong_is_left_out(name: str, value: Any) -> None:
    assert with_defaults({name: value}, More) == DEFAULTS | with_defaults({}, More)


@pytest.mark.parametrize(("checkpoint", "profile"), [
    ("sd_xl_base_1.0.safetensors [31e35c80fc]", "SDXL base"),
    ("stabilityai/stable-diffusion-xl-base-1.0", "SDXL base"), ("sd_xl_base_1.0_0.9vae", "SDXL base"),
    ("playground-v2.5-1024px-aesthetic.fp16", "playground-v2.5"), ("playground2.5", "playground-v2.5"),
    ("sd_xl_turbo_1.0_fp16", "few-step checkpoints"), ("dreamshaperXL_lightningDPMSDE", "few-step checkpoints"),
    ("v2-1_768-ema-pruned", "SD 2.1"), ("v1-5-pruned-emaonly", None), ("juggernautXL_v9", None),
    ("hyperrealism_v3", None), ("", None),
])
def test_profiles(checkpoint: str, profile: str | None) -> None:
    found = profile_of(checkpoint)
    assert (found.name if found else None) == profile


def test_a_profile_changes_its_presets() -> None:
    fast = next(preset for preset in PRESETS if preset.name == SPEED)
    usual, base = (values_of(fast, More, name) for name in ("", "sd_xl_base_1.0"))
    assert (usual["deepcache_interval"], base["deepcache_interval"]) == (3, 2)
    assert (usual["vae_precision"], base["vae_precision"], base["low_bit"]) == ("fp16", "auto", "off")
    assert with_preset(More(), BALANCED, checkpoint="playground-v2.5-1024px").deepcache_interval == 3
    assert with_preset(More(), SPEED, checkpoint="sdxl_turbo").deepcache_interval == 1
    assert with_preset(More(), QUALITY, checkpoint="sd_xl_base_1.0") == More()
    assert name_of(with_preset(More(), SPEED, checkpoint="sdxl_turbo"), checkpoint="sdxl_turbo") == SPEED


# --- the user's own ---------------------------------------------------------------------------------------------------


def test_own_presets_are_read_as_they_were_written() -> None:
    drafts = More(deepcache_interval=4, bright=True, share=0.25, backend="eager")
    own = with_own("", "my drafts", drafts)
    assert parse(own) == {"my drafts": {"deepcache_interval": "4", "bright": "on", "share": "0.25"}}
    own = with_own(own, "careful (tf32 = off)", More(tf32="off"))
    assert list(all_presets(More(), own)) == [QUALITY, BALANCED, SPEED, DRAFTS, "my drafts", "careful (tf32 = off)"]
    assert with_preset(More(even=4), "my drafts", own) == replace(drafts, backend="auto")
    assert with_preset(drafts, "careful (tf32 = off)", own) == More(tf32="off", backend="eager")
    assert name_of(More(tf32="off"), own) == "careful (tf32 = off)"
    own = with_own(own, "my drafts", More(deepcache_interval=2))
    assert parse(own)["my drafts"] == {"deepcache_interval": "2"}
    assert without_own(without_own(own, "my drafts"), "careful (tf32 = off)") == ""
    assert without_own(own, "nobody's") == own
    assert with_preset(drafts, "plain", with_own("", "plain", More())) == More(backend="eager")


def test_own_presets_of_another_version() -> None:
    own = "older: gone_option 3; tf32 on; bright perhaps; even 3"
    assert own_options(with_preset(More(), "older", own)) == {**DEFAULTS, "tf32": "on"}
    assert "older: gone_option 3" in with_own(own, "x", More()), "what this version does not know is kept"


@pytest.mark.parametrize(("own", "says"), [
    ("drafts", "a colon"), (": tf32 on", "up to 60 characters"), ("x: tf32", "'tf32' has no value"),
    ("x: tf32 on, x: tf32 off", "two presets called 'x'"), (f"{SPEED}: tf32 on", "a name of OneDiff's own"),
    ("y" * 61 + ": tf32 on", "up to 60 characters"), ("a;b: tf32 on", "none of"),
])
def test_what_cannot_be_read_is_said(own: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(own)
    assert list(all_presets(More(), own)) == [QUALITY, BALANCED, SPEED, DRAFTS], "and costs nobody the built-in ones"


@pytest.mark.parametrize("own", ["", "  ", ",", " , , ", "x:", "x: ;; tf32 on ;"])
def test_what_can_be_read(own: str) -> None:
    assert set(parse(own)) <= {"x"}


@pytest.mark.parametrize("name", ["", "a,b", "a:b", "a;b", QUALITY, AS_IN_SETTINGS, "n" * 61])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError):
        with_own("", name, More())
