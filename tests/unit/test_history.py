"""What was used is remembered between processes, without anybody waiting for a disk."""
from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from builders import a_call, served, shared_unet

import lib_onediff
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.key import ShapeKey
from lib_onediff.shapes.table import Entry
from lib_onediff.store.history import PINNED, History
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.rows import CHOSEN, TUNED, HistoryRow
from lib_onediff.store.store import Store

WEIGHTS = "weights and sources"


def wait_for_the_disk() -> None:
    for thread in threading.enumerate():
        if thread.name == "onediff-history":
            thread.join()


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A cache folder in which one picture's calls were taken down."""
    unet = shared_unet("small")
    runtime.history.open(tmp_path)
    lib_onediff.compile_unet(unet)
    for _ in range(4):
        served(unet, a_call(unet, 8, 8))
    served(unet, a_call(unet, 9, 11))
    runtime.keep_history()
    wait_for_the_disk()
    lib_onediff.uncompile_unet(unet)
    return tmp_path


@pytest.mark.usefixtures("host_timed_often")
def test_the_next_process_has_the_rows(used: Path) -> None:
    now = {row.resolution: row for row in runtime.rows()}
    later = History()
    later.open(used)
    assert {row.resolution: row.uses for row in later.rows()} == {"64x64": 4, "88x72": 1}
    runtime.table.forget({entry.key for entry in runtime.table.entries()})
    remembered = {row.resolution: row for row in runtime.rows()}
    assert {row.state for row in remembered.values()} == {"on disk"}
    assert remembered["64x64"].step_ms == now["64x64"].step_ms > 0
    assert remembered["64x64"].ratio == now["64x64"].ratio > 0 and remembered["64x64"].ratio_range is None
    # One call is not enough to be remembered, for its time.
    assert remembered["88x72"].step_ms is remembered["88x72"].ratio is None
    assert remembered["64x64"].shapes[0].dtype == "float32"


def test_a_use_is_counted_once(used: Path) -> None:
    runtime.keep_history()
    wait_for_the_disk()
    assert sum(row.uses for row in runtime.history.rows()) == 5


def test_purging_forgets_the_disk_too(used: Path) -> None:
    runtime.purge(["64x64"])
    later = History()
    later.open(used)
    assert [row.resolution for row in later.rows()] == ["88x72"]
    runtime.purge()
    assert later.rows() == [] and runtime.rows() == []


def test_purging_a_model_leaves_the_others(tmp_path: Path) -> None:
    """Of everything: history, verdicts, and in the next process."""
    history = History()
    history.open(tmp_path)
    keys = {model: ShapeKey(
        f"of-{model}", 64, 64, 2, 77, torch.float16, torch.float16, torch.device("cpu"), (), (), False,
    ) for model in ("SD1", "SDXL")}
    for model, key in keys.items():
        history.keep([Entry(key, model, uses=3), Entry(dataclasses.replace(key, width=72), model, uses=2)])
        history.keep_verdict("native", key, WEIGHTS, 1e-3)
        history.keep_verdict("native", dataclasses.replace(key, width=72), WEIGHTS, 1e-3)
    wait_for_the_disk()
    history.forget(["512x512"], model="SD1")
    later = History()
    later.open(tmp_path)
    for known in (history, later):
        assert sorted((row.model, row.resolution) for row in known.rows()) == [
            ("SD1", "576x512"), ("SDXL", "512x512"), ("SDXL", "576x512"),
        ]
        assert known.verdict("native", keys["SD1"], WEIGHTS) is None
        assert known.verdict("native", dataclasses.replace(keys["SD1"], width=72), WEIGHTS) == 1e-3
        assert known.verdict("native", keys["SDXL"], WEIGHTS) == 1e-3
    history.forget(model="SDXL")
    assert {row.model for row in history.rows()} == {"SD1"}
    assert history.verdict("native", keys["SDXL"], WEIGHTS) is None
    history.keep([Entry(keys["SDXL"], "SDXL", uses=3)])
    assert {row.uses for row in history.rows() if row.model == "SDXL"} == {3}, "its uses count from the first again"


def test_a_verdict_of_a_model_that_was_never_in_a_picture(tmp_path: Path) -> None:
    history = History()
    history.open(tmp_path)
    key = ShapeKey("other", 64, 64, 2, 77, torch.float16, torch.float16, torch.device("cpu"), (), (), False)
    history.keep_verdict("native", key, WEIGHTS, 1e-3)
    history.forget(model="SD1")
    assert history.verdict("native", key, WEIGHTS) == 1e-3
    history.forget(model="SD1", architectures=["other"])
    assert history.verdict("native", key, WEIGHTS) is None


def test_uses_after_a_purge_are_counted_from_one(used: Path) -> None:
    unet = shared_unet("small")
    runtime.purge(["64x64"])
    lib_onediff.compile_unet(unet)
    with torch.no_grad():
        served(unet, a_call(unet, 8, 8))
    lib_onediff.uncompile_unet(unet)
    runtime.keep_history()
    wait_for_the_disk()
    assert {row.resolution: row.uses for row in runtime.history.rows()} == {"64x64": 1, "88x72": 1}


def test_an_update_forgets_times_and_keeps_what_users_do(tmp_path: Path) -> None:
    before = Store.open(tmp_path, dataclasses.replace(Fingerprint.of(), torch="1.0"))
    before.record(HistoryRow("architecture", "SD1", "512x512", 2, 77, "float16", uses=30, last_used=5.0, step_ms=9.0))
    before.save(TUNED, "tile", 64)
    before.save(CHOSEN, PINNED, [["SD1", "512x512"]])
    before.close()
    history = History()
    history.open(tmp_path)
    assert history.rows() == [] and [row.uses for row in history.used()] == [30]
    assert history.tuned() == {PINNED: [["SD1", "512x512"]]}
    history.tune(PINNED, [])
    history.keep([Entry(ShapeKey(
        "architecture", 64, 64, 2, 77, torch.float16, torch.float16, torch.device("cpu"), (), (), False,
    ), "SD1", uses=4)])
    wait_for_the_disk()
    assert [row.uses for row in history.rows()] == [4] and [row.uses for row in history.used()] == [34]
    assert history.tuned() == {PINNED: []}


def test_without_a_folder_nothing_is_remembered_and_nothing_fails() -> None:
    history = History()
    history.keep([])
    history.forget()
    assert history.rows() == [] and history.trouble is None and history.size_bytes() == 0


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    history = History()
    history.open(blocked / "below")
    assert history.trouble and "\n" not in history.trouble
