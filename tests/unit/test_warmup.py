"""The pre-warm queue, with a real UNet behind the real runtime and a very small WebUI."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import builders
import pytest

from lib_onediff.core.refusal import Refusal
from lib_onediff.core.settings import Settings
from lib_onediff.core.sizes import Size
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.worker import Job, WarmUp
from lib_onediff.runtime.runtime import runtime

SECONDS = 60
SMALL = Size(64, 64)
MOST_PIXELS = 256 * 256


class SmallWebUI:
    """A queue lock, a model, and nothing else. calls: (width, height, batch) of every UNet call to warm up."""

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
    queue = WarmUp(webui, runtime)
    yield queue
    queue.stop(SECONDS)


def wait_until_idle(queue: WarmUp) -> None:
    deadline = time.monotonic() + SECONDS
    while queue.busy():
        assert time.monotonic() < deadline, queue.jobs()
        time.sleep(0.01)


def finished(queue: WarmUp, job: Job) -> Job:
    wait_until_idle(queue)
    return next(now for now in queue.jobs() if now.id == job.id)


def test_a_size_is_made_ready_for_both_kinds_of_calls(webui: SmallWebUI, queue: WarmUp) -> None:
    (job,) = queue.add([Size(64, 72, 2)], "panel")
    assert (job.state, job.total, job.source) == ("queued", 6, "panel")
    done = finished(queue, job)
    assert (done.state, done.done, done.reason) == ("done", 6, "")
    assert done.seconds > 0
    assert webui.calls == [(64, 72, 4)] * 3 + [(64, 72, 2)] * 3
    (row,) = runtime.rows()
    assert (row.resolution, row.state) == ("64x72", "proved")
    assert {(shape.batch, shape.tokens, shape.state) for shape in row.shapes} == {(4, 77, "proved"), (2, 77, "proved")}


def test_the_first_picture_finds_its_size_ready(webui: SmallWebUI, queue: WarmUp) -> None:
    queue.add([SMALL], "panel")
    wait_until_idle(queue)
    times = []
    for _ in range(2):
        for batch in (2, 1):
            builders.served(webui.unet, builders.a_call(webui.unet, batch=batch, seed=5))
            assert runtime.status()["route"] == "plain"
        times.append({shape.batch: shape.host_ms for shape in runtime.rows()[0].shapes})
    # Noise proves nothing of a prompt: its first call is checked, and no other.
    assert times[0] == times[1] and None not in times[0].values(), "the host's own UNet ran again"


def test_a_size_that_cannot_be_fails_with_its_reason_and_the_next_goes_on(queue: WarmUp) -> None:
    failing, faulty, following = queue.add([Size(512, 512), Size(64, 64, 64), SMALL], "panel")
    failed = finished(queue, failing)
    assert (failed.state, failed.reason, failed.done) == ("failed", "512x512 is more than this model can draw", 0)
    failed = finished(queue, faulty)
    assert (failed.state, failed.reason) == ("failed", "the tensors do not fit"), "a fault is one line"
    assert finished(queue, following).state == "done"


def test_switched_off(queue: WarmUp) -> None:
    runtime.configure(Settings(enabled=False))
    with pytest.raises(ValueError, match="switched off in the settings .*, so nothing can be made ready"):
        queue.add([SMALL], "panel")
    assert queue.jobs() == []


def test_cancelling_twenty_in_the_middle(webui: SmallWebUI, queue: WarmUp) -> None:
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
    assert not any(queue.cancel(job.id) for job in jobs), "there is nothing left to cancel"
    assert not queue.cancel(10**9)
