"""The Cache page of the OneDiff tab in a browser, used as a user does: pre-warm sizes, read the table, pin, purge."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from test_in_progress import InBackground
from webui_client import PICTURE, WebUI
from webui_panel import TABLE, Panel, served


@pytest.fixture
def panel(opened: Any, webui: WebUI) -> Panel:
    """The Cache page, after all sizes were purged: its table is empty."""
    def purge() -> None:
        assert webui.post("/onediff/v1/purge", {"all": True}).status_code == 200

    shown = Panel(opened)
    shown.start_over(purge)
    shown.wait_for_rows()
    return shown


@contextlib.contextmanager
def while_an_image_is_made(webui: WebUI) -> Iterator[None]:
    """A context in which the WebUI makes an image, so that queued sizes do not begin. A call at a large size would go
    on for a minute after it is cancelled."""
    generation = InBackground(webui, {**PICTURE, "steps": 150, "width": 128, "height": 128})
    generation.wait_for_step(1)
    try:
        yield
    finally:
        webui.post("/sdapi/v1/interrupt")
        generation.pictures()


def test_a_pre_warm_shows_its_progress_and_makes_the_next_image_ready(panel: Panel, webui: WebUI) -> None:
    """The table and the list of jobs are updated without a click. The next image at a pre-warmed size makes no call of
    the host. A wrong size is refused, and the HTML in it is shown as text."""
    states: set[str] = set()
    shares: set[str] = set()

    def over() -> bool:
        shares.update(line for line in panel.jobs() if "%" in line)
        rows = panel.rows().values()
        states.update(word for row in rows for word in ("queued", "warming") if word in row)
        return len([row for row in rows if "checked" in row or "ready" in row]) == 2

    before = served(webui)
    host_before = webui.calls()["host"]
    panel.prewarm("<b>65x64</b>")
    panel.wait_for_message("65x64</b>' is not a size", "cache_result")
    assert panel.rows() == {} and served(webui) == before
    panel.prewarm("160x128 x2, 192x192")
    panel.page.wait(over, "the end of the queue", 300)
    assert shares and states == {"queued", "warming"}
    panel.page.wait(lambda: "empty" in panel.text("cache_totals"), "an empty queue", 20)
    assert served(webui) >= before + 2
    assert sum(" done in" in job for job in panel.jobs()[-2:]) == 2, panel.jobs()
    panel.click_at(f'{TABLE} [data-onediff-key^="160x128"] summary')
    assert ["4", "77"] in [row.split()[:2] for row in panel.texts(f"{TABLE} details tbody tr")]
    webui.txt2img(width=192, height=192)
    assert webui.calls()["host"] == host_before


def test_buttons_queue_the_usual_sizes_of_the_loaded_model_and_each_can_be_cancelled(
    panel: Panel, webui: WebUI
) -> None:
    """The model is SD 1.5. An image that is made meanwhile keeps the sizes in the queue: some WebUIs' models are large,
    and a size would take minutes."""
    shown = [family for family in ("SD1", "SD2", "SDXL")
             if any(row.is_displayed() for row in panel.page.driver.find_elements("id", f"onediff_presets_{family}"))]
    assert webui.status()["model"].startswith(("SD1", "SD 1.x")) and shown == ["SD1"]
    with while_an_image_is_made(webui):
        for size in ("512x512", "512x768", "768x512", "768x768"):
            panel.click(f"preset_SD1_{size}")
        # The first one has its turn already, and waits for the image.
        queued = lambda: [line.split(" ")[1] for line in panel.jobs("queued")]  # noqa: E731
        panel.page.wait(lambda: queued() == ["512x768", "768x512", "768x768"], "three jobs", 30)
        assert "waits for the image 128x128, 150 steps" in panel.jobs("running")[0]
        (image,) = panel.texts("#onediff_cache_jobs [data-onediff-kind=image]")
        assert image.startswith("Image 128x128, 150 steps") and "of 150" in image
        panel.prewarm("512x512")
        panel.wait_for_message("512x512: runs or waits already, not queued again.", "cache_result")
        panel.click_at('#onediff_cache_jobs button[aria-label="Cancel: Pre-warm 768x768"]')
        panel.page.wait(lambda: queued() == ["512x768", "768x512"], "two jobs", 30)
        panel.click("prewarm_cancel")
        panel.wait_for_message("cancelled", "cache_result")
    panel.page.wait(lambda: "queued" not in panel.text("cache_jobs"), "an empty queue", 120)


def test_each_image_size_gets_a_row_and_selected_rows_stay_selected_when_the_table_is_updated(
    panel: Panel, webui: WebUI
) -> None:
    """Unfolded details stay unfolded, too. After another client purges all sizes, which are those of the page's filter,
    there is no error in the browser's console, and new rows are shown."""
    for width in (96, 64):
        webui.txt2img(width=width, height=64)
    panel.page.wait(lambda: all("ms" in panel.rows().get(f"{width}x64", "") for width in (64, 96)), "rows", 30)
    panel.select("64x64")
    panel.click_at(f"{TABLE} details summary")
    panel.page.choose_tab("txt2img")
    webui.txt2img(width=80, height=64)
    panel.show()
    panel.page.wait(lambda: next(iter(panel.rows())) == "80x64", "the present state when the tab is opened", 5)
    assert panel.selected() == ["64x64"]
    assert len(panel.page.run(f"return [...document.querySelectorAll('{TABLE} details[open]')]")) == 1
    panel.click_at(f"{TABLE} [data-onediff-every]")
    assert len(panel.selected()) == 3
    panel.choose("model", webui.status()["model"])
    panel.page.wait(lambda: len(panel.rows()) == 3, "all rows of the only model", 20)
    # Another client purges the sizes of the model that this page's filter names.
    panel.page.driver.get_log("browser")
    assert webui.post("/onediff/v1/purge", {"all": True}).status_code == 200
    panel.wait_for_rows()
    webui.txt2img(width=88, height=64)
    panel.page.wait(lambda: set(panel.rows()) == {"88x64"}, "another row", 20)
    errors = [entry for entry in panel.page.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == [] and panel.page.run("return document.querySelectorAll('.toast-body').length") == 0


def test_the_legend_explains_only_words_that_the_table_can_show_on_this_machine(panel: Panel, webui: WebUI) -> None:
    """VRAM and "ready" (with a CUDA graph) are explained only if the page shows graph memory, thus on a GPU."""
    webui.txt2img()
    panel.wait_for_rows("64x64")
    fold = "#onediff_cache .onediff-legend summary"
    panel.click_at(fold)
    words = "return [...document.querySelectorAll('.onediff-legend dt')].filter(at => at.checkVisibility())"
    explained = panel.page.run(f"{words}.map(at => at.innerText)")
    has_gpu = "Graph memory" in panel.text("cache_totals")
    assert {"checked", "WebUI step"} < set(explained)
    assert ("VRAM" in explained) == ("ready" in explained) == has_gpu
    panel.click_at(fold)


def test_selected_sizes_are_pinned_unpinned_and_purged(panel: Panel, webui: WebUI) -> None:
    """Each purge opens a dialog first, and one that is declined purges nothing. Sizes that were not purged stay ready:
    their next image makes no call of the host."""
    def pinned() -> set[str]:
        return {resolution for resolution, row in panel.rows().items() if "pinned" in row}

    panel.prewarm("64x64, 72x64, 80x64")
    panel.wait_until_ready("64x64", "72x64", "80x64")
    panel.select("64x64", "80x64")
    panel.click("pin")
    panel.wait_for_message("2 resolutions pinned.")
    panel.page.wait(lambda: pinned() == {"64x64", "80x64"}, "two marks", 20)
    assert sorted(panel.selected()) == ["64x64", "80x64"], "what is selected stays so when the table is drawn anew"
    panel.click("unpin")
    panel.page.wait(lambda: pinned() == set(), "no marks", 20)

    panel.select("72x64")
    panel.click("purge")
    panel.answer("Purge 72x64 of ", confirm=False)
    panel.wait_for_message("Nothing was purged.")
    assert set(panel.rows()) == {"64x64", "72x64", "80x64"}
    panel.purge("purge_disk", "Sizes that are ready stay ready", "of disk freed")
    panel.select("72x64")
    panel.purge("purge", "Purge 72x64 of ", "1 resolution purged")
    panel.wait_for_rows("64x64", "80x64")
    panel.page.wait(lambda: not panel.enabled("purge"), "disabled buttons, since nothing is selected", 10)
    host_before = webui.calls()["host"]
    before = served(webui)
    webui.txt2img(width=80, height=64)
    assert webui.calls()["host"] == host_before and served(webui) > before, "another one is ready still"

    panel.page.wait(lambda: panel.enabled("purge_all", "release"), "enabled buttons", 10)
    panel.purge("purge_all", "Purge all sizes of all models?", "2 resolutions purged")
    panel.wait_for_rows()
    panel.page.wait(lambda: not (panel.enabled("purge_all") or panel.enabled("release")), "nothing left to do", 10)
    before = served(webui)
    webui.txt2img()
    assert served(webui) >= before + 3


def test_a_size_is_pre_warmed_and_purged_by_keyboard_alone(panel: Panel, webui: WebUI) -> None:
    """Controls get the focus by JavaScript here; test_accessibility.py checks that the Tab key reaches each of them."""
    page = panel.page

    def press(*keys: str, at: str = "") -> None:
        if at:
            page.run("document.querySelector(arguments[0]).focus()", at)
        ActionChains(page.driver).send_keys(*keys).perform()

    press("64x64, 72x64", Keys.ENTER, at="#onediff_prewarm_sizes :is(textarea, input)")
    panel.wait_until_ready("64x64", "72x64")
    press(Keys.SPACE, at=f'{TABLE} tbody input[value="72x64 {webui.status()["model"]}"]')
    assert panel.selected() == ["72x64"]
    press(Keys.ENTER, at="#onediff_purge")
    panel.answer("Purge 72x64 of ")
    panel.wait_for_message("1 resolution purged")
    panel.wait_for_rows("64x64")
    at = "return document.activeElement.className"
    page.wait(lambda: page.run(at) == "onediff-table", "the focus near the button, which is disabled again", 10)
