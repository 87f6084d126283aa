"""Draws the screenshots in .readme, only with `install.py --test --pictures`: those of the demo with its model emoji-sd
on a CPU, or, with `--webui URL`, the one of that WebUI."""
from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import pytest
from webui_client import WebUI
from webui_compare_tab import Compare
from webui_page import TAB, choose_preset, make_picture, open_page, show_settings

FOLDER = Path(__file__).parents[2] / ".readme"
WIDTH = 1100
MARGIN = 8
SIZES = ((256, 256), (256, 320))
DRAWN = "demo", "accordion", "cache", "compare", "settings"


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Any, standalone: WebUI) -> Any:
    """The demo's page, after two images of each of two sizes, whose measurements the screenshots show."""
    if not request.config.getoption("--pictures"):
        pytest.skip("drawn with --pictures")
    for width, height in SIZES:
        for _ in range(2):
            standalone.txt2img(width=width, height=height, steps=20)
    # Higher than any page: a scroll bar would be measured, and then not be there.
    browser.size_page(WIDTH, 4000)
    yield open_page(browser, f"{standalone.url}/?__theme=light", width=256, height=256, steps=20)
    browser.forget_size()


def draw(page: Any, selector: str, name: str, last: str = "") -> None:
    """Write a screenshot of an element, or of all elements from it to `last`, to the folder .readme. selector, last:
    CSS selectors. name: the name of the file."""
    page.find(selector)
    time.sleep(1)
    box = page.run("""
        const [first, last] = [...arguments].map(at => document.querySelector(at).getBoundingClientRect());
        const left = Math.min(first.left, last.left), right = Math.max(first.right, last.right);
        return [left + scrollX, first.top + scrollY, right - left, last.bottom - first.top];
    """, selector, last or selector)
    left, top, width, height = box
    drawn = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": {
        "x": max(0, left - MARGIN), "y": max(0, top - MARGIN), "width": width + 2 * MARGIN,
        "height": height + 2 * MARGIN, "scale": 1,
    }})
    (FOLDER / f"{name}.png").write_bytes(base64.b64decode(drawn["data"]))


def test_the_screenshot_of_a_webui_is_drawn(request: pytest.FixtureRequest, browser: Any, webui: WebUI) -> None:
    """The tab txt2img of the WebUI given by --webui. The machine needs a font with emoji."""
    if not request.config.getoption("--pictures") or webui.is_standalone:
        pytest.skip("drawn with --pictures and --webui")
    browser.size_page(WIDTH, 4000)
    page = open_page(browser, f"{webui.url}/?__theme=light", width=256, height=256, steps=20)
    page.open_accordion("onediff_txt2img_accordion")
    enabled = "#onediff_txt2img_enabled input"
    page.find(enabled).click()
    make_picture(page)
    page.find(enabled).click()
    for seed in (21, 22):
        page.type("#txt2img_seed input[type=number]", seed)
        make_picture(page, seed=seed)
    draw(page, "#txt2img_settings", "webui")
    browser.forget_size()


def test_the_screenshots_of_the_demo_are_drawn(page: Any, webui: WebUI) -> None:
    """The tab txt2img, the accordion, the pages Cache and Compare, and the settings."""
    page.type("#txt2img_prompt textarea", "an owl and a rocket on a blue background")
    page.open_accordion("onediff_txt2img_accordion")
    choose_preset(page, "txt2img", "Balanced")
    make_picture(page)
    draw(page, "#tabs", "demo")
    draw(page, ".onediff-accordion", "accordion")
    page.choose_tab("OneDiff")
    page.wait_for_text(TAB, "256x320", 20)
    # It names a folder of the machine that draws.
    page.run("document.querySelector('.onediff-disk small').style.display = 'none'")
    draw(page, f"#{TAB}", "cache")
    compare = Compare(page, webui)
    compare.show()
    compare.choose("compare_right", "Balanced")
    compare.run_to_end(prompt="an owl and a rocket on a blue background", width=256, height=256, steps=20, seed=7)
    draw(page, "[data-onediff-viewer]", "compare", last="#onediff_compare_numbers")
    draw(page, f"#{show_settings(page)}", "settings")
    assert all((FOLDER / f"{name}.png").stat().st_size > 10_000 for name in DRAWN)
