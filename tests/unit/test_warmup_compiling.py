"""Pictures can be made while the pre-warm queue waits for what has to be compiled."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import builders
import pytest
import torch
from test_warmup import SECONDS, SMALL, SmallWebUI, finished, queue, webui

from lib_onediff.engines.inductor.compiler import Inductor, Planned
from lib_onediff.ops.availability import why_no_inductor
from lib_onediff.options.settings import Settings
from lib_onediff.prewarm.worker import COMPILING, WarmUp
from lib_onediff.runtime.backend_choice import INDUCTOR_COMPILES
from lib_onediff.runtime.runtime import runtime

__all__ = ["queue", "webui"]  # Fixtures.
LACK = why_no_inductor(torch.device("cpu"))
pytestmark = pytest.mark.skipif(LACK is not None, reason=LACK or "")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Inductor takes until this is set, and then has nothing that fits."""
    done = threading.Event()

    def compile_slowly(self: Inductor, regions: Any, device: torch.device) -> Planned:
        done.wait(SECONDS)
        return Planned({}, at_once=True, paths={})

    monkeypatch.setattr(Inductor, "_compile", compile_slowly)
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
    runtime.configure(Settings(backend="inductor"))
    yield done
    done.set()


def wait_until_told(queue: WarmUp, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while queue.jobs()[-1].what != what:
        assert time.monotonic() < deadline, queue.jobs()
        time.sleep(0.01)


def test_a_picture_is_made_meanwhile(webui: SmallWebUI, queue: WarmUp, compiler: threading.Event) -> None:
    (job,) = queue.add([SMALL], "panel")
    wait_until_told(queue, COMPILING)
    webui.exclusively(lambda: builders.served(webui.unet, builders.a_call(webui.unet)))
    status = runtime.status()
    assert (status["route"], status["reason"]) == ("host", INDUCTOR_COMPILES)
    assert webui.calls == [] and queue.busy()
    compiler.set()
    assert finished(queue, job).state == "done"
    assert "Inductor has not compiled" in runtime.status()["reason"]


def test_a_job_that_waits_for_a_compiler_can_be_cancelled(
    webui: SmallWebUI, queue: WarmUp, compiler: threading.Event
) -> None:
    (job,) = queue.add([SMALL], "panel")
    wait_until_told(queue, COMPILING)
    assert queue.cancel(job.id)
    assert finished(queue, job).state == "cancelled"
    assert not compiler.is_set() and webui.calls == []
