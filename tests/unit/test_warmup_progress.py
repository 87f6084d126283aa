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
from lib_onediff.core.sizes import Size
from lib_onediff.core.table import State
from lib_onediff.prewarm import worker as warmup
from lib_onediff.prewarm.job import Job
from lib_onediff.prewarm.worker import COMPILING, WarmUp
from lib_onediff.runtime.runtime import runtime

__all__ = ["queue", "webui"]  # Fixtures.


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


def wait_until_told(queue: WarmUp, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while queue.jobs()[-1].what != what:
        assert time.monotonic() < deadline, queue.jobs()
        time.sleep(0.01)


def test_it_tells_what_it_is_doing(webui: SmallWebUI, queue: WarmUp, tmp_path: Path) -> None:
    """And how long it will take, from the second size on; what was made ready counts as no use."""
    runtime.history.open(tmp_path)
    told: list[Job] = []
    warm = webui.warm

    def listen(*call: int) -> None:
        told.append(queue.jobs()[-1])
        warm(*call)

    webui.warm = listen  # type: ignore[method-assign]
    queue.add([SMALL], "panel", tokens=154)
    wait_until_idle(queue)
    assert [job.what for job in told] == [warmup.CHECKING, warmup.MEASURING, warmup.MEASURING] * 2
    assert [job.share for job in told] == [number / 6 for number in range(6)]
    rows = runtime.history.rows()
    assert {(row.batch, row.tokens) for row in rows} == {(2, 154), (1, 154)} and {row.uses for row in rows} == {0}
    with webui.lock:
        (job,) = queue.add([Size(128, 64)], "panel", tokens=154)
        wait_until_told(queue, warmup.WAITING)
    assert job.estimated_seconds is not None and 0 < job.estimated_seconds < SECONDS
    done = finished(queue, job)
    left = [job.estimated_seconds for job in told[6:]]
    assert left == sorted(left, reverse=True) and done.estimated_seconds is None and done.what == ""


@pytest.mark.parametrize(("route", "reason", "calls"), [
    ("graph", "", [(64, 64, 2), (64, 64, 1)]),
    ("plain", "its graph needs 900 MiB", [*[(64, 64, 2)] * 3, *[(64, 64, 1)] * 3]),
])
def test_a_graph_that_is_there_needs_no_more_calls_and_why_there_is_none_is_said(
    webui: SmallWebUI, monkeypatch: pytest.MonkeyPatch, route: str, reason: str, calls: list[tuple[int, int, int]]
) -> None:
    """As on a GPU, where the third call of a size finds the graph that the second has captured."""
    status = runtime.status
    said = {"backend": "native", "route": route, "reason": reason}
    monkeypatch.setattr(runtime, "status", lambda: {**status(), **said})
    queue = WarmUp(webui, runtime)
    (job,) = queue.add([SMALL], "panel")
    done = finished(queue, job)
    assert (done.state, done.done, done.share, done.reason, webui.calls) == ("done", 6, 1.0, reason, calls)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[None]]:
    """The UNet's kernels are being compiled until this has a result."""
    begun: Future[None] = Future()
    monkeypatch.setattr(runtime.devices, "prepare_early", lambda unet, settings: begun)
    yield begun
    if not begun.done():
        begun.set_result(None)


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
