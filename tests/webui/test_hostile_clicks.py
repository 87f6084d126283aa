"""A user who double-clicks every button, uses two tabs of the browser, and pastes broken infotexts."""
from __future__ import annotations

from typing import Any

import pytest
from webui_client import WebUI
from webui_compare_tab import Compare
from webui_page import (
    accordion_values,
    choose_preset,
    make_picture,
    open_advanced,
    paste,
    show_inner_page,
    show_settings,
    show_tab,
)
from webui_panel import Panel

from lib_onediff.ui.amounts import milliseconds, seconds
from lib_onediff.ui.presets import AS_IN_SETTINGS, PRESETS

SEEN = "const seen = [...document.querySelectorAll(arguments[0])].filter(at => at.checkVisibility() && !at.disabled);"
BUTTONS = f"{SEEN} return seen.length"
TWICE = f"{SEEN} window.confirm = () => true;" """
for (const at of seen) { at.click(); at.click(); }
return seen.length;
"""
CHANGED = """
return document.querySelectorAll('#settings_onediff :is([data-onediff-changed], [data-onediff-pending])').length;
"""
ENDED_REQUESTS = ("AbortError", "Connection errored out", "Failed to fetch")
LEAVES_NO_TRACE = "Steps: 3, Sampler: Euler, Seed: 11, Size: 64x64"
MUTATED = (
    "", "OneDiff: ", "OneDiff: on; on; off; on", "OneDiff: on; speed", "OneDiff: on; speed speed Fast",
    "OneDiff: on; deepcache_interval 1e309", "OneDiff: on; deepcache_interval -0; backend \u202enative",
    "OneDiff: on; deepcache_interval 3; deepcache_interval 2", 'OneDiff: "on; backend eager',
    "OneDiff: " + "on; " * 400,
    "OneDiff: on; <img src=x onerror=document.title='taken'> 3",
    "OneDiff problem: none, OneDiff: on; vae_precision fp32",
)


def twice(page: Any, selector: str, least: int = 1) -> None:
    """Click each visible element of the selector twice in a row. least: how many there must be at least."""
    assert page.run(TWICE, selector) >= least, selector


def jobs_of(webui: WebUI) -> list[dict[str, Any]]:
    """The server's list of jobs, after a check that the numbers of each job fit together."""
    jobs = webui.get("/onediff/v1/jobs")["jobs"]
    assert all(0 <= job["share"] <= 1 and (job["share"] == 1) == (job["state"] == "done") for job in jobs), jobs
    assert all(job["done"] == job["total"] for job in jobs if job["state"] == "done" and job["kind"] == "comparison")
    assert all(job["done"] <= job["total"] for job in jobs), jobs
    assert sum(job["state"] == "running" and job["kind"] != "image" for job in jobs) <= 1, jobs
    assert not [job for job in jobs if job["state"] in ("done", "cancelled", "failed") and job["what"]], jobs
    return jobs


def pending(webui: WebUI) -> list[dict[str, Any]]:
    """The jobs that are queued or running."""
    return [job for job in jobs_of(webui) if job["state"] in ("queued", "running")]


def comparisons(webui: WebUI) -> list[dict[str, Any]]:
    return [job for job in jobs_of(webui) if job["kind"] == "comparison"]


def errors_of(page: Any) -> list[str]:
    """The errors in the browser's console since the last call."""
    return [entry["message"] for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"]


def reload(page: Any) -> None:
    """Reload the page. The only errors in the console may be requests of the earlier page that the browser has
    ended."""
    assert not errors_of(page)
    page.refresh()
    assert not [error for error in errors_of(page) if not any(ended in error for ended in ENDED_REQUESTS)]


def click_everything(page: Any, webui: WebUI) -> None:
    """Double-click every button of the txt2img tab and of OneDiff's pages, also those that purge what others make."""
    open_advanced(page, "txt2img")
    twice(page, "#txt2img_toprow button", 6)
    twice(page, ".onediff-accordion button", 2)
    for name in ("Compare", "Cache"):
        show_inner_page(page, name)
        root = f"#onediff_{name.lower()}"
        page.wait(lambda at=root: page.run(BUTTONS, f"{at} button"), f"the page {name}", 20)
        twice(page, f"{root} button:not([data-onediff-size]), {root} [data-onediff-size='64x64']")
    show_settings(page)
    heads = "#settings_onediff .onediff-settings-head button"
    page.wait(lambda: page.run(BUTTONS, heads), "the speeds", 20)
    # The last button resets all settings, so that none is left to apply.
    twice(page, heads, 5)
    twice(page, "#settings_submit")
    page.wait(lambda: not page.run(CHANGED), "defaults, and none that is not applied", 20)
    page.wait(lambda: not pending(webui), "the end of all that was begun", 120)


def compare_in_two_tabs(page: Any, webui: WebUI) -> None:
    """Double-click Compare in two tabs while an image is made, and reload the first tab before its comparison has
    ended. Each tab's double click makes one comparison, which is completed, and both tabs can show both results."""
    compare = Compare(page, webui)
    compare.show()
    wanted = {"seed": 41, "images": 2, "width": 128, "height": 128, "steps": 10}
    before = {job["id"] for job in comparisons(webui)}
    compare.ask(**wanted)
    page.run("document.getElementById('txt2img_generate').click()")
    twice(page, "#onediff_compare_start")
    page.wait(lambda: {job["id"] for job in comparisons(webui)} - before, "the comparison", 20)
    (first,) = {job["id"] for job in comparisons(webui)} - before
    reload(page)
    own = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.open(webui.url)
    compare.show()
    compare.ask(**{**wanted, "seed": 61, "images": 1})
    twice(page, "#onediff_compare_start")
    page.wait(lambda: len({job["id"] for job in comparisons(webui)} - before) == 2, "the second tab's", 20)
    page.wait(lambda: not pending(webui), "the end of both", 120)
    made = {job["id"]: job for job in comparisons(webui) if job["id"] not in before}
    assert [job["state"] for job in made.values()] == ["done", "done"], made
    (second,) = made.keys() - {first}
    for tab in (page.driver.current_window_handle, own):
        page.driver.switch_to.window(tab)
        compare.show()
        for job, seeds in ((first, ["41", "42"]), (second, ["61"])):
            compare.click_at(f"#onediff_compare_jobs [data-onediff-show='{job}']")
            page.wait(lambda now=seeds: [row[0] for row in compare.rows()] == now, f"seeds {seeds}", 20)
            page.wait(lambda now=seeds: len(compare.images()) == 3 * len(now), "their images", 20)
        if tab != own:
            assert not errors_of(page)
            page.driver.close()


def paste_what_is_broken(page: Any, webui: WebUI) -> None:
    """Paste broken infotexts. The accordion keeps a valid preset, and markup in a text is not run."""
    for text in MUTATED:
        paste(page, "txt2img", f"a fox\n{LEAVES_NO_TRACE}, {text}")
        paste(page, "txt2img", f"a fox\n{LEAVES_NO_TRACE[:len(text) % 40]}{text}")
        assert accordion_values(page, "txt2img")[1] in (AS_IN_SETTINGS, *PRESETS)
    assert page.driver.title != "taken"


def numbers_agree(page: Any, webui: WebUI) -> None:
    """Make an image, and check that the accordion and the Cache page show the times of the server's status."""
    assert "Size: 64x64" in make_picture(page)
    page.open_accordion("onediff_txt2img_accordion")
    page.wait_for_text("onediff_txt2img_status", "64x64", 30)
    known = webui.status()
    step = milliseconds(known["step_ms"])
    page.wait_for_text("onediff_txt2img_summary", f"{seconds(known['image']['seconds'])}/image", 20)
    page.wait_for_text("onediff_txt2img_status", step, 20)
    panel = Panel(page)
    panel.show()
    (row,) = [row for row in webui.get("/onediff/v1/shapes")["rows"] if row["resolution"] == "64x64"]
    page.wait(lambda: milliseconds(row["step_ms"]) in panel.rows().get("64x64", ""), f"{row} in the table", 20)


def test_after_double_clicks_in_two_tabs_and_broken_infotexts_the_page_agrees_with_the_status(
    opened: Any, webui: WebUI
) -> None:
    """There is no error in the browser's console, no comparison is lost or made twice, and the accordion and the Cache
    page show the values of the server's status. The steps are the functions above, in order."""
    page = opened
    show_tab(page, "txt2img")
    errors_of(page)
    click_everything(page, webui)
    reload(page)
    show_tab(page, "txt2img")
    compare_in_two_tabs(page, webui)
    show_tab(page, "txt2img")
    open_advanced(page, "txt2img")
    choose_preset(page, "txt2img", "Fast")
    paste_what_is_broken(page, webui)
    show_tab(page, "txt2img")
    numbers_agree(page, webui)
    assert not errors_of(page)


@pytest.fixture(autouse=True)
def as_a_new_page(browser: Any) -> Any:
    """Closes all tabs of the browser but one after the test, also if it fails."""
    yield
    first, *others = browser.driver.window_handles
    for other in others:
        browser.driver.switch_to.window(other)
        browser.driver.close()
    browser.driver.switch_to.window(first)
