"""Everybody can read and use OneDiff's parts of the page: axe-core's rules in both themes, the keyboard alone, narrow
pages, and no control that moves while text changes."""
from __future__ import annotations

import io
from typing import Any

import pytest
from busy import attempts
from grid import WHOLE, grid
from PIL import Image, ImageStat
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from webui_axe import CONTRAST, LEVELS, violations
from webui_client import WebUI
from webui_compare_tab import Compare
from webui_models import Models
from webui_page import TAB, make_picture, open_advanced, open_page, show_inner_page, show_settings, show_tab

ACCORDION = ".onediff-accordion"
ACCORDION_TAB = "txt2img"
PAGES = ("Cache", "Compare")
MOST_TABS = 120
# Collects the elements that the Tab key has to reach, and returns their number. Of radio buttons, only the chosen ones.
STOPS = """
window.onediffReached = new Set();
addEventListener('focusin', event => onediffReached.add(event.target));
const stops = 'input, textarea, button, summary, a[href], [tabindex="0"]';
window.onediffStops = [...document.querySelectorAll(arguments[0])].flatMap(root => [...root.querySelectorAll(stops)])
  .filter(at => at.checkVisibility({visibilityProperty: true}) && !at.disabled && at.tabIndex >= 0
    && (at.type !== 'radio' || at.checked));
return onediffStops.length;
"""
MISSED = """
return onediffStops.filter(at => at.isConnected && !at.disabled && !onediffReached.has(at))
  .map(at => at.outerHTML.slice(0, 160));
"""
# Elements with text of their own that do not show all of it. A table scrolls in its box, and so may a long text field.
CUT = """
const pen = document.createElement('canvas').getContext('2d');
const longPlaceholder = at => {
  if (!at.matches('input') || !at.placeholder || at.value) return false;
  const {font, paddingLeft, paddingRight} = getComputedStyle(at);
  pen.font = font;
  return pen.measureText(at.placeholder).width > at.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
};
return [...document.querySelectorAll(`:is(${arguments[0]}) *`)].filter(at => {
  const own = [...at.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  // gradio cuts the captions of small images, and shows them whole beside a large one.
  if (!at.checkVisibility({visibilityProperty: true}) || at.matches('.caption-label')) return false;
  if (longPlaceholder(at)) return true;
  if (!own && !at.matches('input[role=listbox]') || at.closest('textarea, .onediff-table, .onediff-numbers'))
    return false;
  let box = at;
  while (getComputedStyle(box).display === 'inline') box = box.parentElement;
  return box.clientWidth > 1 && (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight + 3
    && getComputedStyle(box).overflowY !== 'visible');
}).map(at => at.outerHTML.slice(0, 160));
"""
BOXES = """
const neighbours = '.onediff-accordion, .onediff-accordion :is(input, button), #txt2img_settings > *';
return [...document.querySelectorAll(neighbours)].filter(at => at.checkVisibility()).map(at => {
  const {left, top, width, height} = at.getBoundingClientRect();
  return [at.id || at.getAttribute('aria-label') || at.className, left, top + scrollY, width, height];
});
"""


@pytest.fixture
def page(opened: Any) -> Any:
    show_tab(opened, "txt2img")
    return opened


@grid(theme=["light", "dark"], width=[1400, 400])
def test_every_view_passes_axe_cuts_no_text_and_fits_the_page(
    browser: Any, webui: WebUI, sd15: Models, theme: str, width: int
) -> None:
    """In the light and the dark theme, on a wide and on a narrow page. look() checks one view. least: how many texts
    axe must have found in it, which shows that the view was there."""
    webui.txt2img()
    found: dict[str, list[str]] = {}
    # The other rules ask for names and roles, which are the same in every theme and at every width.
    everything = LEVELS if WHOLE or (theme, width) == ("light", 1400) else CONTRAST

    def look(view: str, selector: str, least: int, rules: dict[str, Any] = everything) -> None:
        elem_id = f"onediff_{ACCORDION_TAB}" if selector == ACCORDION else selector[1:]
        wrong = violations(browser, selector, least, rules) + browser.run(CUT, selector) + browser.sticking_out(elem_id)
        if wrong:
            found[view] = wrong

    browser.size_page(width)
    try:
        open_page(browser, f"{webui.url}/?__theme={theme}")
        open_advanced(browser, "txt2img")
        look("accordion", ACCORDION, 15)
        browser.type("#onediff_txt2img_changes :is(textarea, input)", "deepcache_interval 99")
        browser.find("#onediff_txt2img_changes :is(textarea, input)").send_keys(Keys.TAB)
        browser.wait_for_text("onediff_txt2img_told", "it takes 1 to 20", 20)
        look("accordion with an error", ACCORDION, 15)
        # A comparison also uses the accordion's options.
        browser.type("#onediff_txt2img_changes :is(textarea, input)", "")
        compare = Compare(browser, webui)
        compare.show()
        compare.choose("compare_left", "Balanced")
        compare.run_to_end(images=2)
        look("Compare, made", f"#{TAB}", 30)
        compare.show_report()
        compare.compare_report("OneDiff consistency report, format 1\n[Model]\nName: other", "differ")
        look("Compare, the report", f"#{TAB}", 30)
        show_inner_page(browser, "Cache")
        browser.wait_for_text("onediff_cache_table", "64x64", 20)
        browser.run("for (const at of document.querySelectorAll('#onediff_cache details')) at.open = true")
        look("Cache", f"#{TAB}", 40)
        assert is_dark(browser.driver.find_element("id", TAB).screenshot_as_png) == (theme == "dark")
        for under_pointer in ("onediff_purge_all", "onediff_purge_disk"):
            browser.point_at(under_pointer)
            look(f"Cache, {under_pointer}", f"#{under_pointer}", 1, CONTRAST)
        section = show_settings(browser)
        browser.type("#setting_onediff_prewarm textarea, #setting_onediff_prewarm input", "huge")
        browser.wait_for_text(section, "Default: empty", 20)
        look("settings", f"#{section}", 40)
    finally:
        browser.forget_size()
    assert not found


def is_dark(png: bytes) -> bool:
    """Whether most of an image of a part of the page is dark."""
    return ImageStat.Stat(Image.open(io.BytesIO(png)).convert("L")).median[0] < 128


def press(browser: Any, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def test_the_tab_key_reaches_every_control(page: Any) -> None:
    """tab_through() presses Tab until every control of a part of the page has had the focus, at most MOST_TABS times.
    before: a selector of the element from which it starts. least: how many controls there must be."""
    browser = page

    def tab_through(selector: str, before: str, least: int) -> None:
        browser.run("document.querySelector(arguments[0]).focus()", before)
        assert browser.run(STOPS, selector) >= least, selector
        for _ in range(MOST_TABS):
            press(browser, Keys.TAB)
            if not browser.run(MISSED):
                return
        raise AssertionError(f"Tab does not reach {browser.run(MISSED)}")

    open_advanced(browser, "txt2img")
    tab_through(ACCORDION, "#txt2img_seed input", 12)
    show_inner_page(browser, "Cache")
    browser.wait_for_text("onediff_cache_table", "64x64", 20)
    for page, least in zip(PAGES, (20, 9), strict=True):
        show_inner_page(browser, page)
        tab_through(f"#{TAB}", "#onediff_pages button:not([tabindex='-1'])", least)
    section = show_settings(browser)
    browser.wait(lambda: browser.run("return document.querySelector('.onediff-settings-head')"), "the groups", 20)
    tab_through(f"#{section}", "#settings_submit", 15)


def settled_boxes(browser: Any) -> Any:
    """The boxes of BOXES, once two measurements 0.2 s apart agree: gradio sizes a text box after drawing it."""
    found = browser.run(BOXES)
    for _ in attempts(5, 0.2, least=5):
        now = browser.run(BOXES)
        if now == found:
            break
        found = now
    return found


def moved(before: Any, browser: Any) -> list[Any]:
    """(before, now) of each of the BOXES that has moved or changed its size."""
    now = settled_boxes(browser)
    assert len(now) == len(before)
    return [pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]]


def test_no_control_moves_when_the_status_or_an_error_changes(standalone: WebUI, page: Any) -> None:
    """BOXES measures the accordion, its inputs and buttons, and the txt2img settings around it."""
    browser = page
    with standalone.options(onediff_enabled=False):
        standalone.txt2img()
        open_advanced(browser, "txt2img")
        browser.wait_for_text("onediff_txt2img_told", "switched off", 20)
        before = settled_boxes(browser)
    browser.type("#onediff_txt2img_changes :is(textarea, input)", "backend maybe")
    browser.find("#onediff_txt2img_changes :is(textarea, input)").send_keys(Keys.TAB)
    browser.wait_for_text("onediff_txt2img_told", "is made without OneDiff", 20)
    assert not moved(before, browser)
    browser.type("#onediff_txt2img_changes :is(textarea, input)", "")
    make_picture(browser)
    browser.wait_for_text("onediff_txt2img_status", "without CUDA graphs", 20)
    assert not moved(before, browser)
    browser.run("""
        const at = document.querySelector(".onediff-accordion .onediff-summary");
        at.textContent = "1234 ms/step, 12.34 x, WebUI alone, and words that are too long for one line ".repeat(3);
    """)
    assert not moved(before, browser)
