"""Throwing things away from the OneDiff tab: what is asked before, what is said afterwards, and that nothing waits."""
from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import builders
import pytest
from panel_builders import MEBIBYTE, ROW, SHAPE, TOTALS, Seen, changed, keys, used
from test_warmup import SmallWebUI, ThreadChoosingWebUI

from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.cache import handlers as cache_handlers
from lib_onediff.ui.cache import purge as cache_purge
from lib_onediff.ui.cache.purge import Chore

LARGE = changed(ROW, resolution="1024x1024", bytes=90 * MEBIBYTE, needs=100 * MEBIBYTE)
SMALL = changed(ROW, resolution="64x64", bytes=0, needs=10 * MEBIBYTE)
OTHER = changed(SMALL, model="SDXL")
DECODE = changed(LARGE, model="VAE decoder", shapes=(changed(SHAPE, tokens=0),))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that holds graphs, which this machine cannot."""
    monkeypatch.setattr(runtime, "rows", lambda: [LARGE, SMALL, OTHER])
    monkeypatch.setattr(runtime, "totals", lambda: changed(TOTALS, vram=100 * MEBIBYTE))


def asks(seen: Seen) -> bool:
    return seen.parts["confirm"]["visible"]


def test_purging_the_selected_asks_first(seen: Seen) -> None:
    used(seen.webui, 64, 72, 80)
    seen.do(seen.panel.ask_selected, keys("64x64", "80x64"))
    assert asks(seen) and "Purge 2 resolutions? No VRAM comes back" in seen.text("question")
    assert len(runtime.rows()) == 3, "nothing goes before it is confirmed"
    seen.do(seen.panel.confirm)
    assert not asks(seen) and "2 resolutions forgotten; no graph memory was held." in seen.text("below")
    assert [row.resolution for row in runtime.rows()] == ["72x64"]
    assert "72x64" in seen.text("table") and "80x64" not in seen.text("table")


def test_keeping(seen: Seen) -> None:
    used(seen.webui, 64)
    seen.do(seen.panel.ask_all)
    assert asks(seen) and "Purge the only resolution?" in seen.text("question")
    seen.do(seen.panel.keep)
    assert not asks(seen) and seen.text("question") == "" and "Nothing was purged." in seen.text("below")
    seen.do(seen.panel.confirm)
    assert len(runtime.rows()) == 1, "there is nothing left to confirm"


def test_purging_all(seen: Seen) -> None:
    used(seen.webui, 64, 72)
    seen.do(seen.panel.ask_all)
    assert "Purge all 2 resolutions?" in seen.text("question")
    seen.do(seen.panel.confirm)
    assert "2 resolutions forgotten" in seen.text("below") and "Resolutions 0" in seen.text("totals")
    seen.do(seen.panel.ask_all)
    assert not asks(seen) and "There is nothing to purge." in seen.text("below")


def test_purging_a_model(seen: Seen) -> None:
    seen.do(seen.panel.ask_model)
    assert not asks(seen) and "There is nothing to purge." in seen.text("below")
    used(seen.webui, 64, 72)
    seen.do(seen.panel.ask_model)
    (model,) = {row.model for row in runtime.rows()}
    assert f"Purge 2 resolutions of {model}?" in seen.text("question"), "where there is one, it need not be chosen"
    seen.do(seen.panel.confirm)
    assert runtime.rows() == []


def test_purging_a_model_of_several_needs_a_choice(seen: Seen, held: None) -> None:
    seen.do(seen.panel.ask_model)
    assert not asks(seen) and "Choose a model" in seen.text("below")
    seen.model = "SDXL"
    seen.do(seen.panel.ask_model)
    assert "Purge 1 resolution of SDXL?" in seen.text("question")


def test_purging_the_disk(seen: Seen, tmp_path: Path) -> None:
    runtime.history.open(tmp_path)
    used(seen.webui, 64)
    runtime.keep_history()
    seen.do(seen.panel.ask_disk)
    assert "of disk; what is ready stays ready" in seen.text("question")
    seen.do(seen.panel.confirm)
    seen.look_until_idle()
    assert "Deleted what was kept on disk." in seen.text("below"), "it freed 0 MiB"
    assert runtime.history.rows() == [] and len(runtime.rows()) == 1


def test_releasing_memory_keeps_what_was_proved(seen: Seen) -> None:
    used(seen.webui, 64)
    seen.do(seen.panel.release)
    assert "No graph held memory, so none was released." in seen.text("below")
    assert [row.state for row in runtime.rows()] == ["proved"]


def test_rows_that_are_gone_are_no_fault(seen: Seen) -> None:
    used(seen.webui, 64)
    gone = keys("512x512")
    seen.do(seen.panel.ask_selected, gone)
    seen.do(seen.panel.confirm)
    assert "There was nothing to purge." in seen.text("below") and len(runtime.rows()) == 1


@pytest.mark.parametrize("host", [SmallWebUI, ThreadChoosingWebUI])
def test_no_request_waits_for_a_picture(host: type, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_handlers, "SECONDS_FOR_A_CHORE", 0.05)
    seen = Seen(host(builders.diffusers_unet()))
    used(seen.webui, 64)
    with seen.webui.lock:
        began = time.monotonic()
        seen.do(seen.panel.ask_all)
        seen.do(seen.panel.confirm)
        seen.look()
        assert time.monotonic() - began < 5
        assert "Purging waits until no image is being made." in seen.text("below")
        assert 'data-onediff-busy="true"' in seen.parts["beat"] and len(runtime.rows()) == 1
    seen.look_until_idle()
    assert "1 resolution forgotten" in seen.text("below") and runtime.rows() == []
    seen.close()


@pytest.mark.parametrize("host", [SmallWebUI, ThreadChoosingWebUI])
def test_what_fails_is_told_without_a_traceback(host: type, monkeypatch: Any) -> None:
    logging.getLogger("onediff").propagate = False
    monkeypatch.setattr(runtime, "release_memory", lambda: 1 // 0)
    seen = Seen(host(builders.diffusers_unet()))
    seen.do(seen.panel.release)
    seen.look_until_idle()
    assert "Releasing memory failed:" in seen.text("below") and "onediff-wrong" in seen.parts["below"]
    seen.close()


def test_a_chore_whose_place_fails_is_over() -> None:
    logging.getLogger("onediff").propagate = False

    def no_place(work: Any) -> str:
        raise RuntimeError("the WebUI is going down")

    chore = Chore("Purging", no_place, lambda: "done")
    assert chore.told(5) == "Purging failed: the WebUI is going down." and chore.failed


def test_a_chore_is_told_once_it_is_over() -> None:
    go = threading.Event()
    chore = Chore("Purging", lambda work: work(), lambda: go.wait(5) and "done")
    assert chore.told() is None
    go.set()
    assert chore.told(5) == "done" and not chore.failed


@pytest.mark.parametrize("affected, mebibytes", [
    ([LARGE], 90), ([SMALL], 0), ([SMALL, OTHER], 0), ([LARGE, SMALL], 90), ([LARGE, SMALL, OTHER], 100),
])
def test_what_would_be_freed(held: None, affected: list[Any], mebibytes: int) -> None:
    assert cache_purge.would_free(runtime, affected) == mebibytes * MEBIBYTE


def test_the_question_says_what_is_freed(seen: Seen, held: None) -> None:
    seen.do(seen.panel.ask_selected, '["1024x1024 SD1"]')
    assert "Purge 1 resolution? This frees about 90 MiB of VRAM" in seen.text("question")


def test_each_model_loses_its_own_rows(held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(runtime, "purge", lambda resolutions, model: asked.append((resolutions, model)) or MEBIBYTE)
    purge = cache_purge.purge_of_rows(runtime, ["64x64 SD1", "1024x1024 SD1", "64x64 SDXL"])
    assert purge.work() == "3 resolutions forgotten, freed 2 MiB."
    assert sorted(asked, key=lambda call: call[1]) == [({"64x64", "1024x1024"}, "SD1"), ({"64x64"}, "SDXL")]


@pytest.mark.parametrize("stays, asked", [
    ([OTHER], [({"1024x1024"}, "SD1")]), ([DECODE, OTHER], [({"1024x1024"}, "SD1"), ({"1024x1024"}, "VAE decoder")]),
])
def test_the_decodes_below_a_row_go_with_it(monkeypatch: pytest.MonkeyPatch, stays: list[Any], asked: Any) -> None:
    purges: list[Any] = []
    held = [LARGE, *stays]
    monkeypatch.setattr(runtime, "rows", lambda: held)
    monkeypatch.setattr(runtime, "totals", lambda: TOTALS)

    def purge(resolutions: set[str], model: str) -> int:
        purges.append((resolutions, model))
        held[:] = stays
        return 0

    monkeypatch.setattr(runtime, "purge", purge)
    cache_purge.purge_of_rows(runtime, ["1024x1024 SD1"]).work()
    assert purges == asked


def test_what_a_purge_says() -> None:
    both = [ROW, changed(ROW, model="SDXL")]
    assert cache_purge.purged(both, 12 * MEBIBYTE) == "2 resolutions forgotten, freed 12 MiB."
    assert "none came back" in cache_purge.purged([ROW], 0)
    assert "no graph memory was held" in cache_purge.purged([changed(ROW, needs=0)], 0)
