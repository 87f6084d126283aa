"""The OneDiff tab and the accordion's button, with a real UNet behind the real runtime."""
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import builders
import pytest
from test_warmup import SECONDS, SmallWebUI, wait_until_idle

pytest.importorskip("gradio")

import gradio

from lib_onediff.accelerator import runtime
from lib_onediff.hosts import diffusers as diffusers_host
from lib_onediff.settings import Settings
from lib_onediff.shapes.rows import ResolutionRow, ShapeRow
from lib_onediff.shapes.sizes import Size
from lib_onediff.shapes.warmup import Job, WarmUp
from lib_onediff.ui import accordion, amounts, cache_panel, cache_table, progress
from lib_onediff.ui.cache_panel import Panel

MEBIBYTE = 2**20
CALLS = {"graph": 12, "plain": 3, "blocks": 0, "host": 4}
SHAPE = ShapeRow(
    batch=2, tokens=77, dtype="float16", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=0.0, relative_error=1.5e-3, control=False,
)
ROW = ResolutionRow(
    resolution="512x768", model="SD1", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=0.0, shapes=(SHAPE,),
)


def changed(record: Any, **changes: Any) -> Any:
    return type(record)(**{**vars(record), **changes})


@pytest.fixture
def webui() -> Iterator[SmallWebUI]:
    unet = builders.diffusers_unet()
    yield SmallWebUI(unet)
    diffusers_host.detach(unet)


@pytest.fixture
def panel(webui: SmallWebUI) -> Iterator[Panel]:
    panel = Panel(runtime, WarmUp(webui, runtime))
    yield panel
    panel.warmup.stop(SECONDS)


def text_of(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


# --- markup -----------------------------------------------------------------------------------------------------------


def test_totals() -> None:
    rows = [ROW, changed(ROW, state="proved"), changed(ROW, state="failed", bytes=0)]
    line = text_of(cache_table.totals_html(rows, CALLS, 0))
    for part in ("Resolutions 3", "Ready 1", "Proved 1", "Failed 1", "Graph memory 6 MiB",
                 "12 CUDA graph, 3 plain launches, 4 the WebUI's own UNet".replace("'", "&#x27;")):
        assert part in line
    assert "inside" not in line and "Cold" not in line
    assert "6 MiB of 512 MiB" in text_of(cache_table.totals_html(rows, CALLS, 512 * MEBIBYTE))
    assert "none yet" in cache_table.totals_html([], dict.fromkeys(CALLS, 0), 0)


def test_table_has_a_row_per_resolution_with_its_shapes_below() -> None:
    markup = cache_table.table_html([ROW, changed(ROW, resolution="64x64", shapes=(SHAPE, changed(SHAPE, batch=1)))])
    text = text_of(markup)
    assert "512x768 SD1 ready 12.3 ms 24.7 ms 2.00 x 3 MiB 7" in text
    assert "1 shape" in text and "2 shapes" in text
    assert "2 77 float16 ready 12.3 ms 24.7 ms 2.00 x 3 MiB 7 1.5e-03" in text
    assert markup.count("<details>") == 2 and 'tabindex="0"' in markup


def test_table_escapes_what_others_name() -> None:
    evil = "<script>alert('x')</script>"
    markup = cache_table.table_html([changed(ROW, model=evil, reason=evil, shapes=(changed(SHAPE, reason=evil),))])
    assert "<script" not in markup and markup.count("&lt;script&gt;") == 3
    assert "<script" not in progress.job_html(Job(1, Size(64, 64), "panel", "failed", reason=evil))
    assert "<script" not in progress.sentence(evil)


def test_unknown_values_are_shown_as_such() -> None:
    unknown = {"step_ms": None, "host_ms": None, "ratio": None, "bytes": 0}
    shape = changed(SHAPE, relative_error=None, control=True, **unknown)
    markup = cache_table.table_html([changed(ROW, model="", shapes=(shape,), **unknown)])
    assert "None" not in markup and "with control" in markup


def test_empty_table_says_what_to_do() -> None:
    assert "pre-warm" in cache_table.table_html([])


def test_five_hundred_rows_are_quick() -> None:
    rows = [changed(ROW, resolution=f"{64 + 8 * number}x64", shapes=(SHAPE,) * 3) for number in range(500)]
    began = time.perf_counter()
    assert cache_table.table_html(rows).count("<tbody>") == 2 * 500
    assert time.perf_counter() - began < 0.3


@pytest.mark.parametrize("size, text", [
    (0, "0 MiB"), (1, "1 KiB"), (200 * 1024, "200 KiB"), (12 * MEBIBYTE, "12 MiB"), (1536 * MEBIBYTE, "1.50 GiB"),
])
def test_memory(size: int, text: str) -> None:
    assert amounts.memory(size) == text


@pytest.mark.parametrize("seconds, text", [
    (-5, "just now"), (59, "just now"), (61, "1 min ago"), (2 * 3600 + 5, "2 h ago"), (90000, "1 d ago"),
])
def test_ago(seconds: float, text: str) -> None:
    assert amounts.ago(time.time() - seconds) == text


def test_jobs_show_progress_and_reasons() -> None:
    jobs = [
        Job(1, Size(64, 64), "panel", "done", 6, 6, seconds=0.44), Job(2, Size(72, 64, 2), "panel", "running", 3, 6),
        Job(3, Size(80, 64), "panel", "failed", 0, 6, "too large"), Job(4, Size(88, 64), "panel", "queued", 0, 6),
    ]
    markup = progress.jobs_html(jobs)
    assert text_of(markup) == (
        "64x64 done in 0.4 s 72x64 x2 call 4 of 6 80x64 failed: too large 88x64 queued"
    )
    assert 'aria-valuenow="50"' in markup and markup.count('role="progressbar"') == 4
    assert progress.jobs_html([]) == ""


def test_many_jobs_are_cut_short_and_pending_ones_stay() -> None:
    jobs = [Job(number, Size(64 + 8 * number, 64), "panel", "done" if number < 30 else "queued", 0, 6)
            for number in range(40)]
    text = text_of(progress.jobs_html(jobs))
    assert text.count("queued") == 10 and "and 15 more jobs" in text


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_prewarming_from_the_panel(panel: Panel) -> None:
    assert "2 sizes in the queue." in panel.prewarm("64x64, 72x64 x2")
    shown = list(panel.follow("64x64, 72x64 x2"))
    assert text_of(shown[-1][1]).count("done in") == 2 and "2 sizes warmed up." in shown[-1][0]
    totals, table, choices = panel.view()
    assert "Resolutions 2" in text_of(totals)
    assert "64x64" in table and "72x64" in table
    assert choices["choices"] == ["72x64", "64x64"]


def test_the_table_is_sent_only_when_it_has_changed(panel: Panel) -> None:
    panel.warmup.add([Size(64, 64)], "panel")
    wait_until_idle(panel.warmup)
    ((_, jobs, *view),) = panel.follow("64x64")
    assert "done" in jobs and view == list(panel.view())
    with panel.warmup._webui.lock:
        panel.warmup.add([Size(72, 64)], "panel")
        following = panel.follow()
        next(following)
        panel.warmup.add([Size(80, 64)], "panel")
        outcome, _, *view = next(following)
        assert [outcome, *view] == [gradio.update()] * 4
    assert text_of(list(following)[-1][1]).count("done in") == 2


@pytest.mark.parametrize("text, part", [
    ("", "at least one size"), (None, "at least one size"), (" , ", "at least one size"), ("wide", "is not a size"),
    ("64x64, 65x64", "multiple of 8"),
])
def test_sizes_that_cannot_be_give_a_sentence(panel: Panel, text: str, part: str) -> None:
    assert part in panel.prewarm(text)
    assert panel.warmup.jobs() == []
    assert [shown[:2] for shown in panel.follow(text)] == [(gradio.update(), "")]


def test_cancelling_from_the_panel(panel: Panel, webui: SmallWebUI) -> None:
    assert "Nothing is being pre-warmed." in panel.cancel()
    with webui.lock:
        panel.prewarm("64x64, 72x64, 80x64")
        assert "3 sizes cancelled." in panel.cancel()


def test_purging_forgets(panel: Panel, webui: SmallWebUI) -> None:
    for width in (8, 9, 10):
        builders.served(webui.unet, builders.a_call(webui.unet, width=width))
    result, _, table, choices = panel.purge(["64x64", "80x64"])
    assert "2 resolutions forgotten; no graph memory was held." in result
    assert "72x64" in table and "64x64" not in table.replace("72x64", "")
    assert (choices["choices"], choices["value"]) == (["72x64"], [])
    result, totals, *_ = panel.purge_all()
    assert "1 resolution forgotten" in result and "Resolutions 0" in text_of(totals)
    assert "There was nothing to purge." in panel.purge_all()[0]
    assert runtime.rows() == []


@pytest.mark.parametrize("chosen", [[], None])
def test_purging_nothing_asks_for_a_choice(panel: Panel, webui: SmallWebUI, chosen: list[str] | None) -> None:
    builders.served(webui.unet, builders.a_call(webui.unet))
    assert "Choose at least one resolution" in panel.purge(chosen)[0]
    assert len(runtime.rows()) == 1


def test_a_resolution_that_is_gone_is_no_fault(panel: Panel) -> None:
    assert "There was nothing to purge." in panel.purge(["512x512"])[0]


def test_what_came_of_the_jobs() -> None:
    states = ["done", "done", "failed", "cancelled"]
    jobs = [Job(number, Size(64, 64), "panel", state) for number, state in enumerate(states)]
    assert cache_panel.outcome_of(jobs) == "2 sizes warmed up, 1 failed, 1 cancelled."
    assert cache_panel.outcome_of(jobs[:1]) == "1 size warmed up."
    assert cache_panel.outcome_of(jobs[2:3]) == "1 failed."


def test_what_a_purge_says() -> None:
    both = [ROW, changed(ROW, model="SDXL")]
    assert cache_panel.purged(both, 12 * MEBIBYTE) == "1 resolution forgotten, freed 12 MiB."
    assert "these 3 MiB come back with the last" in cache_panel.purged([ROW], 0)


def test_the_budget_is_shown(panel: Panel) -> None:
    runtime.configure(Settings(memory_budget=512))
    assert "0 MiB of 512 MiB" in text_of(panel.view()[0])


def test_watching_one_size_alone(panel: Panel, webui: SmallWebUI) -> None:
    with webui.lock:
        panel.warmup.add([Size(64, 64), Size(72, 64)], "panel")
        everything = next(progress.watch(panel.warmup))
        alone = next(progress.watch(panel.warmup, [Size(72, 64)], alone=True))
    assert ([len(everything), *(job.size for job in alone)]) == [2, Size(72, 64)]


# --- the page ---------------------------------------------------------------------------------------------------------


def handlers(page: gradio.Blocks) -> list[dict[str, Any]]:
    return page.get_config_file()["dependencies"]


def test_tab_is_built_for_every_page_anew(panel: Panel) -> None:
    tabs = [cache_panel.build_cache_tab(runtime, panel.warmup) for _ in range(2)]
    with gradio.Blocks() as page:
        for tab in tabs:
            tab.render()
    assert len(handlers(page)) == 2 * len(handlers(tabs[0]))
    assert runtime.rows() == [] and panel.warmup.jobs() == []


def test_nothing_of_the_tab_gets_into_the_hosts_defaults_or_api(panel: Panel) -> None:
    tab = cache_panel.build_cache_tab(runtime, panel.warmup)
    saved = (gradio.Textbox, gradio.Dropdown, gradio.Button)
    ours = [block for block in tab.blocks.values() if isinstance(block, saved)]
    assert ours and all(block.do_not_save_to_config for block in ours)
    assert all(handler["api_name"] is False for handler in handlers(tab))


def test_no_handler_waits_in_gradios_queue(panel: Panel) -> None:
    """gradio 3 never ends a queued generator whose page was left, and the WebUI then cannot reload its UI."""
    page = page_of(panel.warmup, ["width", "height", "batch", "accordion", "info"])
    for blocks in (cache_panel.build_cache_tab(runtime, panel.warmup), page):
        # What fills a component when the page loads is gradio's own, and no generator either.
        asked_for = [handler for handler in handlers(blocks) if handler["targets"] != [(None, "load")]]
        assert asked_for and all(handler["queue"] is False for handler in asked_for)
        assert not any(handler["types"]["generator"] for handler in handlers(blocks))


def the_button(page: gradio.Blocks) -> Callable[..., Any]:
    """What a click on the accordion's button does first ("ask"), and then ("begin", and "step" until it is over)."""
    functions = page.fns.values() if isinstance(page.fns, dict) else page.fns
    return {function.fn.__name__: function.fn for function in functions if function.fn}.__getitem__


def followed(page: gradio.Blocks, *values: Any) -> list[str]:
    """What is shown beside the button, one after the other, as the page asks for it."""
    button = the_button(page)
    first, _, turn, stream = button("begin")(*values)
    shown = [first]
    while turn:
        result, _, turn = button("step")(stream, turn)
        shown.append(result)
    return [markup for markup in shown if isinstance(markup, str)]


def page_of(warmup: WarmUp, order: list[str]) -> gradio.Blocks:
    """A page whose parts are created in this order."""
    parts: dict[str, Callable[[], Any]] = {
        "width": lambda: gradio.Slider(64, 4096, value=128, elem_id="txt2img_width"),
        "height": lambda: gradio.Slider(64, 4096, value=64, elem_id="txt2img_height"),
        "batch": lambda: gradio.Slider(1, 8, value=1, elem_id="txt2img_batch_size"),
        "accordion": lambda: accordion.build_accordion("txt2img", lambda: "status"),
        "info": lambda: gradio.Textbox(visible=False, elem_id="generation_info_txt2img"),
    }
    with gradio.Blocks() as page:
        for part in order:
            made = parts[part]()
            if part != "accordion":
                accordion.connect(made, "txt2img", lambda: "status", warmup)
    return page


@pytest.mark.parametrize("order", [
    ["width", "height", "batch", "accordion", "info"], ["accordion", "batch", "height", "width", "info"],
])
def test_the_accordions_button_warms_the_size_that_is_set(panel: Panel, order: list[str]) -> None:
    page = page_of(panel.warmup, order)
    assert the_button(page)("ask")(128, 64.0, 2) == ""
    *_, last = followed(page, 128, 64.0, 2)
    assert text_of(last).startswith("128x64 x2 done in")
    (job,) = panel.warmup.jobs()
    assert (job.size, job.source) == (Size(128, 64, 2), "txt2img")


@pytest.mark.parametrize("values, part", [
    ((None, 64, 1), "whole numbers"), ((64.5, 64, 1), "whole numbers"), ((65, 64, 1), "multiple of 8"),
    ((64, 64, 0), "a batch has"),
])
def test_the_accordions_button_refuses_with_a_sentence(panel: Panel, values: tuple[Any, ...], part: str) -> None:
    page = page_of(panel.warmup, ["width", "height", "batch", "accordion", "info"])
    assert part in the_button(page)("ask")(*values)
    assert [part in shown for shown in followed(page, *values)] == [True]
    assert panel.warmup.jobs() == []


def test_a_page_without_sizes_has_a_status_line_all_the_same(panel: Panel) -> None:
    whole = handlers(page_of(panel.warmup, ["width", "height", "batch", "accordion", "info"]))
    part = handlers(page_of(panel.warmup, ["width", "accordion", "info"]))
    without_accordion = handlers(page_of(panel.warmup, ["width", "height", "batch", "info"]))
    assert (len(whole), len(part), len(without_accordion)) == (5, 2, 0)
