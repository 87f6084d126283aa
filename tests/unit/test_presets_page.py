"""The Presets page of the OneDiff tab: what it shows, and what its buttons do to the settings."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.demo.modules.options import OptionInfo, Options
from lib_onediff.options.preset_data import BALANCED, DRAFTS, PRESETS, PROFILES, QUALITY, SPEED
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import settings_tab
from lib_onediff.ui.presets import PresetsPanel, build_presets_page, checkpoint_html, presets_html


class Page:
    """The panel with the standalone host's options, and what it shows."""

    def __init__(self, folder: Path, checkpoint: str = "") -> None:
        self.opts, self.file = Options({}), folder / "config.json"
        self.checkpoint = checkpoint
        settings_tab.add_options(self.opts, OptionInfo, lambda: None)
        self.panel = PresetsPanel(lambda: runtime.settings, lambda: self.checkpoint, self.store)

    def store(self, values: Any) -> list[str]:
        return settings_tab.store(self.opts, values, str(self.file))

    def after(self, shown: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
        """What is told, and what the settings tab has to show now."""
        _, table, choices, told, to_show, *_ = shown
        assert choices["choices"] == self.panel.names()
        assert all(f'<th scope="row">{name}' in table for name in (QUALITY, BALANCED, SPEED, DRAFTS))
        return told, json.loads(to_show or "{}")

    def saved(self) -> dict[str, Any]:
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


def test_use(page: Page) -> None:
    told, to_show = page.after(page.panel.use(BALANCED))
    assert "The settings are those of &#x27;Balanced&#x27; now. Changed: DeepCache interval." in told
    assert runtime.settings == Settings(deepcache_interval=2)
    assert page.saved()["onediff_deepcache_interval"] == 2
    assert to_show["onediff_deepcache_interval"] == 2 and "onediff_backend" not in to_show
    assert "were those of" in page.after(page.panel.use(BALANCED))[0]


def test_use_adapts_to_the_checkpoint(page: Page) -> None:
    page.checkpoint = "playground-v2.5-1024px"
    page.panel.use(BALANCED)
    assert runtime.settings.deepcache_interval == 3


def test_use_keeps_who_computes(page: Page) -> None:
    page.opts.set("onediff_backend", "eager")
    page.opts.set("onediff_enabled", False)
    told, _ = page.after(page.panel.use(SPEED))
    assert "OneDiff is switched off in the settings (" in told
    assert runtime.settings.backend == "eager" and not runtime.settings.enabled


def test_save_use_and_delete_an_own_one(page: Page) -> None:
    page.opts.set("onediff_deepcache_interval", 4)
    told, to_show = page.after(page.panel.save("  my drafts "))
    assert "Saved &#x27;my drafts&#x27;: deepcache_interval 4." in told
    assert to_show == {"onediff_own_presets": "my drafts: deepcache_interval 4"}
    assert page.saved()["onediff_own_presets"] == runtime.settings.own_presets == to_show["onediff_own_presets"]
    page.opts.set("onediff_tf32", "on")
    assert "in place of the one before: tf32 on; deepcache_interval 4." in page.after(page.panel.save("my drafts"))[0]
    page.panel.use(QUALITY)
    page.opts.set("onediff_deepcache_interval", 5)
    page.panel.save("plain")
    page.panel.use("my drafts")
    assert (runtime.settings.tf32, runtime.settings.deepcache_interval) == ("on", 4)
    told, to_show = page.after(page.panel.delete("my drafts"))
    assert "Deleted &#x27;my drafts&#x27;, which was: tf32 on; deepcache_interval 4." in told
    assert to_show == {"onediff_own_presets": "plain: deepcache_interval 5"}
    assert page.panel.names()[len(PRESETS):] == ["plain"]
    assert runtime.settings.deepcache_interval == 4, "the settings stay"


def test_deleting_asks_first(page: Page) -> None:
    page.opts.set("onediff_deepcache_interval", 4)
    page.panel.save("my drafts")
    *_, question, row = page.panel.ask_delete("my drafts")
    assert "Delete &#x27;my drafts&#x27;?" in question and "deepcache_interval 4" in question and row["visible"]
    assert "my drafts" in page.panel.names(), "nothing is gone before the answer"
    *_, question, row = page.panel.look()
    assert question == "" and not row["visible"]
    *_, told, _, question, row = page.panel.ask_delete(SPEED)
    assert "only your own can be deleted" in told and not question and not row["visible"]


@pytest.mark.parametrize("interval, equal", [(1, QUALITY), (2, BALANCED), (4, "mine")])
def test_equal_presets_are_refused(page: Page, interval: int, equal: str) -> None:
    page.opts.set("onediff_deepcache_interval", 4)
    page.panel.save("mine")
    page.opts.set("onediff_deepcache_interval", interval)
    told, to_show = page.after(page.panel.save("again"))
    assert f"&#x27;{equal}&#x27; has these settings already." in told and "onediff-wrong" in told and not to_show
    assert "again" not in page.panel.names()


@pytest.mark.parametrize(("button", "name", "says"), [
    ("use", "Fastest", "no preset called"), ("use", None, "Choose from Quality first, "),
    ("use", ["x"], "no preset called"),
    ("delete", SPEED, "only your own can be deleted"), ("delete", "", "Choose from Quality first, "),
    ("save", " ", "needs a name"), ("save", "a:b", "none of , : ;"), ("save", SPEED, "a name of OneDiff"),
    ("save", "x" * 61, "up to 60 characters"),
])
def test_refusals(page: Page, button: str, name: Any, says: str) -> None:
    before = dict(page.opts.data)
    told, to_show = page.after(getattr(page.panel, button)(name))
    assert says in told and "onediff-wrong" in told and to_show == {}
    assert page.opts.data == before and not page.file.exists()


def test_what_cannot_be_saved_is_said(page: Page) -> None:
    page.file.mkdir()
    told, _ = page.after(page.panel.use(BALANCED))
    assert "hold until the WebUI ends" in told and "onediff-wrong" in told
    assert runtime.settings.deepcache_interval == 2


def test_the_table() -> None:
    found = presets_html({QUALITY: {}, "<mine>": {"tf32": "on", "deepcache_interval": 4}}, "<mine>")
    assert "&lt;mine&gt;" in found and "<mine>" not in found
    assert "<code>tf32 on</code>" in found and "<code>deepcache_interval 4</code>" in found
    assert "every option at its default" in found and PRESETS[0].explanation.replace("'", "&#x27;") in found
    assert found.count("in force</span>") == 1 and found.index("in force") > found.index("&lt;mine&gt;")


@pytest.mark.parametrize(("checkpoint", "says"), [
    ("", "No checkpoint is loaded"), ("v1-5 <b>", "<b>v1-5 &lt;b&gt;</b>: nothing special is known of it"),
    ("sd_xl_turbo", "Balanced, Speed first and Fast drafts differ from the usual"),
    ("playground-v2.5", "Balanced differs from the usual"),
])
def test_the_checkpoints_profile(checkpoint: str, says: str) -> None:
    assert says in checkpoint_html(checkpoint)


def test_every_profile_gives_its_reason() -> None:
    for profile in PROFILES:
        found = checkpoint_html(profile.marks[0])
        assert profile.name in found and profile.reason.split(":")[0] in found


def test_it_is_built(page: Page) -> None:
    with gradio.Blocks() as built, gradio.Tab("Presets") as tab:
        build_presets_page(page.panel, tab.select)
    ids = {getattr(block, "elem_id", None) for block in built.blocks.values()}
    assert {"onediff_preset_chosen", "onediff_preset_use", "onediff_preset_delete", "onediff_preset_save",
            "onediff_preset_name", "onediff_presets_table", "onediff_presets_told"} <= ids
