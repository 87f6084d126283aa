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
import requests
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
    OFF,
    OTHER_FACTS,
    RIGHT,
    SAMPLER,
    SAVE,
    SAVED,
    START,
    TOLD,
    Compare,
)
from webui_page import show_tab


@pytest.fixture
def compare(opened: Any) -> Compare:
    """The Compare page."""
    shown = Compare(opened)
    shown.start_over()
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
    assert seed == "21" and "paler" not in verdict
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


def test_wrong_input_gets_a_sentence(compare: Compare, webui: WebUI) -> None:
    compare.choose(LEFT, CURRENT)
    right: dict[str, Any] = {"width": 64, "steps": 2, "left_changes": "", "right_changes": ""}
    for wrong, part in (
        ({"width": 65}, "multiple of 8"), ({"steps": 0}, "The number of steps is from 1 to 150, not 0."),
        ({"left_changes": "speed 9"}, "no option 'speed'"),
        ({"right_changes": "backend <b>warp</b>"}, "backend does not take '<b>warp</b>'"),
    ):
        before, images = webui.calls(), compare.images()
        compare.start(**{**right, **wrong})
        compare.told(part, TOLD)
        assert webui.calls() == before and compare.images() == images
        assert not compare.page.driver.find_elements("css selector", f"#{TOLD} p b")
        compare.page.find("#onediff_compare_prompt textarea").send_keys("!")
        compare.page.wait(lambda: not compare.page.text(TOLD), "the end of what was said of other values", 10)


def test_cancel(compare: Compare, webui: WebUI) -> None:
    cancel = compare.page.find(f"#{CANCEL}")
    assert not cancel.is_enabled()
    compare.start(width=256, height=256, steps=100)
    compare.page.wait(cancel.is_enabled, "something to cancel", 30)
    compare.page.wait(lambda: "%" in compare.page.text(TOLD), "word of the progress", 30)
    compare.click(CANCEL)
    compare.told("Stopped", TOLD, 60)
    assert not compare.images()
    compare.page.wait(lambda: not cancel.is_enabled(), "nothing to cancel", 10)
    time.sleep(1)
    webui.txt2img()
    assert compare.made()


def test_values_come_from_txt2img(compare: Compare) -> None:
    page = compare.page
    show_tab(page, "txt2img")
    page.type("#txt2img_prompt textarea", "an owl, \"quoted\" & <bold>")
    page.type("#txt2img_width input[type=number]", 96)
    compare.show()
    compare.click(COPY)
    value = "return document.querySelector('#onediff_compare_%s textarea, #onediff_compare_%s input').value"
    page.wait(lambda: page.run(value % ("width", "width")) == "96", "the width", 10)
    assert page.run(value % ("prompt", "prompt")) == "an owl, \"quoted\" & <bold>"
    assert page.run(value % ("height", "height")) == "64" and page.run(value % ("seed", "seed")) == "11"


def test_each_side_has_the_accordions_controls(compare: Compare) -> None:
    page = compare.page
    assert not page.find("#onediff_compare_left_deepcache_interval").is_displayed(), "nothing of it counts"
    compare.choose(LEFT, "Balanced")
    value = "return document.querySelector(arguments[0]).value"
    interval = "#onediff_compare_%s_deepcache_interval input[type=number]"
    page.wait(lambda: page.run(value, interval % "left") == "2", "the preset's interval", 20)
    page.type(interval % "left", 4)
    page.wait_for_text("onediff_compare_left_told", "This run: on; deepcache_interval 4.", 20)
    page.type(interval % "right", 3)
    page.wait_for_text("onediff_compare_right_told", "This run: on; deepcache_interval 3.", 20)
    compare.choose("onediff_compare_right_vae_precision", "fp32")
    compare.choose("onediff_compare_right_low_bit", "fp8")
    page.wait_for_text("onediff_compare_right_told", "on; vae_precision fp32; low_bit fp8; deepcache_interval 3.", 20)
    told = compare.made()
    sides = "on; deepcache_interval 4\n", "on; vae_precision fp32; low_bit fp8; deepcache_interval 3\n"
    assert all(side in told for side in sides)
    compare.choose(LEFT, OFF)
    page.wait(lambda: not page.find(interval % "left").is_displayed(), "the end of what counts", 20)


# All at once: a line that comes above them moves them together.
PLACES = """
return arguments[0].map(selector => {
  const {left, top, height} = document.querySelector(selector).getBoundingClientRect();
  return [left, top, height];
});
"""


def test_fields_are_in_line(compare: Compare) -> None:
    fields = [f"#onediff_compare_{name} input" for name in ("width", "seed")] + [f"#{SAMPLER} .wrap-inner"]
    _, tops, heights = zip(*compare.page.run(PLACES, fields), strict=True)
    assert max(tops) - min(tops) <= 1 and max(heights) - min(heights) <= 2
    names = ("left", "prompt", "right", "negative")
    places = compare.page.run(PLACES, [f"#onediff_compare_{name}" for name in names])
    left, prompt, right, negative = (place[0] for place in places)
    assert abs(left - prompt) < 1 and abs(right - negative) < 1


def test_report_is_saved_and_linked(compare: Compare) -> None:
    compare.made(images=2)
    compare.click(SAVE)
    assert "2 PNGs" in compare.told("Saved onediff-compare/", SAVED)
    links = (
        "return [...document.querySelectorAll('#onediff_compare_files a')].filter(link => link.checkVisibility())"
        ".map(link => link.href)"
    )
    report, *images = compare.page.wait(lambda: compare.page.run(links), "the links", 20)
    answer = requests.get(report, timeout=30)
    assert answer.status_code == 200 and "<h1>OneDiff comparison</h1>" in answer.text
    assert [requests.get(image, timeout=30).content[1:4] for image in images] == [b"PNG", b"PNG"]
    compare.made()
    assert compare.page.text(SAVED) == "" and not compare.page.run(links), "that was another comparison's"


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


def test_nothing_of_ours_sticks_out(compare: Compare) -> None:
    browser = compare.page
    try:
        compare.made(images=2)
        assert browser.sticking_out_at_any_width("onediff_compare") == []
        browser.forget_size()
        compare.show("Consistency")
        assert browser.sticking_out_at_any_width("onediff_facts_page") == []
    finally:
        browser.forget_size()


def test_both_sides_can_be_chosen(compare: Compare) -> None:
    compare.choose(LEFT, CURRENT)
    compare.choose(RIGHT, OFF)
    told = compare.made()
    assert f"Left: {CURRENT}" in told and f"Right: {OFF}" in told
    assert compare.page.find(f"#{START}").is_enabled()
