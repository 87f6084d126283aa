"""The page of the standalone host in a browser."""
from __future__ import annotations

import json
from typing import Any

import pytest
from grid import grid
from PIL import Image
from webui_client import WebUI
from webui_page import make_picture, open_page, show_settings, show_tab


@pytest.fixture
def page(standalone: WebUI, opened: Any) -> Any:
    show_tab(opened, "txt2img")
    return opened


def test_settings_tab_tells_what_changed(page, standalone: WebUI) -> None:
    show_settings(page)
    checkbox = page.find("#setting_onediff_enabled input")
    for expected in (False, True):
        checkbox.click()
        page.click("settings_submit")
        page.wait(lambda now=expected: standalone.status()["enabled"] is now, f"enabled = {expected}", 20)
        page.wait_for_text("settings_result", "1 setting changed: Use OneDiff.", 20)
        assert standalone.get("/sdapi/v1/options")["onediff_enabled"] is expected


def test_unusable_input_shows_a_sentence(page, standalone: WebUI) -> None:
    page.type("#txt2img_width input[type=number]", 65)
    page.click("txt2img_generate")
    page.wait_for_text("html_info_txt2img", "width is 65; it must be a multiple of 8", 30)
    page.type("#txt2img_width input[type=number]", 64)
    make_picture(page)


def test_img2img_without_an_image_shows_a_sentence(page, standalone: WebUI) -> None:
    page.choose_tab("img2img")
    page.click("img2img_generate")
    page.wait_for_text("html_info_img2img", "img2img needs an init image.", 30)


def test_progress_and_interrupt(page, standalone: WebUI) -> None:
    for name, value in {"steps": 150, "width": 128, "height": 128}.items():
        page.type(f"#txt2img_{name} input[type=number]", value)
    page.click("txt2img_generate")
    page.wait(lambda: "of 150" in page.text("txt2img_results"), "the progress line", 60)
    page.click("txt2img_interrupt")
    page.wait_for_text("html_info_txt2img", "Interrupted: the last image is unfinished.", 30)
    assert "of 150" not in page.text("txt2img_results") and "Time taken" in page.text("html_info_txt2img")
    blur = "return getComputedStyle(document.querySelector('#txt2img_gallery .preview')).backdropFilter"
    assert page.run(blur) == "none", "a blurred copy of the image would show through"


def test_prompt_is_shown_as_text(page, standalone: WebUI) -> None:
    page.type("#txt2img_prompt textarea", "<img src=x onerror=document.title='taken'> & more")
    assert "<img src=x" in make_picture(page)
    assert page.driver.title == "OneDiff"


@grid(width=[1500, 400], theme=["light", "dark"])
def test_nothing_sticks_out(browser, standalone: WebUI, width: int, theme: str, tmp_path) -> None:
    browser.size_page(width)
    try:
        browser.open(f"{standalone.url}/?__theme={theme}")
        for tab in ("txt2img", "img2img", "Settings"):
            browser.choose_tab(tab)
            assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= width
        browser.driver.save_screenshot(str(tmp_path / "page.png"))
    finally:
        browser.forget_size()
    dark = Image.open(tmp_path / "page.png").convert("L").getpixel((2, 500)) < 128
    assert dark == (theme == "dark")


def test_page_asks_no_other_host(browser: Any, standalone: WebUI) -> None:
    browser.watch_network(True)
    try:
        page = open_page(browser, standalone.url)
        make_picture(page)
        messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    finally:
        browser.watch_network(False)
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    # What earlier tests have sent is not this page's.
    opened = [index for index, request in enumerate(sent) if request["request"]["url"].rstrip("/") == standalone.url]
    sent = sent[opened[-1]:]
    own = (standalone.url, "data:", "blob:", "chrome:", "chrome-extension:")
    assert [request["request"]["url"] for request in sent if not request["request"]["url"].startswith(own)] == []


def test_page_reports_no_errors(page, standalone: WebUI) -> None:
    page.driver.get_log("browser")
    make_picture(page)
    assert [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"] == []
