"""The four presets, and the page that puts one into the settings."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")


from lib_onediff.demo.modules.options import OptionInfo, Options
from lib_onediff.options.presets import (
    BALANCED,
    FORMER_NAMES,
    PRESETS,
    preset_in_force,
    preset_of,
    with_preset,
)
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import settings_tab
from lib_onediff.ui.presets import PresetsPanel

DOCUMENTATION = Path(__file__).parents[2] / ".readme"


def test_the_page_and_the_documentation_name_what_was_measured() -> None:
    page = (DOCUMENTATION / "presets.md").read_text(encoding="utf-8")
    for preset in PRESETS.values():
        assert f"{preset.seconds} s an image, distance {preset.distance:g}." in preset.explanation
        assert re.search(rf"^\| {preset.name} \|.*\| {preset.seconds:.2f} s.*\| {preset.distance:g} \|$", page, re.M)
        assert all(f"`{name} {value}`" in page for name, value in preset.values.items())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_names_and_resets_the_rest(name: str) -> None:
    before = Settings(backend="eager", memory_budget=7, guidance_end=0.5, deepcache_interval=9, vae_precision="bf16")
    made = with_preset(before, name)
    assert made == Settings(backend="eager", memory_budget=7, **PRESETS[name].values)
    assert preset_in_force(made) == name and preset_in_force(before) == ""


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_former_names_are_understood(former: str, name: str) -> None:
    assert preset_of(former) is PRESETS[name]


# --- the page ---------------------------------------------------------------------------------------------------------


class Page:
    """The panel with the standalone host's options."""

    def __init__(self, folder: Path) -> None:
        self.opts, self.file = Options({}), folder / "config.json"
        settings_tab.add_options(self.opts, OptionInfo, lambda: None)
        self.panel = PresetsPanel(lambda: runtime.settings, self.store)

    def store(self, values: Any) -> list[str]:
        return settings_tab.store(self.opts, values, str(self.file))


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


@pytest.mark.parametrize("name", ["Fastest", None, ["x"]])
def test_a_name_that_is_none(page: Page, name: Any) -> None:
    _, told, to_show = page.panel.use(name)
    assert "no preset" in told and "onediff-wrong" in told and to_show == "" and not page.file.exists()


def test_what_cannot_be_saved_is_said(page: Page) -> None:
    page.file.mkdir()
    assert "hold until the WebUI ends" in page.panel.use(BALANCED)[1]
    assert runtime.settings.deepcache_interval == 3
