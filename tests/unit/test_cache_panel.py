"""What the OneDiff tab does when somebody uses it, with a real UNet behind the real runtime."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio
from panel_builders import Seen, keys, used
from test_warmup import wait_until_idle

from lib_onediff.options.settings import Settings
from lib_onediff.prewarm.presets import FAMILIES, SizePreset
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.sizes import Size
from lib_onediff.ui.cache.page import Message, read_keys, read_message


def wait_until_running(seen: Seen) -> None:
    """Until the queue has taken its first job."""
    version = -1
    while not any(job.state == "running" for job in seen.warmup.jobs()):
        version = seen.warmup.wait_for_change(version, 1)


# --- the pre-warm queue -----------------------------------------------------------------------------------------------


def test_prewarming_from_the_panel(seen: Seen) -> None:
    seen.do(seen.panel.prewarm, "64x64, 72x64 x2", 1, "77")
    assert "2 sizes in the queue." in seen.text("told")
    seen.look_until_idle()
    assert seen.text("jobs").count("done in") == 2 and "2 sizes warmed up." in seen.text("told")
    assert "Resolutions 2 (2 proved)" in seen.text("totals")
    assert "64x64 proved" in seen.text("table") and "72x64 proved" in seen.text("table")
    assert [(job.size, job.source) for job in seen.warmup.jobs()] == [
        (Size(64, 64), "panel"), (Size(72, 64, 2), "panel")
    ]


def test_the_batch_size_is_for_sizes_that_say_none(seen: Seen) -> None:
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64 x2", 3, "154")
        jobs = seen.warmup.jobs()
        seen.do(seen.panel.cancel_all)
    assert [(str(job.size), job.tokens) for job in jobs] == [("64x64 x3", 154), ("72x64 x2", 154)]


@pytest.mark.parametrize("text, batch, tokens, part", [
    ("", 1, "77", "at least one size"), (None, 1, "77", "at least one size"), (" , ", 1, "77", "at least one size"),
    ("wide", 1, "77", "is not a size"), ("64x64, 65x64", 1, "77", "multiple of 8"),
    ("64x64", 0, "77", "a batch has 1 to 64"), ("64x64", 1.5, "77", "whole number"),
    ("64x64", "", "77", "whole number"), ("64x64", 1, "many", "whole number"), ("64x64", 1, "78", "not 78"),
    ("64x64", 1, "1e400", "whole number"),
])
def test_what_cannot_be_gets_a_sentence(seen: Seen, text: Any, batch: Any, tokens: str, part: str) -> None:
    seen.do(seen.panel.prewarm, text, batch, tokens)
    assert part in seen.text("told") and "onediff-wrong" in seen.parts["told"]
    assert seen.warmup.jobs() == []
    seen.look()
    assert "told" not in seen.sent, "nothing has come of nothing"


def test_a_preset_is_one_click(seen: Seen) -> None:
    seen.do(seen.panel.preset(SizePreset("Both", (Size(64, 64), Size(72, 64)))), 2, "77")
    seen.look_until_idle()
    assert [str(job.size) for job in seen.warmup.jobs()] == ["64x64 x2", "72x64 x2"]
    assert "2 sizes warmed up." in seen.text("told")


def test_a_preset_with_a_batch_that_cannot_be(seen: Seen) -> None:
    seen.do(seen.panel.preset(FAMILIES[0].presets[0]), 65, "77")
    assert "a batch has 1 to 64" in seen.text("told") and seen.warmup.jobs() == []


def test_jobs_that_wait_are_in_the_table_and_can_be_moved_and_cancelled(seen: Seen) -> None:
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64, 80x64, 88x64", 1, "77")
        running, *queued = (job.id for job in seen.warmup.jobs())
        wait_until_running(seen)
        seen.look()
        assert "72x64 queued" in seen.text("table") and "64x64 warming 0 %" in seen.text("table")
        assert "Queue 4 sizes" in seen.text("totals")
        seen.look(("earlier", queued[1]), ("cancel", queued[2]), ("later", queued[0]), ("cancel", 999), ("fly", 1))
        order = [str(job.size) for job in seen.warmup.jobs() if job.state == "queued"]
        assert order == ["80x64", "72x64"]
        assert "88x64 cancelled" in seen.text("jobs")
        seen.look(("cancel", running))
    seen.look_until_idle()
    assert "2 sizes warmed up, 2 cancelled." in seen.text("told")


def test_a_message_that_is_sent_twice_is_obeyed_once(seen: Seen) -> None:
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64, 80x64, 88x64", 1, "77")
        last = seen.warmup.jobs()[-1].id
        for _ in range(2):
            seen.do(seen.panel.tick, json.dumps({"number": 1, "actions": [["earlier", last]]}))
        assert [str(job.size) for job in seen.warmup.jobs()][1:] == ["72x64", "88x64", "80x64"]
        seen.do(seen.panel.cancel_all)


def test_cancelling_everything(seen: Seen) -> None:
    seen.do(seen.panel.cancel_all)
    assert "Nothing is being pre-warmed." in seen.text("told")
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64, 80x64", 1, "77")
        seen.do(seen.panel.cancel_all)
    assert "3 sizes cancelled." in seen.text("told")
    seen.look_until_idle()
    assert "3 sizes cancelled." in seen.text("told")


def test_jobs_that_others_ask_for_are_shown_and_told_of(seen: Seen) -> None:
    seen.warmup.add([Size(64, 64)], "settings")
    wait_until_idle(seen.warmup)
    seen.look()
    assert seen.text("jobs") == "", "what was over before the page was opened"
    seen.warmup.add([Size(72, 64)], "API")
    seen.look_until_idle()
    assert seen.text("jobs").startswith("72x64") and "64x64" not in seen.text("jobs").replace("72x64", "")
    seen.do(seen.panel.prewarm, "80x64", 1, "77")
    seen.look_until_idle()
    assert seen.text("jobs").startswith("80x64"), "the queue was empty in between"


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_only_what_has_changed_is_sent(seen: Seen) -> None:
    seen.look()
    assert {"beat", "totals", "table", "chart", "models"} <= seen.sent
    seen.look()
    assert seen.sent == {"beat"}
    used(seen.webui, 64)
    seen.look()
    assert {"beat", "totals", "table", "models"} <= seen.sent and "question" not in seen.sent


def test_an_answer_that_is_lost_is_made_up_for(seen: Seen) -> None:
    seen.look()
    used(seen.webui, 64)
    seen.ask(seen.panel.look)
    seen.look()
    assert {"beat", "totals", "table", "chart", "models", "confirm"} <= seen.sent
    seen.look()
    assert seen.sent == {"beat"}


def test_an_old_answer_that_comes_last_is_not_left_on_the_page(seen: Seen) -> None:
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64, 72x64, 80x64", 1, "77")
        wait_until_running(seen)
        waiting = seen.ask(seen.panel.look)
        seen.do(seen.panel.cancel_all)
        assert "queued" not in seen.text("jobs")
        seen.show(waiting)
        assert "queued" in seen.text("jobs")
    seen.look()
    assert seen.text("jobs").count("cancelled") == 3 and "queued" not in seen.text("jobs") + seen.text("table")


def test_the_beat_answers_the_message(seen: Seen) -> None:
    seen.look()
    assert 'data-onediff-beat="1"' in seen.parts["beat"] and 'data-onediff-busy="false"' in seen.parts["beat"]
    with seen.webui.lock:
        seen.do(seen.panel.prewarm, "64x64", 1, "77")
        seen.look()
        assert 'data-onediff-beat="2"' in seen.parts["beat"] and 'data-onediff-busy="true"' in seen.parts["beat"]


@pytest.mark.parametrize("text", [
    "", None, "null", "3", "[]", '"x"', "{", '{"number": "x"}', '{"number": 1, "actions": [1]}',
    '{"number": 1, "actions": [["cancel", "x"]]}', '{"number": 1e999}', '{"number": 1, "actions": {"a": 1}}',
    '{"number": 1, "turn": "x"}',
    '{"number": 1, "actions": [["a", 1, 2]]}',
])
def test_what_is_no_message_does_nothing(seen: Seen, text: Any) -> None:
    assert read_message(text) == Message()
    seen.do(seen.panel.tick, text)
    assert seen.warmup.jobs() == []


@pytest.mark.parametrize("text, expected", [
    ('["a", "b"]', ["a", "b"]), ("[]", []), ('["a", 1, null]', ["a"]), ("", []), (None, []), ("{}", []), ("3", []),
])
def test_what_is_selected(text: Any, expected: list[str]) -> None:
    assert read_keys(text) == expected


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_filter_and_the_order_are_kept_from_look_to_look(seen: Seen) -> None:
    used(seen.webui, 72, 64)
    seen.order = "Resolution"
    seen.look()
    table = seen.text("table")
    assert table.index("64x64") < table.index("72x64")
    (model,) = seen.parts["models"]["choices"][1:]
    seen.model = model
    seen.look()
    assert seen.parts["models"]["value"] == model and "72x64" in seen.text("table")
    runtime.purge()
    seen.look()
    assert seen.parts["models"]["value"] == "All models", "a model that is gone cannot stay chosen"


def test_more_rows_are_shown_when_asked_for(seen: Seen, monkeypatch: Any) -> None:
    monkeypatch.setattr("lib_onediff.ui.cache.handlers.ROWS_AT_FIRST", 2)
    used(seen.webui, 64, 72, 80, 88, 96)
    seen.look()
    seen.page.limit = 2
    seen.look()
    assert seen.parts["more"] == gradio.update(visible=True, value="Show 2 of 3 more")
    seen.do(seen.panel.more)
    assert seen.parts["table"].count("<th scope=\"row\">") == 4
    seen.do(seen.panel.more)
    assert seen.parts["table"].count("<th scope=\"row\">") == 5 and seen.parts["more"]["visible"] is False


def test_pinning(seen: Seen, tmp_path: Path) -> None:
    runtime.history.open(tmp_path)
    used(seen.webui, 64, 72, 80)
    seen.do(seen.panel.pin(True), keys("64x64", "80x64", "512x512"))
    assert "2 resolutions pinned." in seen.text("below")
    assert {row.resolution for row in runtime.rows() if row.pinned} == {"64x64", "80x64"}
    assert seen.text("table").count("pinned") == 2
    seen.do(seen.panel.pin(False), keys("64x64"))
    assert "1 resolution not pinned any more." in seen.text("below")
    assert {row.resolution for row in runtime.rows() if row.pinned} == {"80x64"}
    seen.do(seen.panel.pin(False), keys("80x64"))


def test_nothing_selected_gets_a_sentence(seen: Seen) -> None:
    used(seen.webui, 64)
    for handler in (seen.panel.pin(True), seen.panel.pin(False), seen.panel.ask_selected):
        seen.parts.clear()
        seen.do(handler, "[]")
        assert "Select at least one resolution" in seen.text("below")
    assert len(runtime.rows()) == 1


def test_the_budget_is_shown(seen: Seen) -> None:
    runtime.configure(Settings(memory_budget=512))
    seen.look()
    budget = runtime.totals().budget
    assert ("of 512 MiB" in seen.text("totals")) == bool(budget)
