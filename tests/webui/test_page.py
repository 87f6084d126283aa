"""OneDiff on the page of a WebUI, used as a user does: generating, the accordion, the settings, pasting infotexts."""
from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from grid import WHOLE
from PIL import Image
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI, gradient, one_run
from webui_compare import need
from webui_page import (
    SMALL,
    accordion_values,
    choose,
    choose_preset,
    make_picture,
    open_advanced,
    open_page,
    paste,
    show_settings,
    show_tab,
)

from lib_onediff.ui.presets import BALANCED, PRESETS

# Holds back the answer to the page's next request for 9 s. Collects each sentence "This run: ..." that the accordion
# shows, because one of them may be there for a moment only.
LATE = """
const real = window.fetch;
window.fetch = (...request) => {
  window.fetch = real;
  return real(...request).then(answer => new Promise(done => setTimeout(done, 9000, answer)));
};
window.sentencesSeen = [];
new MutationObserver(() => {
  const sentence = document.getElementById("onediff_txt2img_told")?.textContent.match(/This run: [^.]*/)?.[0];
  if (sentence && sentence !== window.sentencesSeen.at(-1)) window.sentencesSeen.push(sentence);
}).observe(document.body, {subtree: true, childList: true, characterData: true});
"""
TAB = "txt2img"


@pytest.fixture
def page(opened: Any) -> Any:
    show_tab(opened, "txt2img")
    return opened


def test_the_checkbox_decides_whether_onediff_computes_the_image(page, webui: WebUI) -> None:
    """The status below the checkbox describes the image: its size, time, model and backend, or that the WebUI computed
    it alone."""
    open_advanced(page, "txt2img")
    page.type("#txt2img_width input[type=number]", 72)
    shown = page.pictures("txt2img_gallery")
    for on in (True, False):
        before = webui.calls()
        infotext = make_picture(page)
        grown = {route: count - before[route] for route, count in webui.calls().items()}
        assert "a castle at night" in infotext and "Steps: 3" in infotext and "Size: 72x64" in infotext
        ours = grown["plain"] + grown["graph"]
        assert (ours >= 3 and grown["host"] == 0) if on else (ours == 0 and grown["host"] >= 3)
        if on:
            page.wait(lambda: page.pictures("txt2img_gallery") not in ([], shown), "another image in the gallery")
            status = page.wait_for_text("onediff_txt2img_status", "72x64", 30)
            assert "without CUDA graphs" in status or "CUDA graph" in status
            known = webui.status()
            assert "ms" in status and known["model"] in status and known["backend"] in status
            page.find("#onediff_txt2img_enabled input").click()
    page.wait_for_text("onediff_txt2img_status", "the WebUI alone", 30)


def test_onediff_computes_an_img2img_image_of_the_page(page, webui: WebUI, tmp_path) -> None:
    need(webui, "img2img")
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


# --- the accordion ----------------------------------------------------------------------------------------------------


def move(page: Any, name: str, value: int) -> None:
    """Set a slider, as by dragging it or by typing beside it."""
    page.type(f"#onediff_{TAB}_{name} input[type=number]", value)


def wait_for_changes(page: Any, text: str) -> None:
    page.wait(lambda: accordion_values(page, TAB)[2] == text, f"{text!r} in the text of extra options", 20)


def wait_for_controls(page: Any, **values: str) -> None:
    value = "return document.querySelector(arguments[0]).value"
    shown = lambda: {name: page.run(value, f"#onediff_txt2img_{name} input") for name in values}  # noqa: E731
    page.wait(lambda: shown() == values, f"{values} in the controls", 20)


def test_the_closed_accordion_shows_its_checkbox_and_the_status(page) -> None:
    """A click on the checkbox does not open the accordion, and opening the accordion does not switch the checkbox. The
    status is one line on the last image."""
    preset = page.find("#onediff_txt2img_preset")
    box = page.find("#onediff_txt2img_enabled input")
    assert not preset.is_displayed() and box.is_displayed() and box.is_selected()
    make_picture(page)
    summary = f"onediff_{TAB}_summary"
    # gradio counts seconds beside it as long as it is asked for.
    page.wait(lambda: re.fullmatch(r".*s/image.*graph", page.text(summary)), "the status on one line", 30)
    box.click()
    assert not preset.is_displayed() and not box.is_selected(), "the checkbox does not open it"
    box.click()
    for opened in (True, False):
        page.find("#onediff_txt2img_accordion .label-wrap").click()
        page.wait(lambda now=opened: preset.is_displayed() is now, f"open: {opened}", 10)
        assert box.is_selected(), "opening and closing it switches nothing"


def test_controls_and_text_of_the_accordion_agree_and_set_the_options_of_the_image(page, webui: WebUI) -> None:
    """The text is that of the extra options. The options are not in the image of another user, here of the API. If an
    option is misspelled, a suggestion appears once the field is left."""
    open_advanced(page, TAB)
    page.wait_for_text("onediff_txt2img_told", "This run: ", 20)
    move(page, "deepcache_interval", 3)
    choose(page, f"onediff_{TAB}_vae_precision", "fp32")
    wait_for_changes(page, "deepcache_interval 3; vae_precision fp32")
    page.wait_for_text("onediff_txt2img_told", "This run: DeepCache interval 3, VAE precision fp32.", 20)
    assert "OneDiff: on; vae_precision fp32" in make_picture(page), "in so few steps, DeepCache is inactive"
    other = webui.txt2img().info["infotexts"][0]
    assert "OneDiff: on" in other and "precision" not in other, "another user's run is as the settings tab says"
    move(page, "deepcache_interval", 1)
    wait_for_changes(page, "vae_precision fp32")
    field = page.find("#onediff_txt2img_changes :is(textarea, input)")
    field.send_keys("; deepcache_intervall 3")
    assert "Did you mean" not in page.text("onediff_txt2img_told"), "nobody is corrected while typing"
    field.send_keys(Keys.TAB)
    page.wait_for_text("onediff_txt2img_told", "Did you mean 'deepcache_interval'? Fix this, or", 20)


def test_a_late_answer_of_the_server_does_not_stay_in_the_place_of_a_newer_one(page) -> None:
    """LATE holds back the answer to the first of two requests, so that its sentence, "Exact.", arrives after that of
    the second one, "VAE precision fp32.". The accordion may show it for a moment, but must then show the second one
    again."""
    open_advanced(page, TAB)
    page.wait_for_text("onediff_txt2img_told", "This run: Exact.", 20)
    page.run(LATE)
    field = "#onediff_txt2img_changes :is(textarea, input)"
    page.run("const field = document.querySelector(arguments[0]); field.focus(); field.blur()", field)
    page.type(field, "vae_precision fp32")
    new, late = "This run: VAE precision fp32", "This run: Exact"
    page.wait(lambda: page.run("return window.sentencesSeen")[-3:] == [new, late, new], "the late answer, replaced", 60)


def test_the_controls_show_the_settings_the_preset_and_the_text(page, webui: WebUI) -> None:
    """Each control has the value that its option has for this run: the settings tab's, then that of the extra options.
    A chosen preset sets its options, and removes them from the text."""
    with webui.options(onediff_deepcache_depth=3):
        open_advanced(page, TAB)
        wait_for_controls(page, deepcache_depth="3")
        wait_for_changes(page, "")
        page.type("#onediff_txt2img_changes :is(textarea, input)", "backend eager; deepcache_interval 5; low_bit fp8")
        page.find("#onediff_txt2img_changes :is(textarea, input)").send_keys(Keys.TAB)
        wait_for_controls(page, deepcache_interval="5", low_bit="fp8")
        choose_preset(page, TAB, "Balanced")
        wait_for_changes(page, "backend eager")
        wait_for_controls(page, deepcache_interval="3", low_bit="off")
        page.wait_for_text("onediff_txt2img_told", "This run: Balanced, Backend eager.", 20)


def test_a_click_just_after_the_accordion_opens_shows_the_list_of_presets(page) -> None:
    """The server's answer to the opening, which arrives later, must not close the list."""
    # Without the pointer: its coming to the accordion asks the server, and the click follows at once.
    page.run("document.querySelector(arguments[0]).click()", "#onediff_txt2img_accordion .label-wrap")
    page.find("#onediff_txt2img_preset input").click()
    options = ":is(ul.options, ul[role=listbox]) li"
    offered = f"return [...document.querySelectorAll('{options}')].map(at => at.innerText.trim())"
    page.wait(lambda: any("Balanced" in name for name in page.run(offered)), "the list", 10)
    page.wait_for_text("onediff_txt2img_told", "This run: ", 20)
    assert any("Balanced" in name for name in page.run(offered)), "what the server said has closed the list"


# --- the settings -----------------------------------------------------------------------------------------------------


def seen_settings(page) -> dict[str, bool]:
    """Whether each row of OneDiff's settings is visible, by the option's name."""
    return page.run("""
        const rows = [...document.querySelectorAll("#settings_onediff [id^=setting_onediff_]")];
        const seen = row => [row.id.slice("setting_onediff_".length), row.offsetParent !== null];
        return Object.fromEntries(rows.map(seen));
    """)


def test_the_settings_show_groups_speeds_and_changes_and_refuse_a_wrong_value(page, webui: WebUI) -> None:
    """Rows of options that have no effect now are hidden. A speed, which sets the options of a preset, shows the rows
    that it needs and marks options that differ from their defaults. A button beside a mark resets this option, another
    one all of them. A wrong value is not stored."""
    with webui.options(onediff_vae_precision="fp32"):
        page.refresh()
        show_settings(page)
        groups = "return [...document.querySelectorAll('#settings_onediff .onediff-group')].map(at => at.textContent)"
        page.wait(lambda: page.run(groups), "the groups", 10)
        assert page.run(groups) == ["General", "Speed and precision", "Memory and pre-warm", "Expert"]
        page.wait(lambda: not seen_settings(page)["low_bit_budget"], "rows that are hidden", 10)
        hidden = {name for name, seen in seen_settings(page).items() if not seen}
        useless = page.run("return document.querySelectorAll('#settings_onediff .onediff-folded li').length")
        assert hidden >= {"low_bit_budget", "low_bit_only"} and len(hidden) >= useless
        page.wait_for_text("setting_onediff_vae_precision", "Default: auto", 20)
        page.run("""
            const speeds = [...document.querySelectorAll("#settings_onediff .onediff-settings-head button")];
            speeds.find(button => button.textContent === arguments[0]).click();
        """, "Fast")
        page.wait(lambda: seen_settings(page)["low_bit_budget"], "Low-bit's budget", 10)
        page.wait_for_text("setting_onediff_deepcache_interval", "Default: 1", 10)
        page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "64x64")
        page.wait_for_text("setting_onediff_prewarm", "Default: empty", 10)
        page.find("#setting_onediff_prewarm .onediff-small").click()
        page.wait(lambda: "Default" not in page.text("setting_onediff_prewarm"), "the mark to go", 10)
        page.find("#settings_onediff .onediff-settings-head > :last-child").click()
        page.wait(lambda: not seen_settings(page)["low_bit_budget"], "the defaults", 10)
        assert "Default" not in page.text("setting_onediff_vae_precision")
        page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "huge")
        page.find("#settings_submit").click()
        # Some WebUIs' API names no option of an extension.
        stored = lambda name, default: webui.get("/sdapi/v1/options").get(name, default)  # noqa: E731
        page.wait(lambda: stored("onediff_vae_precision", "auto") == "auto", "the default", 20)
        assert stored("onediff_prewarm", "") == "" and webui.status()["enabled"] is True
        page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "")


def test_pending_options_are_marked_and_errors_are_below_their_fields(page, webui: WebUI) -> None:
    """Pending: changed on the page, and not applied. The value in force is shown beside the changed one, and a bar
    counts pending options and wrong values. Apply stores the right values; for the wrong one, one message appears."""
    bar = ".onediff-settings-apply"
    changed = len(PRESETS[BALANCED].values)
    buttons = "return [...document.querySelectorAll('#settings_onediff .onediff-settings-head button')]"
    click_in_bar = f"document.querySelectorAll('{bar} button')[arguments[0]].click()"

    def speeds() -> list[str]:
        return page.run(f"{buttons}.map(at => at.textContent)")[:4]

    def wait_for_bar(words: str) -> None:
        text = f"const at = document.querySelector('{bar}'); return at && !at.hidden ? at.innerText : ''"
        says = lambda: page.run(text)  # noqa: E731
        page.wait(lambda: words in says() if words else not says(), f"{words!r} in the bar", 20)

    with webui.options(onediff_deepcache_interval=1):
        page.refresh()
        show_settings(page)
        page.wait(lambda: page.run(buttons) and speeds()[0] == "Exact", "the speeds", 20)
        wait_for_bar("")
        page.run(f"{buttons}.find(at => at.textContent === 'Balanced').click()")
        page.wait(lambda: speeds()[:2] == ["Exact (in force)", "Balanced (not applied)"], "the marks", 20)
        page.wait_for_text("setting_onediff_deepcache_interval", "Not applied. In force: 1", 20)
        wait_for_bar(f"{changed} changed options are not applied.")
        page.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "huge")
        page.wait_for_text("setting_onediff_prewarm", "'huge' is not a size", 20)
        wait_for_bar(f"{changed + 1} changed options are not applied; 1 has a wrong value.")
        page.run(click_in_bar, 0)
        page.wait(lambda: speeds()[:2] == ["Exact", "Balanced"], "Balanced in force", 30)
        toasts = "return document.querySelectorAll('.toast-body').length"
        page.wait(lambda: page.run(toasts) == 1, "one message", 20)
        page.run(click_in_bar, 1)
        wait_for_bar("")
        page.wait(lambda: "huge" not in page.text("setting_onediff_prewarm"), "the end of the error", 20)
        page.run(f"{buttons}.find(at => at.textContent === 'Exact').click()")
        wait_for_bar(f"{changed} changed options are not applied.")
        page.find("#settings_submit").click()
        wait_for_bar("")


def test_applying_settings_before_those_of_onediff_were_shown_causes_no_error(page) -> None:
    """OneDiff's script logs no error in the browser's console."""
    page.refresh()
    if not page.there("settings_submit"):
        pytest.skip("this gradio puts the settings on the page when they are first shown")
    page.driver.get_log("browser")
    page.run("document.getElementById('settings_submit').click()")
    # The page asks for the values in force 0.3 s later.
    time.sleep(1)
    page.wait_for_answers()
    assert [entry["message"] for entry in page.driver.get_log("browser") if "onediff" in entry["message"]] == []


def test_errors_in_the_options_are_not_shown_while_onediff_is_off_for_the_run(page) -> None:
    """The infotext of the image does not have the errors either."""
    open_advanced(page, TAB)
    page.type("#onediff_txt2img_changes :is(textarea, input)", "nonsense 5")
    page.find("#onediff_txt2img_changes :is(textarea, input)").send_keys(Keys.TAB)
    page.wait_for_text("onediff_txt2img_told", "no option 'nonsense'", 20)
    page.find("#onediff_txt2img_enabled input").click()
    page.wait_for_text("onediff_txt2img_set_here", "off for this run", 20)
    page.wait(lambda: page.text("onediff_txt2img_told").startswith("This run: the WebUI alone."), "no error", 20)
    # While it changes, gradio shows the seconds in its place.
    page.wait(lambda: page.text("onediff_txt2img_summary") == "", "nothing of the last image", 20)
    infotext = make_picture(page)
    assert "OneDiff: off" in infotext and "problem" not in infotext and "nonsense" not in infotext


# --- pasting ----------------------------------------------------------------------------------------------------------


# (the options of the image, the settings of the page into which its infotext is pasted, the accordion's values then).
PASTED = [
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
def test_a_pasted_infotext_sets_the_accordion_to_the_options_of_the_image(
    page, webui: WebUI, tab: str, made_with: dict[str, Any], options: dict[str, Any], expected: tuple[bool, str, str]
) -> None:
    """It does not matter what the accordion showed before, and what the settings tab has. made_with: the image's
    options. options: the options of the settings tab. expected: the checkbox, the preset, and the text of extra
    options."""
    need(webui, "img2img" if tab == "img2img" else "")
    infotext = webui.txt2img(steps=10, sampler_name="Euler", **one_run(**made_with)).info["infotexts"][0]
    show_tab(page, tab)
    open_advanced(page, tab)
    page.find(f"#onediff_{tab}_enabled input").click()
    page.type(f"#onediff_{tab}_changes :is(textarea, input)", "backend eager")
    with webui.options(**options):
        paste(page, tab, infotext)
        page.wait(lambda: accordion_values(page, tab) == expected, f"{expected}, not {accordion_values(page, tab)}", 30)
        if tab == "txt2img":
            said = infotext.partition("OneDiff: ")[2].partition(",")[0].strip()
            assert f"OneDiff: {said}" in make_picture(page, seed=7), "another run than that of the infotext"


def test_unused_parts_of_a_pasted_infotext_are_reported(standalone: WebUI, page: Any) -> None:
    """Messages name unknown presets and options, and values that are not allowed, also those of the demo's own fields,
    which keep their values."""
    said = "return [...document.querySelectorAll('.toast-body')].map(at => at.innerText).join(' ')"
    for options, parts in (
        ("speed Turbo; nonsense 5", ("no preset 'Turbo'", "no option 'nonsense'")),
        ("on; deepcache_interval 99", ("deepcache_interval does not take '99'; it takes 1 to 20.",)),
    ):
        paste(page, "txt2img", f"a fox\nSteps: 500, Sampler: Foo, Seed: 31, Size: 64x64, OneDiff: {options}")
        wrong_fields = "Sampling steps must be from 1 to 150, not 500", "Sampling method: 'Foo' is not a choice here"
        wanted = (*parts, *wrong_fields)
        page.wait(lambda wanted=wanted: all(part in page.run(said) for part in wanted), f"{wanted} on the page", 20)
        page.run("for (const at of document.querySelectorAll('.toast-close')) at.click()")
    assert page.run("return document.querySelector('#txt2img_steps input[type=number]').value") == str(SMALL["steps"])


def test_the_sentence_on_the_run_is_renewed_after_pasting_applying_resetting_and_generating(page, webui: WebUI) -> None:
    """The sentence "This run: ..." in the accordion names the options of the next image. It is renewed although the
    pointer is not moved to the accordion."""
    def told_without_pointing(expected: str) -> None:
        """Wait for the sentence on the txt2img tab, without moving the pointer to it."""
        page.choose_tab("txt2img")
        page.wait_for_text("onediff_txt2img_told", expected, 20)

    def apply() -> None:
        page.find("#settings_submit").click()

    name = "onediff_deepcache_interval"
    open_advanced(page, "txt2img")
    with webui.options(**{name: 1, "onediff_vae_precision": "auto"}):
        show_settings(page)
        page.type(f"#setting_{name} input[type=number]", 4)
        apply()
        told_without_pointing("This run: DeepCache interval 4.")
        show_settings(page)
        page.wait_for_text(f"setting_{name}", "Default: 1", 20)
        page.find(f"#setting_{name} .onediff-small").click()
        apply()
        told_without_pointing("This run: Exact.")
        paste(page, "txt2img", "a fox\nSteps: 3, Sampler: Euler a, Seed: 31, Size: 64x64, OneDiff: on; "
                               "deepcache_interval 2")
        page.wait_for_text("onediff_txt2img_told", "This run: DeepCache interval 2.", 20)
        # As from another page.
        webui.set_options(onediff_vae_precision="fp32")
        # In three steps, DeepCache is inactive, and the infotext does not name inactive options.
        assert "OneDiff: on; vae_precision fp32" in make_picture(page, seed=31)
        page.wait_for_text("onediff_txt2img_told", "This run: DeepCache interval 2, VAE precision fp32.", 20)
        page.close_accordion("onediff_txt2img_accordion")
        here = "onediff_txt2img_set_here"
        page.wait(lambda: page.text(here) == "Set here: deepcache_interval 2", "it where the accordion is closed", 10)


# --- the demo ---------------------------------------------------------------------------------------------------------


def test_the_demo_refuses_a_wrong_width_in_one_sentence_and_never_shows_a_prompt_as_markup(
    standalone: WebUI, page: Any
) -> None:
    """The prompt is an <img> element with a script, which would change the page's title."""
    page.type("#txt2img_prompt textarea", "<img src=x onerror=document.title='taken'> & more")
    page.type("#txt2img_width input[type=number]", 65)
    page.click("txt2img_generate")
    page.wait_for_text("html_info_txt2img", "width is 65; it must be a multiple of 8", 30)
    page.type("#txt2img_width input[type=number]", 64)
    assert "<img src=x" in make_picture(page)
    assert page.driver.title == "OneDiff"


def test_the_demo_shows_progress_and_an_interrupt_keeps_the_unfinished_image(standalone: WebUI, page: Any) -> None:
    """The message says that the last image is unfinished. The progress line is gone then, and the gallery shows the
    image without a blurred background."""
    # One image may be over before a slow page has looked.
    for name, value in {"steps": 150, "width": 128, "height": 128, "batch_count": 20}.items():
        page.type(f"#txt2img_{name} input[type=number]", value)
    page.click("txt2img_generate")
    page.wait(lambda: "of 150" in page.text("txt2img_results"), "the progress line", 60)
    page.click("txt2img_interrupt")
    page.wait_for_text("html_info_txt2img", "Interrupted: the last image is unfinished.", 30)
    page.type("#txt2img_batch_count input[type=number]", 1)
    assert "of 150" not in page.text("txt2img_results") and "Time taken" in page.text("html_info_txt2img")
    blur = "return getComputedStyle(document.querySelector('#txt2img_gallery .preview')).backdropFilter"
    assert page.run(blur) == "none", "a blurred copy of the image would show through"


def test_a_new_page_fits_a_phone_sends_nothing_to_other_servers_and_logs_no_error(
    browser, standalone: WebUI, tmp_path
) -> None:
    """The demo's page, in the dark theme, with an image made. test_accessibility.py checks OneDiff's own parts of the
    page in both themes and at two widths."""
    browser.size_page(400)
    browser.watch_network(True)
    browser.driver.get("about:blank")
    for log in ("browser", "performance"):
        browser.driver.get_log(log)
    try:
        page = open_page(browser, f"{standalone.url}/?__theme=dark")
        make_picture(page)
        messages = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
        for tab in ("Settings", "txt2img"):
            browser.choose_tab(tab)
            assert browser.run("return document.documentElement.scrollWidth") <= 400
        browser.driver.save_screenshot(str(tmp_path / "page.png"))
    finally:
        browser.watch_network(False)
        browser.forget_size()
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    own = (standalone.url, "data:", "blob:", "chrome:", "chrome-extension:", "about:")
    assert [request["request"]["url"] for request in sent if not request["request"]["url"].startswith(own)] == []
    assert [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert Image.open(tmp_path / "page.png").convert("L").getpixel((2, 500)) < 128
