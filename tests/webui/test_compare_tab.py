"""The Compare and Consistency pages, used as a user does."""
from __future__ import annotations

import io
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
    LEFT,
    OFF,
    OTHER_FACTS,
    RIGHT,
    SAVE,
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


def pixels(address: str) -> numpy.ndarray:
    image = Image.open(io.BytesIO(requests.get(address, timeout=30).content))
    return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def test_off_against_current(compare: Compare, webui: WebUI) -> None:
    """Both images are made by the routes that were asked for, shown as txt2img makes them, and measured."""
    before = webui.calls()
    told = compare.made(seed=77)
    calls = webui.calls()
    assert calls["host"] - before["host"] >= 6 and calls["graph"] + calls["plain"] > before["graph"] + before["plain"]
    assert f"Left: {OFF}" in told and f"Right: {CURRENT}" in told
    ((seed, verdict, psnr, ssim, largest, *_, left_time, right_time),) = compare.rows()
    assert seed == "77" and "paler" not in verdict
    assert float(ssim) > 0.99 and (psnr == "equal" or float(psnr.split()[0]) > 40)
    assert left_time.endswith(" s") and right_time.endswith(" s")
    left, right, _ = map(pixels, compare.images())
    assert abs(left - right).max() == int(largest)
    asked = {"prompt": "a lighthouse at dusk", "seed": 77, "steps": 3, "cfg_scale": 7, "sampler_name": "Euler a"}
    assert abs(left - webui.txt2img(**asked).arrays[0]).max() <= 1


def test_presets_with_changed_options_several_seeds_and_the_report(compare: Compare) -> None:
    compare.choose(LEFT, "Exact")
    compare.choose(RIGHT, "Fast")
    told = compare.made(
        prompt="a </script><b>café</b>", steps=6, images=3, left_changes="backend eager",
        right_changes="guidance_end 0.5",
    )
    assert "Left: Exact + backend eager" in told and "on; backend eager" in told
    assert "Right: Fast + guidance_end 0.5" in told and "deepcache_interval 3" in told
    assert [row[0] for row in compare.rows()] == ["21", "22", "23"] and len(compare.images()) == 9
    links = (
        "return [...document.querySelectorAll('#onediff_compare_file a')].filter(link => link.checkVisibility())"
        ".map(link => link.href)"
    )
    compare.click(SAVE)
    (report,) = compare.page.wait(lambda: compare.page.run(links), "the link", 20)
    text = requests.get(report, timeout=30).content.decode()
    assert "a &lt;/script&gt;&lt;b&gt;café&lt;/b&gt;" in text and "[PyTorch]" in text and text.count("<img") == 9
    assert str(Path.home()) not in text
    compare.made(steps=2)
    assert not compare.page.run(links), "that was another comparison's"


def test_wrong_input_gets_a_sentence(compare: Compare, webui: WebUI) -> None:
    compare.choose(LEFT, CURRENT)
    right: dict[str, Any] = {"width": 64, "steps": 2, "left_changes": "", "right_changes": ""}
    for wrong, part in (
        ({"width": 65}, "multiple of 8"), ({"steps": 0}, "The number of steps is from 1 to 150, not 0."),
        ({"right_changes": "backend <b>warp</b>"}, "backend does not take '<b>warp</b>'"),
    ):
        before, images = webui.calls(), compare.images()
        compare.start(**{**right, **wrong})
        compare.told(part, TOLD)
        assert webui.calls() == before and compare.images() == images
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
    page.type(f"#{OTHER_FACTS} textarea", report.replace("TF32 in products: off", "TF32 in products: <b>on</b>"))
    told = compare.told("1 fact differs.", DIFFERENCES)
    assert "PyTorch, TF32 in products: here off, there <b>on</b>" in told
