"""What a user does on the WebUI's page, as functions for tests in a browser. tab: "txt2img" or "img2img"."""
from __future__ import annotations

from typing import Any

from selenium.webdriver.common.action_chains import ActionChains

TAB = "tab_onediff"
TAB_TITLE = "OneDiff"
AS_NEW = (True, "As in the settings", "")
SMALL = {"steps": 3, "width": 64, "height": 64, "seed": 11}


def accordion_values(page: Any, tab: str) -> tuple[bool, str, str]:
    """The values of the accordion's checkbox, preset and extra options."""
    if not page.there(f"onediff_{tab}_changes"):
        # gradio 6 makes what stands in an accordion when that is first opened.
        open_advanced(page, tab)
        page.close_accordion(f"onediff_{tab}_accordion")
    value = "return document.querySelector(arguments[0]).value"
    checked = page.driver.find_element("css selector", f"#onediff_{tab}_enabled input").is_selected()
    changes = page.run(value, f"#onediff_{tab}_changes :is(textarea, input)")
    return checked, page.run(value, f"#onediff_{tab}_preset input"), changes


def choose_preset(page: Any, tab: str, name: str) -> None:
    """Choose a preset in the accordion. The page updates the list of presets when the pointer reaches the accordion, so
    the pointer is moved there first."""
    ActionChains(page.driver).move_to_element(page.find(f"#{tab}_prompt")).perform()
    ActionChains(page.driver).move_to_element(page.find(f"#onediff_{tab}_accordion .label-wrap")).perform()
    page.wait_for_answers()
    choose(page, f"onediff_{tab}_preset", name)


def choose(page: Any, elem_id: str, name: str) -> None:
    """Choose the first option of a dropdown list that contains this text."""
    options = ":is(ul.options, ul[role=listbox]) li"
    option = f"return [...document.querySelectorAll('{options}')].find(at => at.innerText.includes(arguments[0]))"
    page.find(f"#{elem_id} input").click()
    page.wait(lambda: page.run(option, name), f"{name} in the list", 20)
    page.run(option, name).click()


def open_advanced(page: Any, tab: str) -> None:
    """Open OneDiff's accordion and the inner one with advanced options."""
    page.open_accordion(f"onediff_{tab}_accordion")
    page.open_accordion(f"onediff_{tab}_advanced")


def open_page(browser: Any, url: str, **values: Any) -> Any:
    """Open the page and fill in a small image in its txt2img tab. values: fields that differ from SMALL."""
    browser.open(url)
    ask_for_small_picture(browser, **values)
    return browser


def ask_for_small_picture(page: Any, **values: Any) -> None:
    """Fill in the fields of the txt2img tab for a small image. values: fields that differ from SMALL."""
    numbers = {f"#txt2img_{name} input[type=number]": value for name, value in {**SMALL, **values}.items()}
    page.fill({"#txt2img_prompt textarea": "a castle at night", **numbers})


def show_tab(page: Any, tab: str) -> None:
    """Show txt2img or img2img with the values of a new page. The last images, the text below them and their status are
    kept."""
    page.choose_tab(tab)
    if tab == "txt2img":
        ask_for_small_picture(page)
    reset_accordion(page, tab)


def reset_accordion(page: Any, tab: str) -> None:
    """Close the accordion after setting the values of a new page (AS_NEW): on, as in the settings, no extra options."""
    if accordion_values(page, tab) != AS_NEW:
        open_advanced(page, tab)
        if accordion_values(page, tab)[1] != AS_NEW[1]:
            choose(page, f"onediff_{tab}_preset", AS_NEW[1])
        if not accordion_values(page, tab)[0]:
            page.find(f"#onediff_{tab}_enabled input").click()
        page.type(f"#onediff_{tab}_changes :is(textarea, input)", "")
        page.wait(lambda: accordion_values(page, tab) == AS_NEW, f"{AS_NEW} in the accordion", 20)
    page.close_accordion(f"onediff_{tab}_accordion")


def make_picture(page: Any, tab: str = "txt2img", seed: int = SMALL["seed"]) -> str:
    """Click Generate and return the text below the new images. seed: the one on the page. If the last image was made
    with it, the next seed is used, since otherwise the old text could not be told from the new one."""
    if f"Seed: {seed}," in page.text(f"html_info_{tab}"):
        seed += 1
        page.type(f"#{tab}_seed input[type=number]", seed)
    page.click(f"{tab}_generate")
    return page.wait_for_text(f"html_info_{tab}", f"Seed: {seed},")


def paste(page: Any, tab: str, infotext: str) -> None:
    """Put a text into the prompt and click the button that reads infotext."""
    buttons = f"#{tab}_paste, #tab_{tab} #paste, #{tab}_tools #paste"
    page.type(f"#{tab}_prompt textarea", infotext)
    # Not by the pointer: a message of gradio's may lie over it for seconds.
    page.run("arguments[0].click()", page.find(buttons))


def show_inner_page(page: Any, name: str) -> None:
    """Show one of the pages in the OneDiff tab: Cache or Compare."""
    page.choose_tab(TAB_TITLE)
    page.wait(lambda: page.driver.find_element("id", TAB).is_displayed(), "the OneDiff tab", 20)
    tabs = page.driver.find_elements("css selector", "#onediff_pages button:not([tabindex='-1'])")
    next(tab for tab in tabs if tab.text.strip() == name).click()


def show_settings(page: Any) -> str:
    """Show OneDiff's section of the settings and return its id."""
    page.choose_tab("Settings")
    section = "settings_onediff"
    page.wait(lambda: page.there(section), "the settings", 30)
    if not page.driver.find_element("id", section).is_displayed():
        buttons = page.driver.find_elements("css selector", "#settings > .tab-nav button")
        next(button for button in buttons if button.text.strip() == "OneDiff").click()
    page.wait(lambda: page.driver.find_element("id", section).is_displayed(), "OneDiff's settings", 30)
    return section
