"""The OneDiff tab for every user: by keyboard alone, on a narrow page, in either theme, with many rows."""
from __future__ import annotations

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from test_panel import panel  # noqa: F401
from webui_client import WebUI
from webui_page import TAB, show_settings
from webui_panel import PURGE, QUESTION, SIZES, TABLE, Panel

MOST_TABS = 80


def press(page, *keys: str) -> None:
    ActionChains(page.driver).send_keys(*keys).perform()


def focused(page) -> str:
    """The id of what has the focus, or its class or value where it has none."""
    return page.run(
        "const at = document.activeElement; return at.closest('[id^=onediff_prewarm]')?.id || at.id || at.value "
        "|| at.className"
    )


def tab_to(page, wanted: str) -> None:
    """Press Tab until this has the focus."""
    passed = []
    for _ in range(MOST_TABS):
        press(page, Keys.TAB)
        passed.append(focused(page))
        if passed[-1] == wanted:
            return
    raise AssertionError(f"{wanted} is not reached by Tab; passed: {passed}")


def test_by_keyboard_alone(panel: Panel, webui: WebUI) -> None:  # noqa: F811
    page = panel.page
    page.run("arguments[0].focus()", page.find(f"#{SIZES} textarea, #{SIZES} input"))
    press(page, "64x64, 72x64", Keys.ENTER)
    panel.wait_until_ready("64x64", "72x64")
    model = webui.status()["model"]
    tab_to(page, f"72x64 {model}")
    press(page, Keys.SPACE)
    assert panel.selected() == ["72x64"]
    tab_to(page, PURGE)
    press(page, Keys.ENTER)
    panel.told("Purge 1 resolution?", QUESTION)
    page.wait(lambda: focused(page) == "onediff_purge_keep", "the focus on Keep, which does no harm", 10)
    ActionChains(page.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    assert focused(page) == "onediff_purge_confirm"
    press(page, Keys.ENTER)
    panel.told("1 resolution purged")
    panel.wait_for_rows("64x64")
    page.wait(lambda: focused(page) == "onediff-table", "the focus near the button, which is disabled again", 10)


def test_details_and_selection_survive_a_new_table(panel: Panel, webui: WebUI) -> None:  # noqa: F811
    panel.prewarm("64x64")
    panel.wait_until_ready("64x64")
    panel.select("64x64")
    panel.click_at(f"#{TABLE} details summary")
    webui.txt2img(width=72, height=64)
    panel.page.wait(lambda: "72x64" in panel.rows(), "a new table", 30)
    assert panel.selected() == ["64x64"]
    assert panel.page.run(f"return [...document.querySelectorAll('#{TABLE} details[open]')]"
                          ".map(details => details.dataset.onediffKey.split(' ')[0])") == ["64x64"]
    panel.click_at(f"#{TABLE} [data-onediff-every]")
    assert len(panel.selected()) == 2


def test_nothing_of_ours_sticks_out(panel: Panel, webui: WebUI) -> None:  # noqa: F811
    browser = panel.page
    webui.txt2img(width=72, height=88)
    try:
        browser.wait(lambda: "72x88" in panel.rows(), "a row", 20)
        panel.select("72x88")
        panel.click(PURGE)
        panel.told("Purge 1 resolution?", QUESTION)
        panel.prewarm("64x64")
        panel.page.wait(panel.jobs, "a job", 20)
        assert browser.sticking_out_at_any_width(TAB) == []
        browser.forget_size()
        panel.click("onediff_purge_keep")
        panel.wait_until_ready("64x64")
        section = show_settings(browser)
        assert browser.sticking_out_at_any_width(section) == []
    finally:
        browser.forget_size()
