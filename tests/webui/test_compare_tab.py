"""The Compare and Consistency pages, used as a user does."""
from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from webui_client import WebUI
from webui_compare_tab import (
    CANCEL,
    COPIED,
    COPY,
    CURRENT,
    DIFFERENCES,
    FACTS,
    FACTS_COPY,
    HANDLE,
    IMAGES,
    LEFT,
    NUMBERS,
    OFF,
    OTHER_FACTS,
    RIGHT,
    SAVE,
    SAVED,
    START,
    TOLD,
    Compare,
)
from webui_models import Models
from webui_page import open_page


@pytest.fixture
def compare(browser, webui: WebUI, sd15: Models) -> Compare:
    """The Compare page."""
    webui.txt2img()  # Some hosts load the checkpoint with the first image.
    shown = Compare(open_page(browser, webui.url))
    shown.show()
    return shown


@pytest.fixture
def data_folder(standalone: WebUI, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below which the standalone host, and others that tests have started, keep their files."""
    if request.config.getoption("--webui", default=None):
        pytest.skip("only the host that the tests have started has its files here")
    return tmp_path_factory.getbasetemp()


def pixels(address: str) -> numpy.ndarray:
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    return numpy.asarray(Image.open(io.BytesIO(data)), dtype=numpy.int16)


def test_off_against_current(compare: Compare, webui: WebUI) -> None:
    """Both images are made, by the routes that were asked for, and shown with their numbers."""
    before = webui.calls()
    told = compare.made()
    calls = webui.calls()
    assert calls["host"] - before["host"] >= 6 and calls["graph"] + calls["plain"] > before["graph"] + before["plain"]
    assert f"Left: {OFF}" in told and f"Right: {CURRENT}" in told and "the WebUI's own UNet" in told
    ((seed, verdict, psnr, ssim, largest, *_, left_time, right_time),) = compare.rows()
    assert seed == "21" and "Washed out" not in verdict
    assert float(ssim) > 0.99 and (psnr == "equal" or float(psnr.split()[0]) > 40)
    assert left_time.endswith(" s") and right_time.endswith(" s")
    left, right, difference = map(pixels, compare.images())
    assert left.shape == right.shape == difference.shape == (64, 64, 3)
    assert abs(left - right).max() == int(largest) and (difference.any() == (left != right).any())
    assert left.std() > 5


def test_two_presets(compare: Compare) -> None:
    compare.choose(LEFT, "Quality first")
    compare.choose(RIGHT, "Speed first")
    told = compare.made(steps=6)
    assert "Left: Quality first" in told and "Right: Speed first" in told
    assert len(compare.images()) == 3 and [row[0] for row in compare.rows()] == ["21"]


def test_images_are_those_of_txt2img(compare: Compare, webui: WebUI) -> None:
    compare.made(seed=77)
    asked = {"prompt": "a lighthouse at dusk", "seed": 77, "steps": 3, "cfg_scale": 7, "sampler_name": "Euler a"}
    expected = webui.txt2img(**asked).arrays[0]
    for address in compare.images()[:2]:
        assert abs(pixels(address) - expected).max() <= 1


def test_slider_and_views_by_keyboard(compare: Compare) -> None:
    compare.made()
    page = compare.page
    handle = page.find(HANDLE)
    at = "return getComputedStyle(document.querySelector('.onediff-frame')).getPropertyValue('--onediff-at').trim()"
    assert page.run(at) == "50%"
    handle.send_keys("\ue012" * 5)  # the left arrow
    assert page.run(at) == "45%"
    seen = "return [...document.querySelectorAll('#%s figure')].filter(at => at.offsetParent).map(at => at.className)"
    assert page.run(seen % IMAGES) == ["onediff-left", "onediff-right"]
    page.run(f"document.querySelector('#{IMAGES} input[type=radio]').focus()")
    page.driver.switch_to.active_element.send_keys("\ue014")  # the right arrow
    assert page.run(seen % IMAGES) == ["onediff-left", "onediff-right"]
    assert page.driver.find_elements("css selector", HANDLE)[0].is_displayed() is False
    page.driver.switch_to.active_element.send_keys("\ue014")
    assert page.run(seen % IMAGES) == ["onediff-map"]


def test_several_seeds_and_changed_options(compare: Compare) -> None:
    compare.choose(LEFT, CURRENT)
    told = compare.made(images=3, left_changes="backend eager; verify off", right_changes="backend cudagraph")
    assert "on; backend eager; verify off" in told and "on; backend cudagraph" in told
    assert [row[0] for row in compare.rows()] == ["21", "22", "23"]
    first = compare.images()
    compare.page.find("#onediff_compare_seeds label:nth-of-type(3)").click()
    compare.page.wait(lambda: compare.images() != first and len(compare.images()) == 3, "another image", 20)


@pytest.mark.parametrize("values, part", [
    ({"width": 65}, "multiple of 8"), ({"left_changes": "speed 9"}, "no option 'speed'"),
    ({"right_changes": "backend <b>warp</b>"}, "backend does not take '<b>warp</b>'"),
])
def test_wrong_input_gets_a_sentence(compare: Compare, webui: WebUI, values: dict[str, Any], part: str) -> None:
    before = webui.calls()
    compare.start(**values)
    compare.told(part, TOLD)
    assert webui.calls() == before and not compare.images()
    assert not compare.page.driver.find_elements("css selector", f"#{TOLD} p b")


def test_cancel(compare: Compare, webui: WebUI) -> None:
    compare.start(width=256, height=256, steps=100)
    compare.page.wait(lambda: "%" in compare.page.text(TOLD), "word of the progress", 30)
    compare.click(CANCEL)
    compare.told("Stopped", TOLD, 60)
    assert not compare.images()
    time.sleep(1)
    webui.txt2img()
    assert compare.made()


def test_values_come_from_txt2img(compare: Compare) -> None:
    page = compare.page
    page.choose_tab("txt2img")
    page.type("#txt2img_prompt textarea", "an owl, \"quoted\" & <bold>")
    page.type("#txt2img_width input[type=number]", 96)
    compare.show()
    compare.click(COPY)
    value = "return document.querySelector('#onediff_compare_%s textarea, #onediff_compare_%s input').value"
    page.wait(lambda: page.run(value % ("width", "width")) == "96", "the width", 10)
    assert page.run(value % ("prompt", "prompt")) == "an owl, \"quoted\" & <bold>"
    assert page.run(value % ("height", "height")) == "64" and page.run(value % ("seed", "seed")) == "11"


def test_report_is_saved(compare: Compare) -> None:
    compare.made(images=2)
    compare.click(SAVE)
    assert "2 PNGs" in compare.told("Saved onediff-compare/", SAVED)


def test_report_needs_nothing_else(compare: Compare, data_folder: Path) -> None:
    compare.made(prompt="a </script><b>café</b>")
    compare.click(SAVE)
    told = compare.told("Saved onediff-compare/", SAVED)
    found = data_folder.glob(f"data*/{told.split(' ')[1].rstrip(',')}")
    (page_file,) = {page.resolve() for page in found}  # pytest keeps a link to its newest folder
    text = page_file.read_text(encoding="utf-8")
    assert "a &lt;/script&gt;&lt;b&gt;café&lt;/b&gt;" in text and "</script>" not in text
    assert all(address in text for address in compare.images())
    assert "[PyTorch]" in text and str(data_folder) not in text
    (image,) = page_file.parent.glob(f"{page_file.stem}-seed-*.png")
    chunks = Image.open(image).info
    assert "Seed: 21" in chunks["parameters"] and "OneDiff: off" in chunks["parameters"]
    described = json.loads(chunks["OneDiff comparison"])
    assert [side["settings"] for side in described["sides"]] == ["off", "on"]
    assert chunks["OneDiff consistency"].startswith("OneDiff consistency report")


def test_consistency_report(compare: Compare) -> None:
    page = compare.page
    compare.show("Consistency")
    shown = f"return document.querySelector('#{FACTS} textarea').value"
    page.wait(lambda: page.run(shown), "this machine's report", 20)
    report = page.run(shown)
    assert report.startswith("OneDiff consistency report, format 1\n[Machine]\n") and "TF32 in products: " in report
    compare.click(FACTS_COPY)
    compare.told("opied", COPIED)
    page.type(f"#{OTHER_FACTS} textarea", page.run(shown))
    compare.told("Nothing differs", DIFFERENCES)
    other = report.replace("TF32 in products: off", "TF32 in products: <b>on</b>")
    page.type(f"#{OTHER_FACTS} textarea", other)
    told = compare.told("1 fact differs.", DIFFERENCES)
    assert "PyTorch, TF32 in products: here off, there <b>on</b>" in told
    page.type(f"#{OTHER_FACTS} textarea", "hello")
    compare.told("no consistency report", DIFFERENCES)


@pytest.mark.parametrize("width", [1500, 400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_of_ours_sticks_out(
    browser, webui: WebUI, compare: Compare, width: int, theme: str, tmp_path: Path
) -> None:
    browser.size_page(width)
    try:
        open_page(browser, f"{webui.url}/?__theme={theme}")
        compare.show()
        compare.made(images=2)
        assert browser.sticking_out("onediff_compare") == []
        browser.find(f"#{NUMBERS}")
        browser.driver.save_screenshot(str(tmp_path / "compare.png"))
        compare.show("Consistency")
        assert browser.sticking_out("onediff_facts_page") == []
    finally:
        browser.forget_size()


def test_both_sides_can_be_chosen(compare: Compare) -> None:
    compare.choose(LEFT, CURRENT)
    compare.choose(RIGHT, OFF)
    told = compare.made()
    assert f"Left: {CURRENT}" in told and f"Right: {OFF}" in told
    assert compare.page.find(f"#{START}").is_enabled()
