"""The Cache page's table of sizes, with the states of the pre-warm queue's jobs while an image is in progress."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from api_builders import SECONDS, LockOnly, wait_until

from lib_onediff.core.jobs import CANCELLED, DONE, PREWARM, RUNNING, JobQueue
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm.worker import SizeJob, WarmUp, rows_with_jobs
from lib_onediff.runtime.rows import ResolutionRow, rows_of
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import HistoryRow


@pytest.fixture
def queue() -> Iterator[WarmUp]:
    """A queue whose first job, 64x64, is running; the lock is held, as by an image in progress."""
    webui = LockOnly()
    queue = WarmUp(webui, runtime, JobQueue())
    with webui.lock:
        queue.add([Size(width, 64) for width in (64, 72, 80)], "panel")
        wait_until(lambda: queue.jobs()[0].state == RUNNING)
        yield queue
        queue.stop()
    queue.stop(SECONDS)


def a_row(resolution: str, model: str) -> ResolutionRow:
    history = [HistoryRow("architecture", model, resolution, 2, 77, "float16", step_ms=10.0)]
    (row,) = rows_of([], history)
    return replace(row, state="ready")


def a_job(state: str, **values: Any) -> SizeJob:
    return SizeJob(PREWARM, "64x64", state=state, size=Size(64, 64), **values)


def test_rows_show_which_sizes_of_the_loaded_model_are_queued_or_being_prewarmed(queue: WarmUp) -> None:
    """shown: the table's rows with the states of the jobs; sizes without a row come first. After the queue is stopped,
    the rows are as before."""
    jobs = [a_job(RUNNING, share=0.33), *queue.jobs()[1:]]
    rows = [a_row("72x64", "SD1"), a_row("104x64", "SD1"), a_row("64x64", "SD1"), a_row("64x64", "SDXL")]
    shown = rows_with_jobs(rows, jobs, "SD1")
    assert [(row.resolution, row.model, row.state) for row in shown] == [
        ("80x64", "SD1", "queued"), ("72x64", "SD1", "queued"), ("104x64", "SD1", "ready"),
        ("64x64", "SD1", "warming 33 %"), ("64x64", "SDXL", "ready"),
    ]
    assert shown[2] == rows[1] and shown[0].shapes == () and shown[0].bytes == 0
    queue.stop()
    assert rows_with_jobs(rows, queue.jobs(), "SD1") == rows


def test_a_row_shows_how_long_the_last_finished_prewarming_took_and_how_much_time_it_saved() -> None:
    """The second job took 0.8 s, its three UNet calls 0.5 s. Three usual steps of 10 ms take 0.03 s, so the first image
    is 0.47 s faster. A cancelled job counts for nothing."""
    jobs = [
        a_job(DONE, seconds=9.0, of_calls=9.0, made=3), a_job(DONE, seconds=0.8, of_calls=0.5, made=3),
        a_job(CANCELLED, seconds=7.0, of_calls=7.0, made=1),
    ]
    shown = rows_with_jobs([a_row("64x64", "SD1"), a_row("64x64", "SDXL")], jobs, "SD1")
    assert [(row.prewarm_s, row.saved_s) for row in shown] == [(0.8, pytest.approx(0.47)), (None, None)]
