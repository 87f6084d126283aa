"""The handlers of the Cache page, with a real UNet in the real runtime."""
from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio
from panel_builders import MEBIBYTE, ROW, SHAPE, Seen, used

from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.cache import panel as cache_panel
from lib_onediff.ui.cache.panel import read_list
from lib_onediff.ui.chore import Chore
from lib_onediff.ui.jobs import Clicks, read_clicks

LARGE = replace(ROW, resolution="1024x1024", bytes=90 * MEBIBYTE, needs=100 * MEBIBYTE)
SMALL = replace(ROW, resolution="64x64", bytes=0, needs=10 * MEBIBYTE)
OTHER = replace(SMALL, model="SDXL")
DECODE = replace(LARGE, model="VAE decoder", shapes=(replace(SHAPE, tokens=0),))


# --- the pre-warm queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, part", [(None, "at least one size"), ("wide", "is not a size")])
def test_a_prewarm_request_without_a_valid_size_gets_an_error_message(seen: Seen, text: Any, part: str) -> None:
    """text: the content of the field for sizes. part: a part of the message."""
    seen.do(seen.panel.prewarm, text)
    assert part in seen.text("message") and "onediff-wrong" in seen.parts["message"]
    assert seen.warmup.jobs() == []


def test_a_refresh_of_the_page_keeps_the_work_that_a_later_click_waits_for(seen: Seen) -> None:
    """The page polls its state by view(). A click since such a request may have started work that the page waits for.
    The answer's second value must leave that work as it is (gradio.update()), not set it to None."""
    assert seen.panel.view("[]", "All models", None)[1] == gradio.update()


@pytest.mark.parametrize("text", ["", None, "null", "3", '"x"', "{", '["x"]', "[[5]]", "[true]", "[1e999]"])
def test_unreadable_messages_of_the_page_do_nothing(seen: Seen, text: Any) -> None:
    """The page's script sends its clicks as JSON. Only valid entries of a readable message count."""
    seen.panel.view(text, "All models", None)
    assert seen.warmup.jobs() == [] and read_list(text, int) == [] and read_clicks(text) == Clicks()
    assert read_clicks('{"cancelled": [true, "1", 2], "clear": 1, "shown": "x"}') == Clicks((2,))


def test_a_size_that_is_queued_or_being_prewarmed_is_not_queued_again_and_a_message_says_so(seen: Seen) -> None:
    """A held lock stands for an image in progress, so that no job ends meanwhile."""
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64")
        seen.do(seen.panel.prewarm, "72x64, 64x64, 80x64")
        assert "72x64, 64x64: run or wait already, not queued again." in seen.text("message")
        assert [job.title for job in seen.warmup.jobs()] == ["64x64", "72x64", "80x64"]
        seen.warmup.stop()


def test_a_click_on_a_size_queues_it(seen: Seen) -> None:
    """The page's JSON has the clicked sizes as "sizes", and the size set in the txt2img tab as "asked", for which the
    page has a button, too. An invalid size gets a message."""
    shown = seen.panel.view('{"sizes": ["64x64"], "asked": "72x64"}', "All models", None)
    assert [job.title for job in seen.warmup.jobs()] == ["64x64"]
    assert '"72x64" title="as in the txt2img tab"' in shown[6]
    assert "is not a size" in seen.panel.view('{"sizes": ["x"], "asked": "undefinedxundefined"}', "", None)[7]


def test_most_used_sizes_of_an_unused_model_queue_nothing_and_a_message_says_why(seen: Seen) -> None:
    seen.do(seen.panel.prewarm, "most used 2")
    assert "No size has been used with this model yet" in seen.text("message") and seen.warmup.jobs() == []
    seen.do(seen.panel.prewarm, "most used 2, 72x64")
    assert [job.title for job in seen.warmup.jobs()] == ["72x64"]


# --- purging ----------------------------------------------------------------------------------------------------------


def test_purging_everything_needs_a_yes_and_happens_after_the_image_in_progress(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held lock stands for an image in progress. The page gets a message at once, and the rows are purged when the
    lock is released."""
    monkeypatch.setattr(cache_panel, "SECONDS_FOR_A_CHORE", 0.05)
    used(seen.webui, 64)
    with seen.webui.lock:
        seen.do(seen.panel.purge_all, "")
        assert "Nothing was purged." in seen.text("below")
        seen.do(seen.panel.purge_all, "yes")
        assert "Purging waits until no image is being made." in seen.text("below") and len(runtime.rows()) == 1
    seen.look_until_idle()
    assert "1 resolution purged" in seen.text("below") and runtime.rows() == []


def test_a_chore_ends_with_its_result_or_with_its_exception_as_a_sentence() -> None:
    """A Chore is work on a thread of its own. over(seconds) waits for it that long, and returns whether it has
    ended."""
    logging.getLogger("onediff").propagate = False

    def no_place() -> str:
        raise RuntimeError("the WebUI is going down")

    chore = Chore("Purging", no_place)
    assert chore.over(60) and chore.failed and chore.outcome == "Purging failed: the WebUI is going down."
    go = threading.Event()
    chore = Chore("Purging", lambda: go.wait(60) and "done")
    assert not chore.over()
    go.set()
    assert chore.over(60) and chore.outcome == "done" and not chore.failed


@pytest.mark.parametrize("keys, stays, asked", [
    (["64x64 SD1", "1024x1024 SD1", "64x64 SDXL"], [], [({"64x64", "1024x1024"}, "SD1"), ({"64x64"}, "SDXL")]),
    (["1024x1024 SD1"], [OTHER], [({"1024x1024"}, "SD1")]),
    # The decodes below a row go with it.
    (["1024x1024 SD1"], [DECODE, OTHER], [({"1024x1024"}, "SD1"), ({"1024x1024"}, "VAE decoder")]),
    ([], [LARGE], []),
])
def test_purging_selected_rows_purges_the_resolutions_of_each_model(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, keys: list[str], stays: list[Any], asked: Any,
) -> None:
    """keys: the selected rows. stays: the rows that the runtime still has afterwards. asked: the expected calls of
    runtime.purge (resolutions, model), each of which frees 1 MiB here."""
    purges: list[Any] = []
    held = [LARGE, SMALL, OTHER]
    monkeypatch.setattr(runtime, "rows", lambda: held)

    def purge(resolutions: set[str], model: str) -> int:
        purges.append((resolutions, model))
        held[:] = stays
        return MEBIBYTE

    monkeypatch.setattr(runtime, "purge", purge)
    seen.do(seen.panel.purge_selected, json.dumps(keys))
    seen.look_until_idle()
    assert purges == asked
    many = "3 resolutions" if len(keys) > 1 else "1 resolution"
    said = f"{many} purged, {len(asked)} MiB of VRAM freed." if keys else "Nothing was purged."
    assert said in seen.text("below")


def test_clicks_on_rows_that_are_gone_change_nothing_and_get_a_message(seen: Seen) -> None:
    for handler in (seen.panel.pin, seen.panel.purge_selected):
        seen.do(handler, '["64x64 SD1"]')
        assert "no longer in the table: nothing was changed" in seen.text("below")
