"""The Presets page of the OneDiff tab, used as a user does."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI
from webui_page import (
    accordion,
    changed_options,
    choose_preset,
    make_picture,
    open_advanced,
    show_inner_page,
    show_settings,
    show_tab,
    told,
)
from webui_panel import Panel

LIST, USE, DELETE, NAME, SAVE = (f"onediff_preset_{name}" for name in ("chosen", "use", "delete", "name", "save"))
TABLE, TOLD, CHECKPOINT = (f"onediff_presets_{name}" for name in ("table", "told", "checkpoint"))
PAGE = "onediff_presets"
OWN, FIRST = "my drafts", "Quality first"


class Presets(Panel):
    """The Presets page of an open page."""

    def show(self) -> None:
        show_inner_page(self.page, "Presets")
        self.page.wait(lambda: self.rows(), "the presets", 20)

    def start_over(self) -> None:
        """Show the page anew, with nothing chosen and nothing said of what an earlier test has clicked."""
        show_inner_page(self.page, "Cache")
        self.show()
        self.page.wait(lambda: self.in_force() == ["Quality first"] and len(self.rows()) == 4, "the four presets", 20)
        if self.page.run("return document.querySelector(arguments[0]).value", f"#{LIST} input") not in ("", FIRST):
            self.choose(LIST, FIRST)
        self.save(" ")

    def rows(self) -> dict[str, str]:
        """Name to the rest of its row."""
        return dict(self.page.run(
            f"return [...document.querySelectorAll('#{TABLE} tbody tr')]"
            ".map(row => [row.cells[0].firstChild.textContent.trim(), row.innerText])"
        ))

    def in_force(self) -> list[str]:
        return [name for name, row in self.rows().items() if "in force" in row]

    def use(self, name: str) -> str:
        self.choose(LIST, name)
        self.click(USE)
        return self.told("The settings", TOLD)

    def save(self, name: str) -> str:
        self.page.type(f"#{NAME} textarea, #{NAME} input", name)
        self.click(SAVE)
        return self.told("preset" if not name.strip() else "Saved", TOLD)


@pytest.fixture
def presets(opened: Any, webui: WebUI) -> Iterator[Presets]:
    """The page, with every option of a preset at its default, now and afterwards."""
    standing = {
        "onediff_own_presets": "", "onediff_tf32": "auto", "onediff_deepcache_interval": 1, "onediff_low_bit": "off",
        "onediff_vae_precision": "auto", "onediff_matmul_accumulation": "full",
        "onediff_convolution_accumulation": "full", "onediff_reduced_precision_reduction": "auto",
    }
    webui.set_options(**standing)
    shown = Presets(opened)
    shown.start_over()
    yield shown
    webui.set_options(**standing)


def run_says(webui: WebUI) -> str:
    """What a run of another client is made with."""
    return webui.txt2img().info["infotexts"][0].partition("OneDiff: ")[2].partition(",")[0].strip()


def shown_in_settings(page: Any, name: str) -> str:
    """What the settings tab shows of a number or a choice."""
    return page.run(
        "const at = document.getElementById(arguments[0]); const radio = at.querySelector('input[type=radio]:checked');"
        "return (radio || at.querySelector('input[type=number], textarea, input')).value", f"setting_onediff_{name}",
    )


def test_what_it_shows(presets: Presets) -> None:
    rows = presets.rows()
    assert list(rows) == ["Quality first", "Balanced", "Speed first", "Fast drafts"]
    assert "deepcache_interval 2" in rows["Balanced"] and "about twice as fast" in rows["Balanced"]
    assert presets.in_force() == ["Quality first"]
    assert "nothing special is known of it" in presets.page.text(CHECKPOINT)


def test_use_these_settings(presets: Presets, webui: WebUI) -> None:
    """They hold for every picture, and the settings tab, open all the while, shows them and keeps them when applied."""
    presets.page.open(webui.url)  # The settings tab shows what was so when the page was opened.
    presets.show()
    assert "Changed: DeepCache interval." in presets.use("Balanced")
    assert presets.in_force() == ["Balanced"] and run_says(webui) == "on; deepcache_interval 2"
    page = presets.page
    assert shown_in_settings(page, "deepcache_interval") == "2"
    presets.use("Speed first")
    presets.page.wait(lambda: presets.in_force() == ["Speed first"], "its mark", 10)
    assert (shown_in_settings(page, "vae_precision"), shown_in_settings(page, "tf32")) == ("fp16", "on")
    show_settings(page)
    page.find("#settings_submit").click()
    page.wait_for_text("settings_result", "settings changed", 20) if not webui.is_standalone else page.wait_for_text(
        "settings_result", "No setting changed", 20)
    assert "deepcache_interval 3" in run_says(webui)
    presets.show()
    presets.use("Quality first")
    assert run_says(webui) == "on"


def test_own_preset_is_saved_used_and_deleted(presets: Presets, webui: WebUI) -> None:
    webui.set_options(onediff_deepcache_interval=4)
    assert f"Saved '{OWN}': deepcache_interval 4." in presets.save(OWN)
    assert "deepcache_interval 4" in presets.rows()[OWN] and OWN in presets.in_force()
    presets.use("Quality first")
    assert run_says(webui) == "on"
    page = presets.page
    show_tab(page, "txt2img")
    open_advanced(page, "txt2img")
    choose_preset(page, "txt2img", OWN)
    page.wait_for_text(told("txt2img"), "This run: on; deepcache_interval 4.", 30)
    assert "OneDiff: on; deepcache_interval 4" in make_picture(page)
    presets.show()
    presets.use(OWN)
    assert run_says(webui) == "on; deepcache_interval 4"
    presets.choose(LIST, OWN)
    page.wait(lambda: is_enabled(page, DELETE), "Delete", 20)
    presets.click(DELETE)
    presets.told("Delete 'my drafts'?", "onediff_preset_question")
    assert OWN in presets.rows()
    presets.click("onediff_preset_delete_confirm")
    presets.told("Deleted 'my drafts', which was: deepcache_interval 4.", TOLD)
    assert OWN not in presets.rows()
    page.choose_tab("txt2img")
    page.type("#txt2img_seed input[type=number]", 12)
    before = webui.calls()
    make_picture(page, seed=12)
    assert webui.calls()["host"] >= before["host"] + 3, "a preset that is gone leaves the run to the WebUI's own"


def test_refusals(presets: Presets) -> None:
    assert "A preset needs a name" in presets.save(" ")
    presets.page.type(f"#{NAME} textarea, #{NAME} input", "Balanced")
    presets.click(SAVE)
    presets.told("a name of OneDiff's own", TOLD)
    assert presets.in_force() == ["Quality first"]


def is_enabled(page: Any, elem_id: str) -> bool:
    return bool(page.driver.find_element("id", elem_id).is_enabled())


def test_only_a_preset_of_the_users_own_can_be_deleted(presets: Presets, webui: WebUI) -> None:
    page = presets.page
    assert not is_enabled(page, DELETE)
    webui.set_options(onediff_deepcache_interval=4)
    presets.save(OWN)
    for name in (OWN, "Speed first", OWN):
        presets.choose(LIST, name)
        page.wait(lambda name=name: is_enabled(page, DELETE) is (name == OWN), f"Delete beside {name}", 20)
    presets.click(DELETE)
    presets.told("Delete 'my drafts'?", "onediff_preset_question")
    presets.click("onediff_preset_delete_confirm")
    presets.told("Deleted 'my drafts'", TOLD)
    page.wait(lambda: not is_enabled(page, DELETE), "Delete without a preset to delete", 20)


def test_with_the_keyboard(presets: Presets, webui: WebUI) -> None:
    """From the list to its button by Tab; a name is saved by Enter."""
    page = presets.page
    presets.choose(LIST, "Balanced")
    page.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("id") == USE
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    presets.told("Changed: DeepCache interval.", TOLD)
    field = page.find(f"#{NAME} textarea, #{NAME} input")
    field.send_keys("by keys", Keys.ENTER)
    presets.told("'Balanced' has these settings already.", TOLD)
    webui.set_options(onediff_tf32="on")
    field.send_keys(Keys.ENTER)
    presets.told("Saved 'by keys': tf32 on; deepcache_interval 2.", TOLD)
    page.find(f"#{TABLE} .onediff-table").send_keys(Keys.END)
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "Presets"


def test_nothing_sticks_out_of_what_is_new(presets: Presets, webui: WebUI) -> None:
    browser = presets.page
    webui.set_options(onediff_own_presets=f"{'w' * 60}: deepcache_interval 4; deepcache_hires off; tf32 on")
    try:
        show_tab(browser, "txt2img")
        open_advanced(browser, "txt2img")
        browser.type(changed_options("txt2img"), "deepcache_interval " + "9" * 60)
        browser.find(changed_options("txt2img")).send_keys(Keys.TAB)
        browser.wait_for_text(told("txt2img"), "it takes", 30)
        assert browser.sticking_out_at_any_width(accordion("txt2img")) == []
        presets.show()
        assert browser.sticking_out_at_any_width(PAGE) == []
    finally:
        browser.forget_size()
