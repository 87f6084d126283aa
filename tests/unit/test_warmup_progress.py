"""What the pre-warm queue tells of a job, when a size needs no more calls, and what goes on while a compiler works."""
from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from test_warmup import SECONDS, SMALL, SmallWebUI, finished, queue, wait_until_idle, webui

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import State
from lib_onediff.options.sizes import Size
from lib_onediff.prewarm import worker as warmup
from lib_onediff.prewarm.job import Job
from lib_onediff.prewarm.worker import COMPILING, WarmUp
from lib_onediff.runtime.runtime import runtime

__all__ = ["queue", "webui"]  # Fixtures.


def test_a_long_prompt(webui: SmallWebUI, queue: WarmUp) -> None:
    (job,) = queue.add([SMALL], "panel", tokens=154)
    assert (finished(queue, job).state, job.tokens) == ("done", 154)
    assert {(shape.batch, shape.tokens) for shape in runtime.rows()[0].shapes} == {(2, 154), (1, 154)}
    with pytest.raises(ValueError, match="not 100"):
        queue.add([SMALL], "panel", tokens=100)


def test_it_tells_what_it_is_doing(webui: SmallWebUI, queue: WarmUp) -> None:
    """And how long it will take, from the second size on."""
    told: list[Job] = []
    warm = webui.warm

    def listen(*call: int) -> None:
        told.append(queue.jobs()[-1])
        warm(*call)

    webui.warm = listen  # type: ignore[method-assign]
    queue.add([SMALL], "panel")
    wait_until_idle(queue)
    assert [job.what for job in told] == [warmup.CHECKING, warmup.MEASURING, warmup.MEASURING] * 2
    assert [job.share for job in told] == [number / 6 for number in range(6)]
    with webui.lock:
        (job,) = queue.add([Size(128, 64)], "panel")
        deadline = time.monotonic() + SECONDS
        while queue.jobs()[-1].what != warmup.WAITING:
            assert time.monotonic() < deadline, queue.jobs()[-1]
            time.sleep(0.01)
    assert job.estimated_seconds is not None and 0 < job.estimated_seconds < SECONDS
    done = finished(queue, job)
    left = [job.estimated_seconds for job in told[6:]]
    assert left == sorted(left, reverse=True) and done.estimated_seconds is None and done.what == ""


def test_history_tells_how_long_it_will_take(webui: SmallWebUI, queue: WarmUp, tmp_path: Path) -> None:
    runtime.history.open(tmp_path)
    queue.add([SMALL], "panel")
    wait_until_idle(queue)
    rows = {(row.batch, row.tokens): row for row in runtime.history.rows()}
    assert set(rows) == {(2, 77), (1, 77)} and all(row.uses == 0 and row.step_ms for row in rows.values())
    later = WarmUp(webui, runtime)
    (job,) = later.add([SMALL], "panel")
    # Two calls of a shape are too few to keep the host's time beside ours: it counts as much.
    assert {row.host_ms for row in rows.values()} == {None}
    expected = sum(5 * row.step_ms for row in rows.values()) / 1e3
    assert job.estimated_seconds == pytest.approx(expected, rel=0.5)
    later.stop(SECONDS)


def test_a_graph_that_is_there_needs_no_more_calls(webui: SmallWebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the third call of a size finds the graph that the second has captured."""
    status = runtime.status
    monkeypatch.setattr(runtime, "status", lambda: {**status(), "backend": "native", "route": "graph"})
    queue = WarmUp(webui, runtime)
    (job,) = queue.add([SMALL], "panel")
    assert (finished(queue, job).done, finished(queue, job).share) == (6, 1.0)
    assert webui.calls == [(64, 64, 2), (64, 64, 1)], "one call each found its graph"


def test_why_a_size_has_no_graph(webui: SmallWebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    status = runtime.status
    monkeypatch.setattr(runtime, "status", lambda: {
        **status(), "backend": "native", "route": "plain", "reason": "its graph needs 900 MiB",
    })
    queue = WarmUp(webui, runtime)
    (job,) = queue.add([SMALL], "panel")
    done = finished(queue, job)
    assert (done.state, done.reason) == ("done", "its graph needs 900 MiB")


def test_too_little_gpu_memory_is_one_line(webui: SmallWebUI, queue: WarmUp, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*call: int) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nand many more lines")

    monkeypatch.setattr(webui, "warm", exhausted)
    (job,) = queue.add([Size(64, 64, 2)], "panel")
    assert finished(queue, job).reason == "there is not enough GPU memory for 64x64 x2"


class DecodingWebUI(SmallWebUI):
    """decoded: what was asked for, and after how many UNet calls."""

    def __init__(self, unet: Any) -> None:
        super().__init__(unet)
        self.decoded: list[tuple[tuple[int, int, int], int]] = []

    def warm_decode(self, width: int, height: int, pictures: int) -> None:
        assert not self.lock.acquire(blocking=False), "a picture could be made meanwhile"
        self.decoded.append(((width, height, pictures), len(self.calls)))
        key = ShapeKey.of_decode("vae", torch.zeros(pictures, 4, height // 8, width // 8), False)
        runtime.table.entry(key, "VAE decoder").state = State.PROVED
        raise RuntimeError("what goes wrong in a decode costs no job")


def test_the_first_decode_is_checked_too(webui: SmallWebUI) -> None:
    decoding = DecodingWebUI(webui.unet)
    queue = WarmUp(decoding, runtime)
    for _ in range(2):
        queue.add([SMALL, Size(72, 64, 2)], "panel")
        wait_until_idle(queue)
    assert decoding.decoded == [((64, 64, 1), 6), ((72, 64, 2), 12)], "once for each size, when its UNet calls are made"
    assert {job.state for job in queue.jobs()} == {"done"}


def test_the_next_place_in_the_queue(webui: SmallWebUI, queue: WarmUp) -> None:
    with webui.lock:
        first, second, third = queue.add([SMALL, Size(72, 64), Size(80, 64)], "panel")
        deadline = time.monotonic() + SECONDS
        while queue.jobs()[0].state != "running":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not queue.move(first.id, 1) and queue.move(third.id, 0)
        assert [job.id for job in queue.jobs()] == [first.id, third.id, second.id]
    wait_until_idle(queue)
    assert [call[0] for call in webui.calls] == [64] * 6 + [80] * 6 + [72] * 6


def test_what_was_made_ready_is_no_use(webui: SmallWebUI, queue: WarmUp, tmp_path: Path) -> None:
    runtime.history.open(tmp_path)
    builders.served(webui.unet, builders.a_call(webui.unet, batch=2))
    runtime.keep_history()
    queue.add([SMALL, Size(72, 64)], "panel")
    wait_until_idle(queue)
    builders.served(webui.unet, builders.a_call(webui.unet, batch=2))
    runtime.keep_history()
    assert {(row.resolution, row.batch): row.uses for row in runtime.history.rows()} == {
        ("64x64", 2): 2, ("64x64", 1): 0, ("72x64", 2): 0, ("72x64", 1): 0,
    }


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[None]]:
    """The UNet's kernels are being compiled until this has a result."""
    begun: Future[None] = Future()
    monkeypatch.setattr(runtime.devices, "prepare_early", lambda unet, settings: begun)
    yield begun
    if not begun.done():
        begun.set_result(None)


def wait_until_told(queue: WarmUp, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while queue.jobs()[-1].what != what:
        assert time.monotonic() < deadline, queue.jobs()
        time.sleep(0.01)


def test_a_picture_is_made_meanwhile(webui: SmallWebUI, queue: WarmUp, compiling: Future[None]) -> None:
    (job,) = queue.add([SMALL], "panel")
    wait_until_told(queue, COMPILING)
    webui.exclusively(lambda: builders.served(webui.unet, builders.a_call(webui.unet)))
    assert webui.calls == [] and queue.busy()
    compiling.set_result(None)
    assert finished(queue, job).state == "done"


def test_a_job_that_waits_for_a_compiler_can_be_cancelled(
    webui: SmallWebUI, queue: WarmUp, compiling: Future[None]
) -> None:
    (job,) = queue.add([SMALL], "panel")
    wait_until_told(queue, COMPILING)
    assert queue.cancel(job.id)
    assert finished(queue, job).state == "cancelled"
    assert not compiling.done() and webui.calls == []
