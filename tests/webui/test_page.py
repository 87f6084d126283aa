"""OneDiff on the page of a WebUI: the accordion and the settings, used as a user does."""
from __future__ import annotations

import pytest
from webui_client import WebUI, gradient
from webui_models import Models
from webui_page import SMALL, accordion, enabled_checkbox, make_picture, open_page, show_settings, status_line


@pytest.fixture
def page(browser, webui: WebUI, sd15: Models):
    return open_page(browser, webui.url)


def test_generate_makes_a_picture(page, webui: WebUI) -> None:
    assert page.pictures("txt2img_gallery") == []
    before = webui.calls()
    infotext = make_picture(page)
    assert "a castle at night" in infotext
    assert "Steps: 3" in infotext and "Seed: 11" in infotext and "Size: 64x64" in infotext
    assert len(page.wait(lambda: page.pictures("txt2img_gallery"), "a picture in the gallery")) >= 1
    after = webui.calls()
    assert after["plain"] + after["graph"] >= before["plain"] + before["graph"] + 3
    assert after["host"] == before["host"] and after["blocks"] == before["blocks"]


def test_status_line_tells_route_and_speed(page, webui: WebUI) -> None:
    make_picture(page)
    page.open_accordion(accordion("txt2img"))
    status = page.wait_for_text(status_line("txt2img"), "ms", 30)
    assert "plain launches" in status or "CUDA graph" in status
    page.wait_for_text(status_line("txt2img"), "64x64", 30)
    known = webui.status()
    assert known["model"] in status and known["backend"] in status


def test_checkbox_switches_it_off_for_a_run(page, webui: WebUI) -> None:
    page.open_accordion(accordion("txt2img"))
    page.find(enabled_checkbox("txt2img")).click()
    before = webui.calls()
    make_picture(page)
    after = webui.calls()
    assert after["host"] >= before["host"] + 3
    assert after["plain"] == before["plain"] and after["graph"] == before["graph"]
    page.wait_for_text(status_line("txt2img"), "the WebUI's own UNet", 30)


def test_img2img(page, webui: WebUI, tmp_path) -> None:
    file = tmp_path / "start.png"
    gradient(64, 64).save(file)
    page.choose_tab("img2img")
    page.driver.find_element("css selector", "#img2img_image input[type=file]").send_keys(str(file))
    page.wait(lambda: page.driver.execute_script(
        "return [...document.querySelectorAll('#img2img_image img, #img2img_image canvas')]"
        ".some(shown => (shown.naturalWidth ?? shown.width) > 1)"
    ), "the uploaded image")
    for name, value in {**SMALL, "denoising_strength": 0.7}.items():
        page.type(f"#img2img_{name} input[type=number]", value)
    before = webui.calls()
    assert "Denoising strength: 0.7" in make_picture(page, "img2img")
    after = webui.calls()
    assert after["plain"] + after["graph"] > before["plain"] + before["graph"] and after["host"] == before["host"]


def test_settings_switch_it_off_and_on(page, webui: WebUI) -> None:
    section = show_settings(page)
    assert "Use OneDiff" in page.text(section) and "Backend" in page.text(section)
    for part in ("Graph memory", "Pre-warm list", "Cache folder"):
        assert part in page.text(section)
    checkbox = page.find("#setting_onediff_enabled input")
    try:
        for expected in (False, True):
            checkbox.click()
            page.find("#settings_submit").click()
            page.wait(lambda now=expected: webui.status()["enabled"] is now, f"enabled = {expected}", 20)
            page.wait_for_text("settings_result", "changed", 20)
    finally:
        webui.set_options(onediff_enabled=True)


def test_settings_refuse_nonsense(page, webui: WebUI) -> None:
    before = webui.get("/sdapi/v1/options").get("onediff_prewarm", "")
    show_settings(page)
    page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "huge")
    page.find("#settings_submit").click()
    page.wait_for_text("settings_result", "changed", 20)
    page.wait(lambda: webui.get("/sdapi/v1/options").get("onediff_prewarm", "") == before, "the old list", 20)
    assert webui.status()["enabled"] is True
    make = webui.txt2img()
    assert make.image.size == (64, 64)


def test_infotext_pastes_back(page, webui: WebUI) -> None:
    """The accordion takes what the picture says, whatever it showed before."""
    button = page.driver.find_elements("css selector", "#tab_txt2img #paste, #txt2img_tools #paste")
    if not button:
        pytest.skip(f"the {webui.kind} host has no button that pastes an infotext: --webui URL")
    infotext = webui.txt2img().info["infotexts"][0]
    assert "OneDiff: " in infotext
    page.open_accordion(accordion("txt2img"))
    page.find(enabled_checkbox("txt2img")).click()
    assert not page.find(enabled_checkbox("txt2img")).is_selected()
    page.type("#txt2img_prompt textarea", infotext)
    page.find("#tab_txt2img #paste, #txt2img_tools #paste").click()
    page.wait(lambda: page.find(enabled_checkbox("txt2img")).is_selected(), "the accordion's tick", 30)


def test_infotext_of_a_run_without_onediff_pastes_back(page, webui: WebUI) -> None:
    button = page.driver.find_elements("css selector", "#tab_txt2img #paste, #txt2img_tools #paste")
    if not button:
        pytest.skip(f"the {webui.kind} host has no button that pastes an infotext: --webui URL")
    infotext = webui.txt2img(alwayson_scripts={"OneDiff": {"args": [False]}}).info["infotexts"][0]
    page.open_accordion(accordion("txt2img"))
    assert page.find(enabled_checkbox("txt2img")).is_selected()
    page.type("#txt2img_prompt textarea", infotext)
    page.find("#tab_txt2img #paste, #txt2img_tools #paste").click()
    page.wait(lambda: not page.find(enabled_checkbox("txt2img")).is_selected(), "the accordion without a tick", 30)
