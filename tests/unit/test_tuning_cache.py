"""Tuned choices: in memory, in the store, and what a strange store may hold."""
from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_onediff.ops.attention import GEMM, TORCH, Attention, choice_name
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.store import history as history_module
from lib_onediff.store.history import History
from lib_onediff.store.rows import TUNED
from lib_onediff.store.store import Store

STRANGE = [None, True, 7, "flash", ["flash"], {}, {"backend": None}, {"backend": ["flash"]}, {"backend": "warp drive"},
           {"backend": {"flash": 1}}]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "WRITE_AFTER_SECONDS", 0.05)


def wait_for_the_disk() -> None:
    for thread in threading.enumerate():
        if thread.name == "onediff-history":
            thread.join()


def opened(folder: Path) -> tuple[History, TuningCache]:
    history, tuning_cache = History(), TuningCache()
    history.open(folder)
    tuning_cache.attach(history.tuned, history.tune)
    return history, tuning_cache


def test_without_a_store_they_are_kept_in_memory() -> None:
    tuning_cache = TuningCache()
    assert tuning_cache.get("tile") is None
    tuning_cache.set("tile", {"block": [64, 128]})
    tuning_cache.set("tile", {"block": [32, 128]})
    assert tuning_cache.get("tile") == {"block": [32, 128]}


def test_the_next_process_has_them(tmp_path: Path) -> None:
    _, tuning_cache = opened(tmp_path)
    tuning_cache.set("tile", {"block": [64, 128], "why": "größer"})
    tuning_cache.set("layout", "nhwc")
    wait_for_the_disk()
    _, later = opened(tmp_path)
    assert later.get("tile") == {"block": [64, 128], "why": "größer"} and later.get("layout") == "nhwc"


def test_what_was_chosen_before_the_store_came_is_saved_and_counts_more(tmp_path: Path) -> None:
    _, earlier = opened(tmp_path)
    earlier.set("tile", 64)
    earlier.set("layout", "nhwc")
    wait_for_the_disk()
    tuning_cache, history = TuningCache(), History()
    tuning_cache.set("tile", 128)
    history.open(tmp_path)
    tuning_cache.attach(history.tuned, history.tune)
    assert tuning_cache.get("tile") == 128 and tuning_cache.get("layout") == "nhwc"
    wait_for_the_disk()
    _, later = opened(tmp_path)
    assert later.get("tile") == 128


def test_attaching_again_saves_nothing_twice() -> None:
    saved: list[tuple[str, Any]] = []
    tuning_cache = TuningCache()
    tuning_cache.set("tile", 64)
    for _ in range(3):
        tuning_cache.attach(lambda: dict(saved), lambda name, value: saved.append((name, value)))
    assert saved == [("tile", 64)]


def test_what_json_cannot_hold_is_refused_with_and_without_a_store(tmp_path: Path) -> None:
    for tuning_cache in (TuningCache(), opened(tmp_path)[1]):
        with pytest.raises(TypeError):
            tuning_cache.set("tile", object())
        assert tuning_cache.get("tile") is None


def test_choosing_does_not_wait_for_a_locked_disk(tmp_path: Path) -> None:
    _, tuning_cache = opened(tmp_path)
    lock = sqlite3.connect(tmp_path / "onediff-2-1.sqlite3", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    began = time.perf_counter()
    for number in range(100):
        tuning_cache.set(f"tile {number}", number)
    assert time.perf_counter() - began < 0.1
    lock.execute("ROLLBACK")
    lock.close()
    wait_for_the_disk()
    assert opened(tmp_path)[1].get("tile 99") == 99


def test_a_burst_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    flush = Store.flush
    monkeypatch.setattr(Store, "flush", lambda store: (writes.append(store), flush(store))[1])
    _, tuning_cache = opened(tmp_path)
    for number in range(50):
        tuning_cache.set(f"tile {number}", number)
    wait_for_the_disk()
    assert len(writes) == 1


def test_purging_one_resolution_leaves_them_and_purging_all_does_not(tmp_path: Path) -> None:
    history, tuning_cache = opened(tmp_path)
    tuning_cache.set("tile", 64)
    history.forget(["512x512"])
    wait_for_the_disk()
    assert opened(tmp_path)[1].get("tile") == 64
    history.forget()
    assert opened(tmp_path)[1].get("tile") is None


@pytest.mark.parametrize("value", STRANGE, ids=json.dumps)
def test_a_strange_choice_is_no_choice(tmp_path: Path, value: Any) -> None:
    narrow, wide = (2, 8, 64, 40), (1, 1, 64, 512)
    store = Store.open(tmp_path)
    for shape in (narrow, wide):
        store.save(TUNED, choice_name(shape, shape, torch.float16), value)
    store.close()
    attention = Attention(opened(tmp_path)[1])
    assert attention.pick(narrow, narrow, torch.float16) == TORCH
    assert attention.pick(wide, wide, torch.float16) == GEMM


def test_a_choice_that_cannot_serve_the_width_is_no_choice() -> None:
    tuning_cache = TuningCache()
    wide = (1, 1, 64, 512)
    tuning_cache.set(choice_name(wide, wide, torch.float16), {"backend": "flash"})
    assert Attention(tuning_cache).pick(wide, wide, torch.float16) == GEMM


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "{", "NaN", '"\\ud800"'])
def test_a_value_written_by_another_hand_breaks_nothing(tmp_path: Path, text: str) -> None:
    store = Store.open(tmp_path)
    store.save(TUNED, "tile", 64)
    store.close()
    connection = sqlite3.connect(store.path, isolation_level=None)
    connection.execute("UPDATE finding SET value = ?", (text,))
    connection.close()
    history, tuning_cache = opened(tmp_path)
    tuning_cache.get("tile")
    tuning_cache.set("tile", 128)
    wait_for_the_disk()
    assert opened(tmp_path)[1].get("tile") == 128
    history.forget()
