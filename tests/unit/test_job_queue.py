"""The pre-warm queue's book-keeping: order, progress, estimates."""
from __future__ import annotations

import pytest

from lib_onediff.options.sizes import Size
from lib_onediff.prewarm.job import RUNNING, Call, Job, Shape, rows_with_jobs
from lib_onediff.prewarm.queue import Estimates, JobQueue
from lib_onediff.runtime.rows import ResolutionRow, rows_of
from lib_onediff.store.history import HistoryRow

SHAPES = (Shape(2, 77), Shape(1, 77))


def a_queue(*widths: int) -> tuple[JobQueue, list[Job]]:
    queue = JobQueue()
    return queue, queue.add([(Size(width, 64), 77, SHAPES) for width in widths], "panel", {})


def widths(queue: JobQueue) -> list[int]:
    return [job.size.width for job in queue.jobs()]


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved, to, order", [
    (96, 0, [96, 64, 72, 80, 88]), (64, 2, [72, 80, 64, 88, 96]), (80, 2, [64, 72, 80, 88, 96]),
    (64, 99, [72, 80, 88, 96, 64]), (88, -5, [88, 64, 72, 80, 96]),
])
def test_a_job_gets_another_place(moved: int, to: int, order: list[int]) -> None:
    queue, jobs = a_queue(64, 72, 80, 88, 96)
    (job,) = [job for job in jobs if job.size.width == moved]
    version = queue.wait_for_change(-1, 1)
    assert queue.move(job.id, to) and widths(queue) == order
    assert queue.wait_for_change(version, 0) > version
    taken = [queue.take() for _ in order]
    assert [job.size.width for job in taken if job] == order and queue.take() is None


def test_only_what_is_queued_moves() -> None:
    queue, jobs = a_queue(64, 72, 80)
    running = queue.take()
    assert running is not None and running.id == jobs[0].id
    assert not queue.move(running.id, 1) and not queue.move(99, 0)
    assert queue.move(jobs[2].id, 0) and widths(queue) == [64, 80, 72], "what runs stays before the queue"
    assert queue.cancel(jobs[2].id) and not queue.move(jobs[2].id, 1)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_of_a_job() -> None:
    queue, (job,) = a_queue(64)
    assert (job.share, job.what, job.estimated_seconds) == (0.0, "", None)
    queue.take()
    queue.say(job, "checking")
    calls = job.calls_left()
    assert [(call.shape.latents, call.number) for call in calls] == [(2, 0), (2, 1), (2, 2), (1, 0), (1, 1), (1, 2)]
    queue.advance(job, calls[0], 0.25, 3)
    now = queue.get(job)
    assert (now.share, now.what, now.seconds, now.state) == (0.5, "checking", 0.25, RUNNING)
    assert now.calls_left() == calls[3:]
    queue.end(job, "done", "")
    assert (queue.get(job).what, queue.get(job).estimated_seconds) == ("", None)


# --- estimates --------------------------------------------------------------------------------------------------------


def a_call(width: int, latents: int, number: int) -> Call:
    return Call(Size(width, 64), Shape(latents, 77), number)


def test_what_was_measured_of_the_shape_counts() -> None:
    known = {("64x64", 2, 77): (10.0, 40.0)}
    calls = [a_call(64, 2, number) for number in range(3)]
    assert Estimates().seconds(calls, known) == pytest.approx(0.05 + 0.02 + 0.01)
    assert Estimates().seconds([*calls, a_call(64, 1, 0)], known) is None, "nobody knows the other half"


def test_else_this_sessions_calls_by_their_size() -> None:
    estimates = Estimates()
    for number, seconds in enumerate((3.0, 2.0, 1.0)):
        estimates.note(a_call(64, 2, number), seconds)
    calls = [a_call(128, 2, number) for number in range(3)]
    assert estimates.seconds(calls, {}) == pytest.approx(12.0)
    assert estimates.seconds([a_call(64, 1, 1)], {}) == pytest.approx(1.0)
    estimates.note(a_call(64, 2, 1), 200.0)
    estimates.note(a_call(64, 2, 1), 2.0)
    assert estimates.seconds([a_call(64, 2, 1)], {}) == pytest.approx(2.0), "one that had to wait spoils nothing"


# --- the table with the queue -----------------------------------------------------------------------------------------


def a_row(resolution: str, model: str, state: str = "ready") -> ResolutionRow:
    history = [HistoryRow("architecture", model, resolution, 2, 77, "float16", step_ms=10.0)]
    (row,) = rows_of([], history)
    return type(row)(**{**vars(row), "state": state})


def test_rows_show_what_is_being_made_ready() -> None:
    queue, jobs = a_queue(64, 72, 96)
    queue.take()
    queue.advance(jobs[0], jobs[0].calls_left()[0], 1.0, 2)
    rows = [a_row("72x64", "SD1"), a_row("80x64", "SD1"), a_row("64x64", "SD1"), a_row("64x64", "SDXL")]
    told = rows_with_jobs(rows, queue.jobs(), "SD1")
    assert [(row.resolution, row.model, row.state) for row in told] == [
        ("96x64", "SD1", "queued"), ("72x64", "SD1", "queued"), ("80x64", "SD1", "ready"),
        ("64x64", "SD1", "warming 33 %"), ("64x64", "SDXL", "ready"),
    ]
    assert told[2] == rows[1] and told[0].shapes == () and told[0].bytes == 0
    for job in jobs:
        queue.cancel(job.id)
    assert rows_with_jobs(rows, queue.jobs(), "SD1") == rows
