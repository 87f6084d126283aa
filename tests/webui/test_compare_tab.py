"""The Compare and Consistency pages, used as a user does."""
from __future__ import annotations

import io
from typing import Any

import numpy
import pytest
import requests
from PIL import Image
from webui_client import WebUI
from webui_compare_tab import CURRENT, OFF, Compare


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
    told = compare.made(seed=77, prompt="an owl, \"quoted\" & <bold>")
    calls = webui.calls()
    assert calls["host"] - before["host"] >= 6 and calls["graph"] + calls["plain"] > before["graph"] + before["plain"]
    assert f"Left: {OFF}" in told and f"Right: {CURRENT}" in told
    ((seed, verdict, psnr, ssim, largest, _, left_time, right_time),) = compare.rows()
    assert seed == "77" and "paler" not in verdict
    assert float(ssim) > 0.99 and (psnr == "equal" or float(psnr.split()[0]) > 40)
    assert left_time.endswith(" s") and right_time.endswith(" s")
    left, right, _ = map(pixels, compare.images())
    assert abs(left - right).max() == int(largest)
    sampler = compare.page.run("return document.querySelector('#txt2img_sampling input').value")
    asked = {"prompt": "an owl, \"quoted\" & <bold>", "seed": 77, "cfg_scale": 7, "sampler_name": sampler}
    assert abs(left - webui.txt2img(**asked).arrays[0]).max() <= 1


def test_presets_with_changed_options_several_seeds(compare: Compare) -> None:
    compare.choose("compare_left", "Exact")
    compare.choose("compare_right", "Fast")
    told = compare.made(
        prompt="a </script><b>café</b>", steps=6, images=3, left_changes="backend eager",
        right_changes="skip_negative_after 50",
    )
    assert "Left: Exact + backend eager" in told and "on; backend eager" in told
    assert "Right: Fast + skip_negative_after 50" in told and "on; speed Fast; skip_negative_after 50" in told
    assert [row[0] for row in compare.rows()] == ["21", "22", "23"] and len(compare.images()) == 9


def test_wrong_input_gets_a_sentence(compare: Compare, webui: WebUI) -> None:
    compare.choose("compare_left", CURRENT)
    for wrong, part in (
        ({"width": 65}, "multiple of 8"), ({"images": 9}, "The number of images is from 1 to 8, not 9."),
        ({"right_changes": "backend <b>warp</b>"}, "backend does not take '<b>warp</b>'"),
    ):
        before = webui.calls()
        images = compare.images()
        compare.start(**wrong)
        compare.told(part, "compare_told")
        assert webui.calls() == before and compare.images() == images
        compare.page.find("#onediff_compare_left_changes :is(textarea, input)").send_keys("!")
        compare.page.wait(lambda: not compare.text("compare_told"), "the end of what was said of other values", 10)


def test_cancel(compare: Compare, webui: WebUI) -> None:
    cancel = compare.page.find("#onediff_compare_cancel")
    assert not cancel.is_enabled()
    compare.start(width=256, height=256, steps=100)
    compare.page.wait(cancel.is_enabled, "something to cancel", 30)
    compare.told("%", "compare_progress")
    compare.click("compare_cancel")
    compare.told("Stopped", "compare_told", 60)
    assert not compare.images()
    compare.page.wait(lambda: not cancel.is_enabled(), "nothing to cancel", 10)
    webui.txt2img()
    assert compare.made()


def test_consistency_report(compare: Compare) -> None:
    report = compare.show_report()
    assert report.startswith("OneDiff consistency report, format 1\n[Model]\n") and "TF32 in products: " in report
    compare.compare_report(report, "Nothing differs")
    other = report.replace("TF32 in products: off", "TF32 in products: <b>on</b>")
    told = compare.compare_report(other, "1 fact differs,")
    assert "PyTorch, TF32 in products: here off, there <b>on</b>" in told
