"""OneDiff on the page of a WebUI: the accordion and the settings, used as a user does."""
from __future__ import annotations

from typing import Any

import pytest
from grid import WHOLE
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI, gradient, one_run
from webui_page import (
    SMALL,
    accordion,
    accordion_values,
    changed_options,
    choose_preset,
    enabled_checkbox,
    make_picture,
    open_advanced,
    show_settings,
    show_tab,
    status_line,
    told,
)


@pytest.fixture
def page(opened: Any) -> Any:
    show_tab(opened, "txt2img")
    return opened


def test_generate_makes_a_picture(page, webui: WebUI) -> None:
    shown, before = page.pictures("txt2img_gallery"), webui.calls()
    infotext = make_picture(page)
    assert "a castle at night" in infotext
    assert "Steps: 3" in infotext and "Seed: 11" in infotext and "Size: 64x64" in infotext
    page.wait(lambda: page.pictures("txt2img_gallery") not in ([], shown), "another picture in the gallery")
    after = webui.calls()
    assert after["plain"] + after["graph"] >= before["plain"] + before["graph"] + 3
    assert after["host"] == before["host"] and after["blocks"] == before["blocks"]


def test_status_line_tells_route_and_speed(page, webui: WebUI) -> None:
    page.type("#txt2img_width input[type=number]", 72)
    make_picture(page)
    open_advanced(page, "txt2img")
    page.wait_for_text(status_line("txt2img"), "72x64", 30)
    status = page.wait_for_text(status_line("txt2img"), "ms", 30)
    assert "without CUDA graphs" in status or "CUDA graph" in status
    known = webui.status()
    assert known["model"] in status and known["backend"] in status


def test_checkbox_switches_it_off_for_a_run(page, webui: WebUI) -> None:
    open_advanced(page, "txt2img")
    page.find(enabled_checkbox("txt2img")).click()
    before = webui.calls()
    make_picture(page)
    after = webui.calls()
    assert after["host"] >= before["host"] + 3
    assert after["plain"] == before["plain"] and after["graph"] == before["graph"]
    page.wait_for_text(status_line("txt2img"), "the WebUI's UNet", 30)


def test_img2img(page, webui: WebUI, tmp_path) -> None:
    file = tmp_path / "start.png"
    gradient(64, 64).save(file)
    show_tab(page, "img2img")
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
    page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", before)


def seen_settings(page) -> dict[str, bool]:
    """Of every row of OneDiff's settings, by the option's name, whether it can be seen."""
    return page.run("""
        const rows = [...document.querySelectorAll("#settings_onediff [id^=setting_onediff_]")];
        const seen = row => [row.id.slice("setting_onediff_".length), row.offsetParent !== null];
        return Object.fromEntries(rows.map(seen));
    """)


def test_settings_have_groups_speeds_and_rows_that_apply(page) -> None:
    show_settings(page)
    groups = "return [...document.querySelectorAll('#settings_onediff .onediff-group')].map(at => at.textContent)"
    page.wait(lambda: page.run(groups), "the groups", 10)
    assert page.run(groups) == ["General", "Speed and precision", "Memory and pre-warm", "Expert"]
    page.wait(lambda: not seen_settings(page)["low_bit_budget"], "rows that are hidden", 10)
    hidden = {name for name, seen in seen_settings(page).items() if not seen}
    assert hidden == {"convolution_accumulation", "low_bit_budget", "low_bit_only"}
    page.run("""
        const speeds = [...document.querySelectorAll("#settings_onediff .onediff-settings-head button")];
        speeds.find(button => button.textContent === arguments[0]).click();
    """, "Fast")
    page.wait(lambda: seen_settings(page)["low_bit_budget"], "Low-bit's budget", 10)
    page.wait_for_text("setting_onediff_deepcache_interval", "Default: 1", 10)
    page.find("#settings_onediff .onediff-settings-head > :last-child").click()
    page.wait(lambda: not seen_settings(page)["low_bit_budget"], "the defaults", 10)


def test_settings_mark_what_is_changed_and_reset_it(page, webui: WebUI) -> None:
    with webui.options(onediff_vae_precision="fp32"):
        page.refresh()
        show_settings(page)
        page.wait_for_text("setting_onediff_vae_precision", "Default: auto", 20)
        page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "64x64")
        page.wait_for_text("setting_onediff_prewarm", "Default: empty", 10)
        page.find("#setting_onediff_prewarm .onediff-small").click()
        page.wait(lambda: "Default" not in page.text("setting_onediff_prewarm"), "the mark to go", 10)
        page.find("#settings_onediff .onediff-settings-head > :last-child").click()
        page.wait(lambda: "Default" not in page.text("setting_onediff_vae_precision"), "the default", 10)
        page.find("#settings_submit").click()
        # Some WebUIs' API names no option of an extension.
        name = "onediff_vae_precision"
        page.wait(lambda: webui.get("/sdapi/v1/options").get(name, "auto") == "auto", "the default", 20)


def test_preset_and_changes_hold_for_the_run(page, webui: WebUI) -> None:
    open_advanced(page, "txt2img")
    choose_preset(page, "txt2img", "Balanced")
    page.wait_for_text(told("txt2img"), "This run: on; deepcache_interval 3; deepcache_depth 3.", 30)
    page.type(changed_options("txt2img"), "deepcache_interval 4; vae_precision fp32")
    page.find(changed_options("txt2img")).send_keys(Keys.TAB)
    expected = "on; deepcache_interval 4; deepcache_depth 3; vae_precision fp32"
    page.wait_for_text(told("txt2img"), f"This run: {expected}.", 30)
    assert f"OneDiff: {expected}" in make_picture(page)
    other = webui.txt2img().info["infotexts"][0]
    assert "OneDiff: on" in other and "deepcache" not in other, "another user's run is as the settings tab says"


# --- pasting ----------------------------------------------------------------------------------------------------------


def paste(page: Any, tab: str, infotext: str) -> None:
    """Put a text into the prompt and have the WebUI read it."""
    buttons = f"#{tab}_paste, #tab_{tab} #paste, #{tab}_tools #paste"
    page.type(f"#{tab}_prompt textarea", infotext)
    page.find(buttons).click()


PASTED = [
    ({}, {}, (True, "As in the settings", "")),
    ({"enabled": False}, {}, (False, "As in the settings", "")),
    ({"deepcache_interval": 2, "backend": "eager"}, {},
     (True, "As in the settings", "deepcache_interval 2; backend eager")),
    ({"deepcache_interval": 3}, {"onediff_vae_precision": "fp32"},
     (True, "As in the settings", "deepcache_interval 3; vae_precision auto")),
]


@pytest.mark.parametrize(
    ("tab", "made_with", "options", "expected"),
    [("txt2img", *given) for given in PASTED] + [("img2img", *given) for given in (PASTED if WHOLE else PASTED[-1:])],
)
def test_infotext_pastes_back(
    page, webui: WebUI, tab: str, made_with: dict[str, Any], options: dict[str, Any], expected: tuple[bool, str, str]
) -> None:
    """The accordion takes what the picture says, whatever it showed before and whatever the settings tab says."""
    infotext = webui.txt2img(**one_run(**made_with)).info["infotexts"][0]
    assert "OneDiff: " in infotext
    show_tab(page, tab)
    open_advanced(page, tab)
    page.find(enabled_checkbox(tab)).click()
    page.type(changed_options(tab), "backend eager")
    with webui.options(**options):
        paste(page, tab, infotext)
        page.wait(lambda: accordion_values(page, tab) == expected, f"{expected}, not {accordion_values(page, tab)}", 30)
        if tab == "txt2img":
            said = infotext.partition("OneDiff: ")[2].partition(",")[0].strip()
            again = make_picture(page, seed=7)
            assert f"OneDiff: {said}" in again, "the run is another one than that of the infotext"


def test_what_the_run_will_be_is_told_after_pasting_applying_resetting_and_generating(page, webui: WebUI) -> None:
    """Nobody comes to the accordion meanwhile: it asks by itself."""
    def told_without_pointing(expected: str) -> None:
        page.choose_tab("txt2img")
        page.wait_for_text(told("txt2img"), expected, 20)

    def apply() -> None:
        page.find("#settings_submit").click()

    name = "onediff_deepcache_interval"
    infotext = "a fox\nSteps: 3, Sampler: Euler a, Seed: 31, Size: 64x64, OneDiff: on"
    open_advanced(page, "txt2img")
    paste(page, "txt2img", infotext)
    page.wait(lambda: page.run("return document.querySelector('#txt2img_seed input').value") == "31", "the seed", 30)
    assert accordion_values(page, "txt2img") == (True, "As in the settings", "")
    with webui.options(**{name: 1, "onediff_vae_precision": "auto"}):
        show_settings(page)
        page.type(f"#setting_{name} input[type=number]", 4)
        apply()
        told_without_pointing("This run: on; deepcache_interval 4.")
        show_settings(page)
        page.wait_for_text(f"setting_{name}", "Default: 1", 20)
        page.find(f"#setting_{name} .onediff-small").click()
        apply()
        told_without_pointing("This run: on.")
        paste(page, "txt2img", f"{infotext}; deepcache_interval 2")
        page.wait_for_text(told("txt2img"), "This run: on; deepcache_interval 2.", 20)
        assert page.text("onediff_txt2img_set_here") == "Set here: deepcache_interval 2"
        # By another page, say.
        webui.set_options(onediff_vae_precision="fp32")
        assert "deepcache_interval 2; vae_precision fp32" in make_picture(page, seed=31)
        page.wait_for_text(told("txt2img"), "This run: on; deepcache_interval 2; vae_precision fp32.", 20)
        page.close_accordion(accordion("txt2img"))
        assert page.text("onediff_txt2img_set_here") == "Set here: deepcache_interval 2", "also where it is closed"


def test_infotext_of_a_picture_without_onediff_leaves_the_accordion_alone(page, webui: WebUI) -> None:
    open_advanced(page, "txt2img")
    page.find(enabled_checkbox("txt2img")).click()
    page.type(changed_options("txt2img"), "backend eager")
    paste(page, "txt2img", "a fox\nSteps: 5, Sampler: Euler a, CFG scale: 7, Seed: 31, Size: 64x64")
    page.wait(lambda: page.run("return document.querySelector('#txt2img_seed input').value") == "31", "the seed", 30)
    assert accordion_values(page, "txt2img") == (False, "As in the settings", "backend eager")
