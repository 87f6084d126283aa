"""The page in a browser."""
from __future__ import annotations

import json

import pytest
from PIL import Image
from webui_client import WebUI, gradient

SMALL = {"steps": 3, "width": 64, "height": 64, "seed": 11}


@pytest.fixture
def page(browser, webui: WebUI):
    """The page, freshly opened, with a small picture asked for in its txt2img tab."""
    browser.open(webui.url)
    browser.type("#txt2img_prompt textarea", "a castle at night")
    for name, value in SMALL.items():
        browser.type(f"#txt2img_{name} input[type=number]", value)
    return browser


def make_picture(page, tab: str = "txt2img") -> str:
    """Click Generate and return the line under the pictures."""
    page.click(f"{tab}_generate")
    return page.wait_for_text(f"html_info_{tab}", "Time taken")


def test_generate_makes_a_picture(page, webui: WebUI) -> None:
    assert page.pictures("txt2img_gallery") == []
    infotext = make_picture(page)
    assert "a castle at night" in infotext
    assert "Steps: 3" in infotext and "Seed: 11" in infotext and "Size: 64x64" in infotext
    assert len(page.wait(lambda: page.pictures("txt2img_gallery"), "a picture in the gallery")) >= 1


def test_status_line_tells_route_and_speed(page, webui: WebUI) -> None:
    make_picture(page)
    status = page.wait_for_text("onediff_txt2img_status", "ms")
    assert "plain launches" in status or "CUDA graph" in status
    assert "64x64" in status
    known = webui.status()
    assert known["model"] in status and known["backend"] in status


def test_checkbox_switches_it_off_for_a_run(page, webui: WebUI) -> None:
    page.driver.find_element("css selector", "#onediff_txt2img_enabled input").click()
    before = webui.calls()
    make_picture(page)
    after = webui.calls()
    assert after["host"] > before["host"] and after["plain"] == before["plain"] and after["graph"] == before["graph"]
    page.wait_for_text("onediff_txt2img_status", "the WebUI's own UNet")


def test_img2img(page, webui: WebUI, tmp_path) -> None:
    file = tmp_path / "start.png"
    gradient(64, 64).save(file)
    page.choose_tab("img2img")
    page.driver.find_element("css selector", "#img2img_image input[type=file]").send_keys(str(file))
    page.wait(lambda: page.driver.find_elements("css selector", "#img2img_image img"), "the uploaded image")
    for name, value in {**SMALL, "denoising_strength": 0.7}.items():
        page.type(f"#img2img_{name} input[type=number]", value)
    assert "Denoising strength: 0.7" in make_picture(page, "img2img")


def test_settings_tab_has_the_onediff_section(page, standalone: WebUI) -> None:
    page.choose_tab("Settings")
    page.wait_for_text("settings_onediff", "Use OneDiff", 20)
    assert "Backend" in page.text("settings_onediff")
    checkbox = page.driver.find_element("css selector", "#setting_onediff_enabled input")
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
    page.wait_for_text("html_info_txt2img", "Time taken", 30)
    assert "of 150" not in page.text("txt2img_results")


def test_prompt_is_shown_as_text(page, standalone: WebUI) -> None:
    page.type("#txt2img_prompt textarea", "<img src=x onerror=document.title='taken'> & more")
    assert "<img src=x" in make_picture(page)
    assert page.driver.title == "OneDiff"


@pytest.mark.parametrize("width", [1500, 400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out(browser, standalone: WebUI, width: int, theme: str, tmp_path) -> None:
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.open(f"{standalone.url}/?__theme={theme}")
        for tab in ("txt2img", "img2img", "Settings"):
            browser.choose_tab(tab)
            assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= width
        browser.driver.save_screenshot(str(tmp_path / "page.png"))
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    dark = Image.open(tmp_path / "page.png").convert("L").getpixel((2, 500)) < 128
    assert dark == (theme == "dark")


def test_page_asks_no_other_host(page, standalone: WebUI) -> None:
    make_picture(page)
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert sent
    own = (standalone.url, "data:", "blob:", "chrome:", "chrome-extension:")
    assert [request["request"]["url"] for request in sent if not request["request"]["url"].startswith(own)] == []


def test_page_reports_no_errors(page, standalone: WebUI) -> None:
    page.driver.get_log("browser")
    make_picture(page)
    assert [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"] == []
