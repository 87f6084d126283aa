"""The pre-warm queue, with the real runtime, a small real UNet, and SmallWebUI in place of a WebUI."""
from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import pytest
from busy import until

from lib_onediff.core.jobs import Job, JobQueue
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.sizes import Size
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.call_stats import CallStats, LastCall
from lib_onediff.runtime.runtime import runtime

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
SMALL = Size(64, 64)
MOST_PIXELS = 256 * 256


class SmallWebUI:
    """A WebUI that has a lock for images and a model, and nothing else. calls: (width, height, batch) of every UNet
    call that pre-warming has made."""

    def __init__(self, unet: Any) -> None:
        self.unet = unet
        self.lock = threading.Lock()
        self.calls: list[tuple[int, int, int]] = []
        diffusers_host.attach(unet)

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        if width * height > MOST_PIXELS:
            raise Refusal(f"{width}x{height} is more than this model can draw")
        if batch > 100:
            raise RuntimeError("the tensors do not fit\nand many more lines")
        builders.served(self.unet, builders.a_call(self.unet, height // 8, width // 8, batch, tokens))
        self.calls.append((width, height, batch))

    def call_shapes(self, pictures: int, tokens: int) -> tuple[tuple[int, int], ...]:
        return (2 * pictures, tokens), (pictures, tokens)

    def model_name(self) -> str | None:
        return runtime.model_name(self.unet)

    def exclusively(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()


@pytest.fixture
def webui() -> Iterator[SmallWebUI]:
    unet = builders.diffusers_unet()
    yield SmallWebUI(unet)
    diffusers_host.detach(unet)


@pytest.fixture
def queue(webui: SmallWebUI) -> Iterator[WarmUp]:
    queue = WarmUp(webui, runtime, JobQueue())
    yield queue
    queue.stop(SECONDS)


def wait_until_idle(queue: WarmUp) -> None:
    until(lambda: not any(job.pending for job in queue.jobs()), queue.jobs, SECONDS, 0.01)


def finished(queue: WarmUp, job: Job) -> Job:
    wait_until_idle(queue)
    return next(now for now in queue.jobs() if now.id == job.id)


def test_a_pre_warmed_size_is_checked_for_calls_with_and_without_the_negative_prompt(
    webui: SmallWebUI, queue: WarmUp
) -> None:
    """The size is for two images: three calls with a batch of 4 (with the negative prompt), and three with 2. Both
    shapes are then "proved": our output is close to the host's."""
    (job,) = queue.add([Size(64, 72, 2)], "panel")
    assert (job.state, job.total, job.source) == ("queued", 6, "panel")
    done = finished(queue, job)
    assert (done.state, done.done, done.reason) == ("done", 6, "")
    assert done.seconds > 0
    assert webui.calls == [(64, 72, 4)] * 3 + [(64, 72, 2)] * 3
    (row,) = runtime.rows()
    assert (row.resolution, row.state) == ("64x72", "proved")
    assert {(shape.batch, shape.tokens, shape.state) for shape in row.shapes} == {(4, 77, "proved"), (2, 77, "proved")}


def test_a_size_that_cannot_be_pre_warmed_fails_with_its_reason_and_the_next_one_goes_on(queue: WarmUp) -> None:
    """SmallWebUI.warm() refuses the first size as too large. For the second one, a batch of 64 images, it raises an
    error of two lines, of which the first is the reason."""
    failing, faulty, following = queue.add([Size(512, 512), Size(64, 64, 64), SMALL], "panel")
    failed = finished(queue, failing)
    assert (failed.state, failed.reason, failed.done) == ("failed", "512x512 is more than this model can draw", 0)
    failed = finished(queue, faulty)
    assert (failed.state, failed.reason) == ("failed", "the tensors do not fit"), "a fault is one line"
    assert finished(queue, following).state == "done"


def test_cancelling_the_queue_stops_after_the_call_in_progress(webui: SmallWebUI, queue: WarmUp) -> None:
    """Of twenty sizes, three are done when queue.stop() is called. The fourth is in progress: it may be done or
    cancelled afterwards, and the others are cancelled."""
    jobs = queue.add([Size(64 + 8 * step, 64) for step in range(20)], "panel")
    while len(webui.calls) < 3 * 6 + 2:
        time.sleep(0.001)
    assert queue.stop() > 0
    made = len(webui.calls)
    wait_until_idle(queue)
    webui.exclusively(lambda: None)
    assert len(webui.calls) <= made + 1
    states = [job.state for job in queue.jobs()]
    assert states[:3] == ["done"] * 3 and set(states[4:]) == {"cancelled"}
    assert len(states) == len(jobs) and queue.stop() == 0, "there is nothing left to cancel"


# --- its progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "reason", "calls"), [
    ("graph", "", [(64, 64, 2), (64, 64, 1)]),
    ("plain", "its graph needs 900 MiB", [*[(64, 64, 2)] * 3, *[(64, 64, 1)] * 3]),
])
def test_a_size_with_a_graph_is_done_after_one_call_and_one_without_says_why(
    webui: SmallWebUI, monkeypatch: pytest.MonkeyPatch, route: str, reason: str, calls: list[tuple[int, int, int]]
) -> None:
    """With a graph, one call of each batch suffices. Without one, three calls are made, and the job has the reason for
    having no graph. route, reason: what the runtime says of every call; "graph" means that it replayed a graph."""
    key = SimpleNamespace(backend="native")
    last: Any = LastCall(route, reason, SimpleNamespace(key=key))  # type: ignore[arg-type]
    always = property(lambda self: last, lambda self, other: None)
    monkeypatch.setattr(CallStats, "last_call", always, raising=False)
    queue = WarmUp(webui, runtime, JobQueue())
    (job,) = queue.add([SMALL], "panel")
    done = finished(queue, job)
    assert (done.state, done.done, done.share, done.reason, webui.calls) == ("done", 6, 1.0, reason, calls)


def test_the_share_done_grows_and_is_1_only_after_the_decode(
    webui: SmallWebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """job.share: the part of the job that is done. The decode is made as long as all UNet calls of the job. The second
    job expects that from the first one, so its share is smaller when its decode begins."""
    decoding = threading.Event()
    shares = []
    queue = WarmUp(webui, runtime, JobQueue())

    def decode(width: int, height: int, images: int) -> None:
        shares.append([job.share for job in queue.jobs() if job.state == "running"])
        decoding.set()
        time.sleep(sum(job.seconds for job in queue.jobs() if job.state == "running"))

    monkeypatch.setattr(webui, "warm_decode", decode, raising=False)
    for number, size in enumerate((Size(64, 80), Size(64, 88))):
        (job,) = queue.add([size], "panel")
        shares_seen = []
        while not decoding.is_set():
            shares_seen += [now.share for now in queue.jobs() if now.id == job.id]
            time.sleep(0.001)
        done = finished(queue, job)
        assert shares_seen == sorted(shares_seen) and all(share < 1 for share in shares_seen)
        (before_the_decode,) = shares[number]
        assert before_the_decode < 1
        assert (done.state, done.share) == ("done", 1.0)
        assert done.seconds > 1.5 * done.of_calls, "the decode is of the job"
        decoding.clear()
    assert before_the_decode < 0.75


# --- turns ------------------------------------------------------------------------------------------------------------


class WakingLock:
    """A lock as those of A1111 and Forge: its release wakes the thread that has waited longest, but any thread may take
    the lock before that one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            turn = threading.Event()
            self._waiting.append(turn)
            turn.wait()
            self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        self._lock.release()


class UnfairWebUI(SmallWebUI):
    """A WebUI with an unfair lock: the thread that has just released it may take it again before those that wait."""

    def __init__(self, unet: Any) -> None:
        super().__init__(unet)
        self.lock = WakingLock()  # type: ignore[assignment]

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one real call; after it, only keep the interpreter busy for 3 ms, so that other threads hardly run, as
        during kernel launches and captures."""
        if not self.calls:
            super().warm(width, height, batch, tokens)
        self.calls.append((width, height, batch))
        end = time.perf_counter() + 0.003
        while time.perf_counter() < end:
            pass


def test_an_image_waits_for_at_most_one_call_of_the_queue_even_with_an_unfair_lock() -> None:
    """passed_by: how many calls the queue makes between an image's request for the lock and its turn, for ten
    images."""
    unet = builders.diffusers_unet()
    webui = UnfairWebUI(unet)
    queue = WarmUp(webui, runtime, JobQueue())
    queue.add([Size(64 + 8 * step, 64) for step in range(100)], "panel")
    while not webui.calls:
        time.sleep(0.001)
    passed_by = []
    for _ in range(10):
        calls_before = len(webui.calls)
        with webui.lock:
            passed_by.append(len(webui.calls) - calls_before)
            calls_before = len(webui.calls)
        # The worker has its turn between two pictures.
        until(lambda calls_before=calls_before: len(webui.calls) > calls_before, "the warm-up to go on", pause=0.001)
    assert any(job.pending for job in queue.jobs()), "the warm-up was over before the pictures"
    queue.stop(SECONDS)
    diffusers_host.detach(unet)
    assert max(passed_by) <= 1, passed_by


def test_the_process_can_end_in_the_middle_of_a_pre_warm() -> None:
    """The process ends with exit code 0 and without messages. Python 3.10 to 3.13 abort if a daemon thread is inside a
    C++ library when the process ends."""
    program = """
import sys, time
sys.path[:0] = ["tests", "tests/unit"]
import builders, test_warmup
from lib_onediff.runtime.runtime import runtime
from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.sizes import Size
from lib_onediff.core.table import State
from lib_onediff.prewarm.worker import WarmUp
webui = test_warmup.SmallWebUI(builders.diffusers_unet())
queue = WarmUp(webui, runtime, JobQueue())
queue.add([Size(256, 256 - 8 * step) for step in range(20)], "panel")
while not webui.calls:
    time.sleep(0.001)
print("leaving")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")
