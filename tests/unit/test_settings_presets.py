"""The four presets."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib_onediff.core.settings import Settings
from lib_onediff.ui.presets import FORMER_NAMES, PRESETS, WEBUI_SECONDS, preset_of, with_preset

PAGE = (Path(__file__).parents[2] / ".readme" / "presets.md").read_text(encoding="utf-8")


def test_the_documentation_names_what_was_measured() -> None:
    assert f"the WebUI's own takes {WEBUI_SECONDS} s" in PAGE.replace("\n", " ")
    for preset in PRESETS.values():
        assert re.search(rf"^\| {preset.name} \|.*\| {preset.seconds:.2f} s", PAGE, re.M)
        assert all(f"`{name} {value}`" in PAGE for name, value in preset.values.items())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_names_and_resets_the_rest(name: str) -> None:
    before = Settings(backend="eager", memory_budget=7, guidance_end=0.5, deepcache_interval=9, vae_precision="bf16")
    assert with_preset(before, name) == Settings(backend="eager", memory_budget=7, **PRESETS[name].values)


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_former_names_are_understood(former: str, name: str) -> None:
    assert preset_of(former) is PRESETS[name]
