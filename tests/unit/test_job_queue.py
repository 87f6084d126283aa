"""The pre-warm queue's book-keeping: order, progress, estimates."""
from __future__ import annotations

import pytest

from lib_onediff.options.sizes import Size
from lib_onediff.prewarm.job import QUEUED, RUNNING, Call, Job, Shape, check_tokens, rows_with_jobs
from lib_onediff.prewarm.queue import Estimates, JobQueue, known_times
from lib_onediff.runtime.rows import ResolutionRow, ShapeRow, rows_of
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


def test_what_is_asked_for_later_comes_last() -> None:
    queue, jobs = a_queue(64, 72)
    queue.move(jobs[0].id, 1)
    queue.add([(Size(80, 64), 77, SHAPES)], "API", {})
    assert widths(queue) == [72, 64, 80]


def test_another_length_of_the_prompt_is_another_job() -> None:
    queue, (job,) = a_queue(64)
    (same,) = queue.add([(Size(64, 64), 77, SHAPES)], "API", {})
    (longer,) = queue.add([(Size(64, 64), 154, (Shape(2, 154),))], "API", {})
    assert same == job and longer.id != job.id and (longer.tokens, longer.total) == (154, 3)


@pytest.mark.parametrize("tokens", [77, 154, 231])
def test_usual_lengths(tokens: int) -> None:
    check_tokens(tokens)


@pytest.mark.parametrize("tokens", [0, -77, 76, 78, 308, 10**9])
def test_other_lengths_are_a_sentence(tokens: int) -> None:
    with pytest.raises(ValueError, match="77, 154 or 231 tokens, not"):
        check_tokens(tokens)


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


def test_a_cancelled_job_counts_no_more() -> None:
    queue, (job,) = a_queue(64)
    queue.take()
    assert queue.cancel(job.id)
    queue.advance(job, job.calls_left()[0], 0.25, 1)
    queue.say(job, "checking")
    queue.end(job, "done", "")
    now = queue.get(job)
    assert (now.state, now.done, now.what) == ("cancelled", 0, "")


# --- estimates --------------------------------------------------------------------------------------------------------


def a_call(width: int, latents: int, number: int) -> Call:
    return Call(Size(width, 64), Shape(latents, 77), number)


def test_nothing_is_known_at_first() -> None:
    assert Estimates().seconds([a_call(64, 2, 0)], {}) is None
    assert Estimates().seconds([], {}) == 0


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


def test_a_queued_job_tells_how_long_it_will_take() -> None:
    queue, (first,) = a_queue(64)
    queue.take()
    for call in first.calls_left():
        queue.advance(first, call, 1.0, 1)
    (second,) = queue.add([(Size(128, 64), 77, SHAPES)], "panel", {})
    assert second.estimated_seconds == pytest.approx(2 * 6 * 3 / 4, rel=0.5)
    (third,) = queue.add([(Size(72, 64), 77, SHAPES)], "panel", {
        ("72x64", 2, 77): (1000.0, 3000.0), ("72x64", 1, 77): (500.0, 1500.0),
    })
    assert third.estimated_seconds == pytest.approx(4 + 2 + 1 + 2 + 1 + 0.5)


def test_history_is_what_is_known() -> None:
    history = [
        HistoryRow("one", "SD1", "64x64", 2, 77, "float16", step_ms=10.0, host_ms=20.0),
        HistoryRow("two", "SDXL", "64x64", 2, 77, "float16", step_ms=90.0),
        HistoryRow("one", "SD1", "64x64", 1, 77, "float16"),
    ]
    rows = rows_of([], history)
    assert known_times(rows, "SD1") == {("64x64", 2, 77): (10.0, 20.0)}
    assert known_times(rows, "SDXL") == {("64x64", 2, 77): (90.0, None)}
    assert known_times(rows, "SD2") == {}


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


def test_rows_of_a_model_that_nobody_knows() -> None:
    queue, _ = a_queue(64, 72)
    told = rows_with_jobs([a_row("64x64", "SD1"), a_row("64x64", "SDXL")], queue.jobs(), None)
    assert [(row.resolution, row.model, row.state) for row in told] == [
        ("72x64", "", "queued"), ("64x64", "SD1", "queued"), ("64x64", "SDXL", "queued"),
    ]


def test_a_running_job_is_told_before_a_queued_one() -> None:
    queue, (job, _) = a_queue(64, 72)
    queue.take()
    queue.add([(Size(64, 64, 2), 77, SHAPES)], "panel", {})
    assert rows_with_jobs([], queue.jobs(), "SD1")[0].state == "warming 0 %"
    assert {now.state for now in queue.jobs()} == {RUNNING, QUEUED} and job.share == 0


def test_a_row_of_decodes_alone_is_no_place_for_a_job() -> None:
    decode = [HistoryRow("architecture", "VAE decoder", "64x64", 1, 0, "float16", step_ms=10.0)]
    queue, _ = a_queue(64)
    told = rows_with_jobs(rows_of([], decode), queue.jobs(), "SD1")
    assert [(row.model, row.state) for row in told] == [("SD1", "queued"), ("VAE decoder", "on disk")]
    assert isinstance(told[1].shapes[0], ShapeRow)
