"""The OneDiff tab, used as a user does: making sizes ready, and looking."""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from webui_client import WebUI
from webui_models import Models
from webui_page import accordion, make_picture, prewarm_button, prewarm_result, show_tab
from webui_panel import BATCH, CANCEL, JOBS, LENGTH, MODEL, ORDER, RESULT, TABLE, TOTALS, Panel, served


@pytest.fixture
def panel(opened: Any, webui: WebUI) -> Panel:
    """The OneDiff tab, with no resolution in it."""
    def purge() -> None:
        assert webui.post("/onediff/v1/purge", {"all": True}).status_code == 200

    shown = Panel(opened)
    shown.start_over(purge)
    shown.wait_for_rows()
    return shown


@contextlib.contextmanager
def while_an_image_is_made(webui: WebUI) -> Iterator[None]:
    """What is queued meanwhile does not begin: a call at a large size goes on for a minute after it was cancelled."""
    worker = threading.Thread(target=lambda: webui.txt2img(steps=150, width=128, height=128))
    worker.start()
    deadline = time.monotonic() + 60
    while not webui.get("/sdapi/v1/progress")["state"]["sampling_step"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield
    webui.post("/sdapi/v1/interrupt")
    worker.join(60)


def test_prewarm(panel: Panel, webui: WebUI) -> None:
    before, host_before = served(webui), webui.calls()["host"]
    panel.prewarm("96x64, 64x96 x2")
    panel.wait_until_ready("96x64", "64x96")
    assert served(webui) >= before + 2
    assert webui.calls()["host"] == host_before
    assert set(panel.rows()) == {"96x64", "64x96"}
    panel.page.wait(lambda: panel.page.text(JOBS).count("done in") >= 2, "two jobs done", 60)
    webui.txt2img(width=96, height=64)
    assert webui.calls()["host"] == host_before


def test_progress_is_seen_while_it_goes_on(panel: Panel) -> None:
    """Without touching the page: shares, what is done, and the rows' states."""
    seen: set[str] = set()
    states: set[str] = set()

    def over() -> bool:
        seen.update(line.split(" ", 1)[1] for line in panel.jobs())
        states.update(word for row in panel.rows().values() for word in ("queued", "warming", "checked", "ready")
                      if word in row)
        return len([row for row in panel.rows().values() if "checked" in row or "ready" in row]) == 2

    panel.prewarm("192x192, 256x192")
    panel.page.wait(over, "the end of the queue", 300)
    assert any("%" in line for line in seen) and any(line.startswith("queued") for line in seen), seen
    assert {"queued", "warming"} <= states and states & {"checked", "ready"}
    panel.page.wait(lambda: "empty" in panel.page.text(TOTALS), "an empty queue", 20)


def test_presets_of_the_loaded_model(panel: Panel, webui: WebUI) -> None:
    """One click queues a preset; it is taken out again, because the models of some hosts are large."""
    def shown() -> list[str]:
        return [family for family in ("SD1", "SD2", "SDXL")
                if panel.page.driver.find_element("id", f"onediff_presets_{family}").is_displayed()]

    assert webui.status()["model"].startswith(("SD1", "SD 1.x")) and shown() == ["SD1"]
    panel.click_at("#onediff_families input")
    panel.page.wait(lambda: shown() == ["SD1", "SD2", "SDXL"], "the other models' sizes", 20)
    panel.click_at("#onediff_families input")
    panel.page.wait(lambda: shown() == ["SD1"], "the loaded model's sizes alone", 20)
    with while_an_image_is_made(webui):
        panel.click("onediff_preset_SD1_4")
        # The first one has its turn already, and waits for the image.
        queued = lambda: [line.split(" ")[0] for line in panel.jobs("queued")]  # noqa: E731
        panel.page.wait(lambda: queued() == ["512x768", "768x512", "768x768"], "three jobs", 30)
        panel.press("Later", "512x768")
        panel.press("Cancel", "768x768")
        panel.page.wait(lambda: queued() == ["768x512", "512x768"], "the new order", 30)
        panel.click(CANCEL)
        panel.told("cancelled", RESULT)
    panel.page.wait(lambda: "queued" not in panel.page.text(JOBS), "an empty queue", 120)


def test_batch_and_prompt_length_are_chosen(panel: Panel, webui: WebUI) -> None:
    panel.choose(LENGTH, "154")
    panel.page.type(f"#{BATCH} input", 2)
    panel.prewarm("64x64")
    panel.page.wait(lambda: any(job.startswith("64x64 x2, 154 tokens done in") for job in panel.jobs()), "a job", 240)
    panel.click_at(f"#{TABLE} details summary")
    assert ["4", "154"] in [row.split()[:2] for row in panel.texts(f"#{TABLE} details tbody tr")]


def test_picture_makes_a_row_without_a_click(panel: Panel, webui: WebUI) -> None:
    webui.txt2img(width=72, height=88)
    panel.page.wait(lambda: "ms" in panel.rows().get("72x88", ""), "a row with its time", 30)
    assert set(panel.rows()) == {"72x88"}


def test_the_tab_shows_the_present_state_when_it_is_opened(panel: Panel, webui: WebUI) -> None:
    panel.page.choose_tab("txt2img")
    webui.txt2img(width=80, height=88)
    panel.show()
    panel.page.wait(lambda: "80x88" in panel.rows(), "the new row", 5)


def test_sorting_and_filtering(panel: Panel, webui: WebUI, models: Models) -> None:
    panel.prewarm("96x64, 64x64, 80x64")
    panel.wait_until_ready("96x64", "64x64", "80x64")
    panel.choose(ORDER, "Resolution")
    panel.page.wait(lambda: list(panel.rows()) == ["64x64", "80x64", "96x64"], "another order", 20)
    webui.txt2img(width=80, height=64)
    panel.choose(ORDER, "Uses")
    panel.page.wait(lambda: next(iter(panel.rows())) == "80x64", "what is used most", 20)
    panel.choose(ORDER, "Last used")
    panel.page.wait(lambda: next(iter(panel.rows())) == "80x64", "what was used last", 20)
    panel.choose(MODEL, webui.status()["model"])
    panel.page.wait(lambda: len(panel.rows()) == 3, "all rows of the only model", 20)


def test_wrong_size_gets_a_sentence(panel: Panel, webui: WebUI) -> None:
    before = webui.calls()
    for sizes, part in (
        ("65x64", "multiple of 8"), ("big", "'big' is not a size"), ("", "Type at least one size"),
        ("8192x8192", "4096"), ("<b>64x64</b>", "64x64</b>' is not a size"),
    ):
        panel.prewarm(sizes)
        panel.told(part, RESULT)
        assert panel.rows() == {}
        assert webui.calls() == before
        assert not panel.page.driver.find_elements("css selector", f"#{RESULT} p b")


def test_accordion_prewarms_the_current_size(panel: Panel, webui: WebUI) -> None:
    page = panel.page
    show_tab(page, "txt2img")
    page.open_accordion(accordion("txt2img"))
    for name, value in (("width", 80), ("height", 64)):
        page.type(f"#txt2img_{name} input[type=number]", value)
    before, host_before = served(webui), webui.calls()["host"]
    page.find(f"#{prewarm_button('txt2img')}").click()
    page.wait_for_text(prewarm_button("txt2img"), "✓ 80x64 is ready", 240)
    assert "done in" in page.text(prewarm_result("txt2img"))
    assert served(webui) > before and webui.calls()["host"] == host_before
    page.type("#txt2img_width input[type=number]", 88)
    page.wait_for_text(prewarm_button("txt2img"), "Pre-warm this size", 10)
    panel.show()
    panel.wait_until_ready("80x64")


def test_prewarm_while_a_picture_is_made(panel: Panel, webui: WebUI) -> None:
    """It waits its turn and costs no picture."""
    page = panel.page
    show_tab(page, "txt2img")
    page.type("#txt2img_steps input[type=number]", 30)
    page.click("txt2img_generate")
    panel.show()
    panel.prewarm("104x64")
    panel.wait_until_ready("104x64")
    page.choose_tab("txt2img")
    assert "Seed: 11," in page.wait_for_text("html_info_txt2img", "Steps: 30,")
    page.type("#txt2img_steps input[type=number]", 3)
    make_picture(page)
