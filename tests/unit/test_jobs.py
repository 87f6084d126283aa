"""The list of jobs (pre-warms, comparisons, and the WebUI's images): their order, what each waits for, and
cancelling."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from busy import until

from lib_onediff.core.jobs import COMPARISON, IMAGE, PREWARM, Job, JobQueue, Stopped
from lib_onediff.core.refusal import Refusal

SECONDS = 30


class Turns:
    """A job queue. go: when set, ends the job of block(). images: the jobs of the WebUI's images, which the queue
    lists. cancelled: the titles of the jobs whose cancel function was called."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.images: list[Job] = []
        self.queue = JobQueue(lambda: self.images)
        self.cancelled: list[str] = []

    def add(self, kind: str, title: str, work: Callable[[], str] | None = None, **more: Any) -> Job:
        job = Job(kind, title, work=work or (lambda: ""), cancel=lambda: self.cancelled.append(title), **more)
        (added,) = self.queue.add([job], ahead_of=PREWARM if kind == COMPARISON else "")
        return added

    def block(self) -> Job:
        """Add a job that runs until go is set, and wait until it runs."""
        added = self.add(PREWARM, "64x64", lambda: "" if self.go.wait(SECONDS) else "too late")
        until(lambda: self.queue.jobs()[0].state == "running", "it to run", SECONDS, 0.01)
        return added

    def listed(self) -> list[tuple[str, str, str]]:
        """(title, state, what it waits for) of each job."""
        return [(job.title, job.state, job.what) for job in self.queue.jobs()]

    def over(self) -> list[tuple[str, str, str]]:
        """Set go, and return (title, state, reason) of each job once all have ended."""
        self.go.set()
        until(lambda: not any(job.pending for job in self.queue.jobs()), self.listed, SECONDS, 0.01)
        return [(job.title, job.state, job.reason) for job in self.queue.jobs()]


@pytest.fixture
def turns() -> Turns:
    return Turns()


def test_comparisons_run_before_pre_warms_and_each_job_names_the_one_that_it_waits_for(turns: Turns) -> None:
    """While one pre-warm runs, a pre-warm and then two comparisons are queued. All three wait for the running job."""
    turns.block()
    turns.add(PREWARM, "72x64")
    turns.add(COMPARISON, "A")
    turns.add(COMPARISON, "B")
    waits = ("queued", "waits for pre-warming 64x64")
    assert turns.listed() == [("64x64", "running", ""), ("A", *waits), ("B", *waits), ("72x64", *waits)]
    assert [title for title, _, _ in turns.over()] == ["64x64", "A", "B", "72x64"]


def test_a_job_with_the_key_of_a_pending_one_is_not_queued_again(turns: Turns) -> None:
    """The pending job is returned instead. Once it is over, the same work can be queued again."""
    turns.block()
    first = turns.add(PREWARM, "72x64", key="72")
    assert turns.add(PREWARM, "72x64", key="72").id == first.id and len(turns.queue.jobs()) == 2
    turns.over()
    assert turns.add(PREWARM, "72x64", key="72").id != first.id


def test_jobs_without_a_key_are_all_queued(turns: Turns) -> None:
    turns.block()
    assert [job.title for job in turns.queue.add([Job(COMPARISON, "A"), Job(COMPARISON, "B")])] == ["A", "B"]
    assert [title for title, _, _ in turns.over()] == ["64x64", "A", "B"]


def test_cancelling_reaches_one_job_alone(turns: Turns) -> None:
    """A queued comparison, the WebUI's running image, and a running pre-warm are cancelled in turn. The running
    pre-warm first finishes what it has begun, and the next job waits for it."""
    runs = turns.block()
    waits = turns.add(COMPARISON, "A")
    turns.images = [Job(IMAGE, "512x512", state="running", cancel=lambda: turns.cancelled.append("image"))]
    assert turns.listed()[0] == ("512x512", "running", "") and turns.queue.jobs()[0].id
    assert turns.queue.cancel(waits.id) and not turns.queue.cancel(waits.id) and not turns.queue.cancel(10**9)
    assert turns.cancelled == ["A"] and [job.state for job in turns.queue.jobs()] == ["cancelled", "running", "running"]
    assert turns.queue.cancel(turns.queue.jobs()[1].id) and turns.cancelled == ["A", "image"]
    turns.images = []
    assert turns.queue.cancel(runs.id)
    after = turns.add(COMPARISON, "B")
    (waits_for,) = [what for title, _, what in turns.listed() if title == "B"]
    assert waits_for == "waits for pre-warming 64x64", "it ends what it has begun"
    assert after.state == "queued" and turns.over()[-1] == ("B", "done", "")


def test_a_job_waits_for_the_webuis_image_and_then_runs_in_its_turn(turns: Turns) -> None:
    """exclusively() takes the WebUI's lock, which the test holds as a running image does. Once the job has its turn,
    the WebUI's images are its own, and it is not shown as waiting for them."""
    lock = threading.Lock()
    turns.images = [Job(IMAGE, "512x512", state="running")]

    def exclusively(work: Callable[[], Any]) -> Any:
        with lock:
            return work()

    job = Job(COMPARISON, "A")
    job.work = lambda: turns.queue.in_turn(job, exclusively, lambda: "" if turns.go.wait(SECONDS) else "too late")
    with lock:
        turns.queue.add([job])
        wanted = [("512x512", "running", ""), ("A", "running", "waits for the image 512x512")]
        until(lambda: turns.listed() == wanted, turns.listed, SECONDS, 0.01)
    until(lambda: turns.listed() == [("A", "running", "")], turns.listed, SECONDS, 0.01)
    turns.images = []
    assert turns.over() == [("A", "done", "")]


def test_a_job_cancelled_while_it_waits_for_an_image_ends_at_once(turns: Turns) -> None:
    lock = threading.Lock()
    turns.images = [Job(IMAGE, "512x512", state="running")]

    def exclusively(work: Callable[[], Any]) -> Any:
        with lock:
            return work()

    job = Job(COMPARISON, "A")
    job.work = lambda: turns.queue.in_turn(job, exclusively, str)
    with lock:
        turns.queue.add([job])
        wanted = ("A", "running", "waits for the image 512x512")
        until(lambda: turns.listed()[-1] == wanted, turns.listed, SECONDS, 0.01)
        assert turns.queue.cancel(job.id) and turns.listed()[0] == ("A", "cancelled", "")


def test_each_job_has_the_reason_of_its_end_and_the_next_one_runs(turns: Turns) -> None:
    """A job that raises Refusal or another exception has failed, and its reason is the first line of the text. One that
    raises Stopped is cancelled. The text that a job returns is its reason, too."""

    def fails(error: Exception) -> Callable[[], str]:
        def work() -> str:
            raise error

        return work

    turns.block()
    for title, error in (("A", Refusal("no model")), ("B", RuntimeError("a fault\nof ours")), ("C", Stopped())):
        turns.add(COMPARISON, title, fails(error))
    turns.add(COMPARISON, "D", lambda: "without a graph")
    assert turns.over() == [
        ("64x64", "done", ""), ("A", "failed", "no model"), ("B", "failed", "a fault"), ("C", "cancelled", ""),
        ("D", "done", "without a graph"),
    ]
    assert [job.share == 1 for job in turns.queue.jobs()] == [True, False, False, False, True]
    assert turns.queue.clear() == 5 and turns.queue.jobs() == []
