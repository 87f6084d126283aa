"""The OneDiff tab and the accordion's pre-warm button; nothing of ours sticks out, in either theme."""
from __future__ import annotations

import io

import pytest
from PIL import Image
from webui_client import WebUI
from webui_models import Models
from webui_page import (
    CHOSEN,
    JOBS,
    PREWARM,
    PURGE,
    PURGE_ALL,
    REFRESH,
    RESULT,
    SIZES,
    TAB,
    TAB_TITLE,
    TABLE,
    accordion,
    make_picture,
    open_page,
    prewarm_button,
    prewarm_result,
    show_settings,
)


class Panel:
    """The OneDiff tab of an open page."""

    def __init__(self, page) -> None:
        self.page = page

    def show(self) -> None:
        self.page.choose_tab(TAB_TITLE)
        self.page.wait(lambda: self.page.driver.find_element("id", TAB).is_displayed(), "the OneDiff tab", 20)

    def rows(self) -> dict[str, str]:
        """Resolution to the text of its row."""
        return self.page.run(
            "return Object.fromEntries([...document.querySelectorAll(`#${arguments[0]} > * tbody > tr > th, "
            "#${arguments[0]} tbody > tr > th`)].map(head => [head.innerText, head.parentElement.innerText]))", TABLE,
        )

    def prewarm(self, sizes: str) -> None:
        self.page.type(f"#{SIZES} textarea, #{SIZES} input", sizes)
        self.page.find(f"#{PREWARM}").click()

    def wait_until_ready(self, *resolutions: str) -> None:
        def ready() -> bool:
            rows = self.rows()
            return all({"proved", "ready"} & set(rows.get(resolution, "").split()) for resolution in resolutions)

        self.page.wait(ready, f"{' and '.join(resolutions)} in the table, ready", 240)

    def wait_until_told(self, sizes: str) -> None:
        """The queue is done with what was asked of it, and says so; sizes: "2 sizes"."""
        self.page.wait_for_text(RESULT, f"{sizes} warmed up", 240)

    def purge_all(self, told: str) -> None:
        """told: a part of the sentence that it is answered with."""
        self.page.find(f"#{PURGE_ALL}").click()
        self.page.wait_for_text(RESULT, told, 30)
        self.page.wait(lambda: not self.rows(), "an empty table", 30)

    def choose(self, resolution: str) -> None:
        self.page.find(f"#{CHOSEN} input").click()
        options = f"#{CHOSEN} ul.options li, ul.options li"
        self.page.wait(lambda: self.page.driver.find_elements("css selector", options), "the list of resolutions", 10)
        found = self.page.driver.find_elements("css selector", options)
        next(option for option in found if resolution in option.text.split()).click()


@pytest.fixture
def panel(browser, webui: WebUI, sd15: Models) -> Panel:
    """The OneDiff tab, with no resolution in it."""
    webui.txt2img()  # Some hosts load the checkpoint with the first picture.
    shown = Panel(open_page(browser, webui.url))
    shown.show()
    shown.page.wait(shown.rows, "a row for the picture", 30)
    shown.purge_all("forgotten")
    return shown


def served(webui: WebUI) -> int:
    """How many calls we have served so far."""
    calls = webui.calls()
    return calls["plain"] + calls["graph"]


def test_prewarm(panel: Panel, webui: WebUI) -> None:
    before, host_before = served(webui), webui.calls()["host"]
    panel.prewarm("96x64, 64x96 x2")
    panel.wait_until_ready("96x64", "64x96")
    assert served(webui) >= before + 2
    assert webui.calls()["host"] == host_before
    assert set(panel.rows()) == {"96x64", "64x96"}
    panel.page.wait(lambda: panel.page.text(JOBS).count("done in") == 2, "two jobs done", 60)
    webui.txt2img(width=96, height=64)
    assert webui.calls()["host"] == host_before


def test_picture_makes_a_row(panel: Panel, webui: WebUI) -> None:
    webui.txt2img(width=72, height=88)
    panel.page.find(f"#{REFRESH}").click()
    panel.page.wait(lambda: "ms" in panel.rows().get("72x88", ""), "a row with its time", 30)
    assert set(panel.rows()) == {"72x88"}


def test_purge_all(panel: Panel, webui: WebUI) -> None:
    panel.prewarm("64x64, 72x64")
    panel.wait_until_ready("64x64", "72x64")
    panel.wait_until_told("2 sizes")
    panel.purge_all("2 resolutions forgotten")
    before = served(webui)
    webui.txt2img()
    assert served(webui) >= before + 3


def test_purge_selected(panel: Panel, webui: WebUI) -> None:
    panel.prewarm("64x64, 72x64, 80x64")
    panel.wait_until_ready("64x64", "72x64", "80x64")
    panel.wait_until_told("3 sizes")
    panel.choose("72x64")
    panel.page.find(f"#{PURGE}").click()
    panel.page.wait(lambda: set(panel.rows()) == {"64x64", "80x64"}, "one row less", 30)
    panel.page.wait_for_text(RESULT, "1 resolution", 20)


def test_purge_without_a_choice_gets_a_sentence(panel: Panel) -> None:
    panel.page.find(f"#{PURGE}").click()
    panel.page.wait_for_text(RESULT, "Choose at least one resolution", 20)


@pytest.mark.parametrize("sizes, part", [
    ("65x64", "multiple of 8"),
    ("big", "is not a size"),
    ("", "Type at least one size"),
    ("8192x8192", "4096"),
    ("<b>64x64</b>", "is not a size"),
])
def test_wrong_size_gets_a_sentence(panel: Panel, webui: WebUI, sizes: str, part: str) -> None:
    before = webui.calls()
    panel.prewarm(sizes)
    panel.page.wait_for_text(RESULT, part, 20)
    assert panel.rows() == {}
    assert webui.calls() == before
    assert not panel.page.driver.find_elements("css selector", f"#{RESULT} p b")


def test_accordion_prewarms_the_current_size(panel: Panel, webui: WebUI) -> None:
    page = panel.page
    page.choose_tab("txt2img")
    page.open_accordion(accordion("txt2img"))
    for name, value in (("width", 80), ("height", 64)):
        page.type(f"#txt2img_{name} input[type=number]", value)
    before, host_before = served(webui), webui.calls()["host"]
    page.find(f"#{prewarm_button('txt2img')}").click()
    page.wait_for_text(prewarm_result("txt2img"), "done in", 240)
    assert "80x64" in page.text(prewarm_result("txt2img"))
    assert served(webui) > before and webui.calls()["host"] == host_before
    panel.show()
    page.find(f"#{REFRESH}").click()
    panel.wait_until_ready("80x64")


@pytest.mark.parametrize("width", [1500, 400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_of_ours_sticks_out(browser, webui: WebUI, sd15: Models, width: int, theme: str, tmp_path) -> None:
    webui.txt2img(width=72, height=88)
    browser.size_page(width)
    try:
        browser.open(f"{webui.url}/?__theme={theme}")
        browser.open_accordion(accordion("txt2img"))
        browser.find(f"#{accordion('txt2img')}")
        browser.driver.save_screenshot(str(tmp_path / "accordion.png"))
        assert browser.sticking_out(accordion("txt2img")) == []
        panel = Panel(browser)
        panel.show()
        browser.wait(lambda: "72x88" in panel.rows(), "a row", 20)
        browser.find(f"#{TABLE}")
        tab_picture = browser.driver.find_element("id", TAB).screenshot_as_png
        (tmp_path / "tab.png").write_bytes(tab_picture)
        assert browser.sticking_out(TAB) == []
        section = show_settings(browser)
        browser.find("#setting_onediff_enabled")
        browser.driver.save_screenshot(str(tmp_path / "settings.png"))
        assert browser.sticking_out(section) == []
    finally:
        browser.forget_size()
    shades = Image.open(io.BytesIO(tab_picture)).convert("L")
    typical = sorted(shades.resize((32, 32)).getdata())[512]
    assert (typical < 128) == (theme == "dark"), f"the tab's typical shade is {typical} of 255"
    darkest, lightest = shades.getextrema()
    assert lightest - darkest > 100, "nothing can be read on the tab"


def test_prewarm_while_a_picture_is_made(panel: Panel, webui: WebUI) -> None:
    """It waits its turn and costs no picture."""
    page = panel.page
    page.choose_tab("txt2img")
    page.type("#txt2img_steps input[type=number]", 30)
    page.click("txt2img_generate")
    panel.show()
    panel.prewarm("104x64")
    panel.wait_until_ready("104x64")
    page.choose_tab("txt2img")
    assert "Steps: 30" in page.wait_for_text("html_info_txt2img", "Seed: 11,")
    make_picture(page)
