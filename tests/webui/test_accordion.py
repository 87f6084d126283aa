"""The accordion of the txt2img tab: what a user sees of it closed, and its controls, which all write one text."""
from __future__ import annotations

import re
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI
from webui_page import (
    accordion,
    accordion_values,
    changed_options,
    choose,
    control,
    enabled_checkbox,
    make_picture,
    open_advanced,
    preset_list,
    show_tab,
    told,
)

TAB = "txt2img"
BOTH = ("deepcache_interval", "low_bit")
SUMMARY = f"onediff_{TAB}_summary"


@pytest.fixture
def page(opened: Any) -> Any:
    show_tab(opened, TAB)
    return opened


def shown(page: Any, name: str) -> str:
    """What a control shows."""
    return page.run("return document.querySelector(arguments[0]).value", control(TAB, name))


def text(page: Any) -> str:
    return accordion_values(page, TAB)[2]


def move(page: Any, name: str, value: int) -> None:
    """As dragging a slider, or typing beside it."""
    page.type(f"#onediff_{TAB}_{name} input[type=number]", value)


def test_closed_it_shows_its_checkbox_and_the_status(page) -> None:
    preset, box = page.find(f"#{preset_list(TAB)}"), page.find(enabled_checkbox(TAB))
    assert not preset.is_displayed() and box.is_displayed() and box.is_selected()
    make_picture(page)
    # gradio counts seconds beside it as long as it is asked for.
    page.wait(lambda: re.fullmatch(r".* ms/step, .*(graph|blocks)", page.text(SUMMARY)), "the status on one line", 30)
    box.click()
    assert not preset.is_displayed() and not box.is_selected(), "the checkbox does not open it"
    box.click()
    for opened in (True, False):
        page.find(f"#{accordion(TAB)} .label-wrap").click()
        page.wait(lambda now=opened: preset.is_displayed() is now, f"open: {opened}", 10)
        assert box.is_selected(), "opening and closing it switches nothing"


def test_what_is_moved_is_in_the_text_and_in_the_image(page, webui: WebUI) -> None:
    open_advanced(page, TAB)
    page.wait_for_text(told(TAB), "This run: on", 20)
    move(page, "deepcache_interval", 3)
    page.wait(lambda: text(page) == "deepcache_interval 3", "the text", 10)
    choose(page, f"onediff_{TAB}_vae_precision", "fp32")
    page.wait(lambda: text(page) == "deepcache_interval 3; vae_precision fp32", "the text", 10)
    page.wait_for_text(told(TAB), "deepcache_interval 3; vae_precision fp32.", 20)
    assert "deepcache_interval 3; vae_precision fp32" in make_picture(page)
    move(page, "deepcache_interval", 1)
    page.wait(lambda: text(page) == "vae_precision fp32", "a value that is nothing new to leave the text", 10)
    field = page.find(changed_options(TAB))
    field.send_keys("; deepcache_intervall 3")
    assert "Did you mean" not in page.text(told(TAB)), "nobody is corrected while typing"
    field.send_keys(Keys.TAB)
    page.wait_for_text(told(TAB), "Did you mean 'deepcache_interval'? Fix this, or", 20)


def test_the_controls_show_the_settings_the_preset_and_the_text(page, webui: WebUI) -> None:
    with webui.options(onediff_deepcache_depth=3):
        open_advanced(page, TAB)
        page.wait(lambda: shown(page, "deepcache_depth") == "3", "the settings tab's depth", 20)
        assert text(page) == ""
        page.type(changed_options(TAB), "backend eager; deepcache_interval 5; low_bit fp8")
        page.find(changed_options(TAB)).send_keys(Keys.TAB)
        page.wait(lambda: [shown(page, name) for name in BOTH] == ["5", "fp8"], "the text", 20)
        choose(page, preset_list(TAB), "Balanced")
        page.wait(lambda: text(page) == "backend eager", "the preset to set all of its own options", 10)
        page.wait(lambda: [shown(page, name) for name in BOTH] == ["3", "off"], "Balanced", 20)
        page.wait_for_text(told(TAB), "deepcache_depth 3; backend eager.", 20)
        move(page, "deepcache_interval", 3)
        assert text(page) == "backend eager"


def test_the_first_quick_click_opens_the_list_of_presets(page) -> None:
    # Without the pointer: its coming to the accordion asks the server, and the click follows at once.
    page.run("document.querySelector(arguments[0]).click()", f"#{accordion(TAB)} .label-wrap")
    page.find(f"#{preset_list(TAB)} input").click()
    offered = "return [...document.querySelectorAll('ul.options li')].map(at => at.innerText.trim())"
    page.wait(lambda: any("Balanced" in name for name in page.run(offered)), "the list", 10)
    page.wait_for_text(told(TAB), "This run: on", 20)
    assert any("Balanced" in name for name in page.run(offered)), "what the server said has closed the list"


def test_rows_are_in_line(page) -> None:
    open_advanced(page, TAB)
    top = "return document.getElementById(`onediff_txt2img_${arguments[0]}`).getBoundingClientRect().top"
    for row in (("preset", "vae_precision"), ("deepcache_interval", "deepcache_depth"), ("low_bit", "guidance_end")):
        assert len({round(page.run(top, name), 1) for name in row}) == 1
    middles = page.run("""
        const parts = [".onediff-title input", ".onediff-summary", ".label-wrap > span", ".label-wrap .icon"];
        return parts.map(part => document.querySelector(`.onediff-accordion ${part}`).getBoundingClientRect())
          .map(({top, height}) => top + height / 2);
    """)
    assert max(middles) - min(middles) < 1, "checkbox, status, name and arrow stand on one line"
