"""The Compare page, used as a user would."""
from __future__ import annotations

import io
import re
from typing import Any

import numpy
import pytest
import requests
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI
from webui_compare_tab import CURRENT, OFF, Compare
from webui_page import choose, open_advanced, reset_accordion


@pytest.fixture
def compare(opened: Any, webui: WebUI) -> Compare:
    """The Compare page."""
    shown = Compare(opened, webui)
    shown.start_over()
    return shown


def pixels(address: str) -> numpy.ndarray:
    image = Image.open(io.BytesIO(requests.get(address, timeout=30).content))
    return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def test_comparing_off_with_current_settings_shows_images_of_txt2img_and_their_differences(
    compare: Compare, webui: WebUI
) -> None:
    """The WebUI computes the left image, OneDiff the right one. The left image is that of txt2img with the same fields;
    the largest difference in the table is that of the two images."""
    before = webui.calls()
    numbers = compare.run_to_end(seed=77, prompt="an owl, \"quoted\" & <bold>")
    calls = webui.calls()
    assert calls["host"] - before["host"] >= 6 and calls["graph"] + calls["plain"] > before["graph"] + before["plain"]
    assert f"Left: {OFF}" in numbers and f"Right: {CURRENT}" in numbers
    ((seed, verdict, psnr, ssim, largest, _, left_time, right_time),) = compare.rows()
    assert seed == "77" and "paler" not in verdict
    assert float(ssim) > 0.99 and (psnr == "equal" or float(psnr.split()[0]) > 40)
    assert left_time.endswith(" s") and right_time.endswith(" s")
    left, right, _ = map(pixels, compare.images())
    assert abs(left - right).max() == int(largest)
    sampler = compare.page.run("return document.querySelector('#txt2img_sampling input').value")
    request = {"prompt": "an owl, \"quoted\" & <bold>", "seed": 77, "cfg_scale": 7, "sampler_name": sampler}
    assert abs(left - webui.txt2img(**request).arrays[0]).max() <= 1


def test_a_comparison_names_each_sides_changed_options_and_has_a_row_for_each_seed(compare: Compare) -> None:
    """The seeds are 21 to 23, and each has a left, a right and a difference image. If the prompt were not escaped, it
    would end a script element of the page."""
    compare.choose("compare_left", "Exact")
    compare.choose("compare_right", "Fast")
    numbers = compare.run_to_end(
        prompt="a </script><b>café</b>", steps=6, images=3, left_changes="backend eager",
        right_changes="skip_negative_after 50",
    )
    assert "Left: Exact + backend eager" in numbers and "on; backend eager" in numbers
    assert "Right: Fast + skip_negative_after 50" in numbers and "on; speed Fast; skip_negative_after 50" in numbers
    assert [row[0] for row in compare.rows()] == ["21", "22", "23"] and len(compare.images()) == 9


def test_the_viewer_has_a_slider_a_flip_view_a_difference_view_and_a_strip_of_seeds(compare: Compare) -> None:
    """Mouse and arrow keys move the slider. The flip view shows the other side after a click on its button or on the
    image. The strip chooses the seed. After a reload of the page, the result is shown again."""
    page = compare.page
    compare.choose("compare_right", "Fast")
    compare.run_to_end(seed=31, images=2, steps=6, width=128, height=64)
    assert compare.view() == "slider" and compare.names() == [f"Left: {OFF}", "Right: Fast"]
    assert compare.split() == (50, 50, "50 % left, 50 % right")
    frame = page.find("[data-onediff-viewer] .onediff-frame")
    width = frame.size["width"]
    assert width >= 512 and abs(width / frame.size["height"] - 2) < 0.02
    pointer = ActionChains(page.driver)
    pointer.move_to_element(frame).click_and_hold().move_by_offset(round(width / 4), 0).release().perform()
    assert abs(compare.split()[0] - 75) <= 1 and compare.split()[0] == compare.split()[1]
    there = compare.split()[0]
    pointer.send_keys(Keys.ARROW_LEFT).perform()
    assert compare.split()[:2] == (there - 1, there - 1) and compare.view() == "slider"
    left, right, difference = (compare.drawn(name) for name in ("left", "right", "difference"))
    assert [left, right, difference] == compare.images()[:3]
    for seen, name in (("left", f"Left: {OFF}"), ("right", "Right: Fast"), ("left", f"Left: {OFF}")):
        compare.choose_view("flip")
        assert compare.view() == seen and compare.names() == [name]
    page.find("[data-onediff-viewer] .onediff-frame").click()
    assert compare.view() == "right"
    compare.choose_view("difference")
    assert compare.view() == "difference" and compare.names()[0].startswith("Difference")
    compare.choose_view("slider")
    assert [seed.split()[0] for seed in compare.seeds()] == ["31", "32"]
    compare.choose_seed(32)
    assert [compare.drawn(name) for name in ("left", "right", "difference")] == compare.images()[3:]
    assert abs(pixels(compare.drawn("left")) - pixels(left)).max() > 0
    page.refresh()
    compare.show()
    page.wait(lambda: len(compare.seeds()) == 2, "both seeds on a page that is opened anew", 20)
    assert compare.view() == "slider" and pixels(compare.drawn("left")).shape == (64, 128, 3)


def test_a_comparison_with_an_invalid_field_is_refused_with_a_sentence_below_it(compare: Compare, webui: WebUI) -> None:
    """The fields are the width, the number of images and the right side's options. Nothing is computed, the images of
    before stay, and the sentence disappears when another field changes."""
    compare.choose("compare_left", CURRENT)
    for wrong, place, part in (
        ({"width": 65}, "compare_told", "multiple of 8"),
        ({"images": 9}, "compare_told", "The number of images must be from 1 to 8, not 9."),
        ({"right_changes": "backend <b>warp</b>"}, "compare_right_told", "backend does not take '<b>warp</b>'"),
    ):
        before = webui.calls()
        images = compare.images()
        compare.start(**wrong)
        compare.wait_for_message(part, place)
        assert webui.calls() == before and compare.images() == images
        compare.page.find("#onediff_compare_left_changes :is(textarea, input)").send_keys("!")
        compare.page.wait(lambda at=place: not compare.text(at), "the sentence to disappear", 10)


def test_a_waiting_comparison_survives_a_reload_of_the_page_and_a_cancel_of_the_running_one(
    compare: Compare, webui: WebUI
) -> None:
    """A second click on the same comparison queues nothing. Each Cancel button cancels its own job. A reloaded page
    shows the running comparison as soon as it has an image."""
    page = compare.page
    compare.run_to_end(seed=5)
    compare.start(width=256, height=256, steps=120, seed=6)
    page.click("onediff_compare_start")
    compare.wait_for_message("The same comparison runs or waits already", "compare_told")
    compare.start(steps=4, seed=7, images=2)
    page.wait(lambda: compare.comparisons("queued"), "the second in the queue", 20)
    (waits,) = compare.comparisons("queued")
    assert "queued, waits for the comparison Off and Current settings" in waits
    (runs,) = compare.comparisons("running")
    # Four images of 120 steps, and more where a side is warmed up again.
    assert re.search(r"of (480|600|720)\b", runs) and "100 %" not in runs
    page.wait(lambda: "256x256, 120 steps" in compare.text("compare_numbers"), "the first image", 120)
    assert len(compare.images()) in (1, 3)
    page.refresh()
    compare.show()
    page.wait(lambda: "256x256, 120 steps" in compare.text("compare_numbers"), "it on the reloaded page", 20)
    compare.click_job("Compare Off and Current settings")
    page.wait(lambda: compare.comparisons("cancelled"), "the end of the first", 60)
    compare.wait_for_end()
    compare.wait_for_message("seed 7, ", "compare_numbers", 20)
    page.wait(lambda: [row[0] for row in compare.rows()] == ["7", "8"], "both seeds", 20)
    page.wait(lambda: len(compare.images()) == 6, "their images", 20)
    calls = webui.calls()
    jobs = webui.get("/onediff/v1/jobs")["jobs"]
    made = [job for job in jobs if job["kind"] == "comparison"][-3:]
    assert [(job["state"], job["share"] == 1) for job in made] == [("done", True), ("cancelled", False), ("done", True)]
    assert all(job["done"] == job["total"] for job in made if job["state"] == "done")
    compare.click_at("#onediff_compare_jobs .onediff-job-cancelled ~ .onediff-job-done [data-onediff-show]")
    page.find("#onediff_compare_jobs [data-onediff-clear]").click()
    page.wait(lambda: not compare.text("compare_jobs"), "an empty list", 20)
    assert webui.get("/onediff/v1/jobs") == {"jobs": []} and webui.calls() == calls and compare.rows()


def test_current_settings_are_those_of_the_accordion_and_invalid_options_get_a_message(compare: Compare) -> None:
    """Options of the left and the right side are invalid in turn. Current settings are options of txt2img's accordion,
    then a preset, then off; with off, a message says that both sides are made without OneDiff."""
    page = compare.page
    compare.start(left_changes="low_bit fp8")
    compare.wait_for_message("Left: 'low_bit fp8' has no effect where OneDiff is off", "compare_left_told")
    compare.start(right_changes="nonsense 5")
    compare.wait_for_message("Right: OneDiff has no option 'nonsense'.", "compare_right_told")
    assert not compare.text("compare_left_told") and not compare.text("compare_told")
    page.choose_tab("txt2img")
    open_advanced(page, "txt2img")
    field = "#onediff_txt2img_changes :is(textarea, input)"
    page.type(field, "vae_precision fp32; backend eager")
    page.wait_for_text("onediff_txt2img_told", "VAE precision fp32", 20)
    compare.show()
    numbers = compare.run_to_end(seed=9)
    assert "on; vae_precision fp32; backend eager" in numbers
    page.choose_tab("txt2img")
    choose(page, "onediff_txt2img_preset", "Draft")
    page.type(field, "backend eager")
    compare.show()
    page.wait(lambda: "Current settings: Draft; backend eager." in page.text("onediff_compare"), "what is current", 20)
    assert "on; speed Draft; backend eager" in compare.run_to_end(seed=10)
    page.choose_tab("txt2img")
    reset_accordion(page, "txt2img")
    page.find("#onediff_txt2img_enabled input").click()
    compare.show()
    page.wait(lambda: "Current settings: off for this run." in page.text("onediff_compare"), "that it is off", 20)
    compare.start(seed=11)
    compare.wait_for_message("Both sides are made without OneDiff.", "compare_told")
    compare.wait_for_end()
    page.choose_tab("txt2img")
    reset_accordion(page, "txt2img")


def test_a_pasted_consistency_report_is_compared_with_that_of_this_machine(compare: Compare) -> None:
    """HTML in the pasted report is shown as text."""
    # The page may still hold the report from before the last comparison.
    compare.page.refresh()
    report = compare.show_report()
    assert report.startswith("OneDiff consistency report, format 1\n[Model]\n") and "TF32 in products: " in report
    compare.compare_report(report, "Nothing differs")
    other = report.replace("TF32 in products: off", "TF32 in products: <b>on</b>")
    answer = compare.compare_report(other, "1 fact differs,")
    assert "PyTorch, TF32 in products: here off, there <b>on</b>" in answer
