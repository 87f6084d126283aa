"""What pages and the API ask of the runtime."""
from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import a_call, served
from torch import nn

from lib_onediff.core.table import State
from lib_onediff.core.tuning_cache import TuningCache
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

# Twice as many as it takes; for work that grows with the square of the rows it would be a thousand.
MOST_CALLS_FOR_A_ROW = 330


@pytest.fixture(autouse=True)
def no_choices() -> Iterator[None]:
    yield
    runtime.tuning_cache.clear()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    runtime.history.open(tmp_path)
    runtime.tuning_cache.attach(runtime.history.tuned, runtime.history.tune)
    return tmp_path


def another_process(folder: Path) -> tuple[History, TuningCache]:
    runtime.history.commit()
    history, tuning_cache = History(), TuningCache()
    history.open(folder)
    tuning_cache.attach(history.tuned, history.tune)
    return history, tuning_cache


def test_purging_the_disk_leaves_graphs_and_pins(unet: nn.Module, store: Path) -> None:
    for _ in range(3):
        served(unet, a_call(unet))
    runtime.tuning_cache.set("kernel addition, small, float16", [64, 4])
    runtime.pin("64x64", runtime.rows()[0].model, True)
    runtime.keep_history()
    runtime.history.commit()
    assert another_process(store)[0].rows()
    assert runtime.purge_disk() >= 0
    history, tuning_cache = another_process(store)
    assert history.rows() == [] and tuning_cache.get("kernel addition, small, float16") is None
    assert runtime.tuning_cache.get("kernel addition, small, float16") is None, "it is measured again"
    assert history.pins() == runtime.history.pins() != frozenset()
    assert runtime.rows()[0].state == State.READY.value


def count_calls(work: Callable[[], object]) -> int:
    """How many functions, Python's and C's, work calls in this thread: a number that no slower machine changes."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_five_hundred_ready_rows_are_little_work(unet: nn.Module) -> None:
    for _ in range(3):
        served(unet, a_call(unet))
    [entry] = runtime.table.entries()
    [(managed, kept)] = [(held.managed, held.kept) for held in runtime.services.holdings.graphs()]
    for height in range(1, 501):
        key = type(entry.key)(**{**vars(entry.key), "height": height})
        again = runtime.table.entry(key, entry.model)
        again.state, again.needs = State.READY, height << 20
        managed.keep(key, kept.runner)
        again.own._times.extend([1.0] * 32)
        again.host._times.extend([2.0] * 32)
    rows = runtime.rows()
    assert len(rows) == 500 and all(row.bytes > 0 and row.state == "ready" for row in rows)
    assert count_calls(runtime.rows) < MOST_CALLS_FOR_A_ROW * 500


def test_a_page_does_not_wait_for_a_call(unet: nn.Module) -> None:
    for _ in range(3):
        served(unet, a_call(unet))
    before = runtime.rows(), runtime.totals().vram
    held, done = threading.Event(), threading.Event()

    def call() -> None:
        with runtime.services.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=call)
    thread.start()
    held.wait(30)
    began = time.perf_counter()
    try:
        assert ([row.bytes for row in runtime.rows()], runtime.totals().vram) == (
            [row.bytes for row in before[0]], before[1]
        )
        assert time.perf_counter() - began < 1
    finally:
        done.set()
        thread.join()
