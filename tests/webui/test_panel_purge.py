"""The OneDiff tab: pinning, and throwing away, which asks first."""
from __future__ import annotations

from typing import Any

import pytest
from webui_client import WebUI
from webui_page import show_tab
from webui_panel import (
    CONFIRM,
    KEEP,
    OUTCOME,
    PIN,
    PURGE,
    PURGE_ALL,
    PURGE_DISK,
    PURGE_MODEL,
    QUESTION,
    RELEASE,
    UNPIN,
    Panel,
    served,
)
from webui_prewarm import Prewarm

FILLED = "64x64", "72x64", "80x64"


@pytest.fixture
def filled(opened: Any, webui: WebUI) -> Panel:
    """The tab with three resolutions in it, ready and not pinned, and no other."""
    def fill() -> None:
        queue, rows = Prewarm(webui), webui.get("/onediff/v1/shapes")["rows"]
        usable = {row["resolution"] for row in rows if row["state"] in ("proved", "ready") and not row["pinned"]}
        others = {row["resolution"] for row in rows} - (usable & set(FILLED))
        if others:
            queue.forget(*others)
        missing = set(FILLED) - usable
        if missing:
            # A tab that sees jobs says what came of them, and that a second later, in the middle of a test.
            opened.choose_tab("txt2img")
            assert {job["state"] for job in queue.finish(queue.ask(", ".join(missing)))} == {"done"}
            shown.show()

    shown = Panel(opened)
    shown.start_over(fill)
    shown.wait_for_rows(*FILLED)
    return shown


def test_pin_and_unpin(filled: Panel) -> None:
    filled.select("64x64", "80x64")
    filled.click(PIN)
    filled.told("2 resolutions pinned.")
    pinned = lambda: {resolution for resolution, row in filled.rows().items() if "pinned" in row}  # noqa: E731
    filled.page.wait(lambda: pinned() == {"64x64", "80x64"}, "two marks", 20)
    assert sorted(filled.selected()) == ["64x64", "80x64"], "what is selected stays so when the table is drawn anew"
    filled.select("64x64", "80x64", "72x64")
    filled.click(UNPIN)
    filled.page.wait(lambda: pinned() == set(), "no marks", 20)


def test_purge_selected_asks_first(filled: Panel, webui: WebUI) -> None:
    filled.select("72x64")
    filled.click(PURGE)
    filled.told("Purge 1 resolution?", QUESTION)
    filled.click(KEEP)
    filled.told("Nothing was purged.")
    assert set(filled.rows()) == {"64x64", "72x64", "80x64"} and filled.enabled(PIN)
    filled.purge(PURGE, "Purge 1 resolution?", "1 resolution purged")
    filled.wait_for_rows("64x64", "80x64")
    assert not filled.page.driver.find_element("id", CONFIRM).is_displayed()
    filled.page.wait(lambda: not filled.enabled(PURGE), "buttons without a selection to wait for one", 10)
    host_before, before = webui.calls()["host"], served(webui)
    webui.txt2img(width=80, height=64)
    assert webui.calls()["host"] == host_before and served(webui) > before, "another one is ready still"


def test_purge_all(filled: Panel, webui: WebUI) -> None:
    """An empty table leaves nothing to purge or release."""
    def enabled() -> list[bool]:
        return [filled.enabled(button) for button in (PURGE_MODEL, PURGE_ALL, RELEASE)]

    filled.page.wait(lambda: enabled() == [True] * 3, "enabled buttons", 10)
    filled.purge(PURGE_ALL, "Purge all 3 resolutions?", "3 resolutions purged")
    filled.wait_for_rows()
    filled.page.wait(lambda: enabled() == [False] * 3, "disabled buttons", 10)
    before = served(webui)
    webui.txt2img()
    assert served(webui) >= before + 3


def test_purge_of_the_disk_leaves_what_is_ready(filled: Panel, webui: WebUI) -> None:
    filled.purge(PURGE_DISK, "what is ready stays ready", "")
    assert set(filled.rows()) == {"64x64", "72x64", "80x64"}
    host_before = webui.calls()["host"]
    webui.txt2img(width=72, height=64)
    assert webui.calls()["host"] == host_before


def test_release_memory_waits_for_the_picture(filled: Panel) -> None:
    page = filled.page
    show_tab(page, "txt2img")
    page.type("#txt2img_steps input[type=number]", 60)
    page.type("#txt2img_width input[type=number]", 128)
    page.click("txt2img_generate")
    filled.show()
    filled.click(RELEASE)
    filled.told("eleased", OUTCOME, 240)
    page.choose_tab("txt2img")
    assert "Seed: 11," in page.wait_for_text("html_info_txt2img", "Steps: 60,")
