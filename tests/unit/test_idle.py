"""Idle warm-up, with a real UNet behind the real runtime and a very small WebUI."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import builders
import pytest
from test_warmup import SECONDS, SmallWebUI

from lib_onediff.core.sizes import Size, WantedSize
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.idle import IdleWarmUp
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime

IDLE = 0.15
SIZES = [WantedSize(Size(64, 64), 77), WantedSize(Size(72, 64), 77), WantedSize(Size(80, 64, 2), 154)]


class Rig:
    """A WebUI, its queue, and the idle warm-up of what wanted holds."""

    def __init__(self) -> None:
        self.webui = SmallWebUI(builders.diffusers_unet())
        self.warmup = WarmUp(self.webui, runtime)
        self.wanted = list(SIZES)
        self.idle = IdleWarmUp(self.warmup, runtime.rows, lambda: self.wanted, IDLE)

    def states(self) -> list[tuple[str, str]]:
        return [(str(job.size), job.state) for job in self.warmup.jobs()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.idle.stop()
    rig.warmup.stop(SECONDS)
    diffusers_host.detach(rig.webui.unet)


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "onediff-idle"]


def test_what_is_used_the_most_is_made_ready_once(rig: Rig) -> None:
    began = time.monotonic()
    rig.idle.follow(True)
    until(lambda: len(rig.states()) == 3 and not rig.warmup.busy())
    assert time.monotonic() - began >= IDLE
    assert rig.states() == [("64x64", "done"), ("72x64", "done"), ("80x64 x2", "done")]
    assert {job.source for job in rig.warmup.jobs()} == {"idle"}
    assert [job.tokens for job in rig.warmup.jobs()] == [77, 77, 154]
    made = len(rig.webui.calls)
    time.sleep(3 * IDLE)
    assert len(rig.webui.calls) == made, "it is done once"


def test_it_stops_as_soon_as_a_picture_begins_and_begins_again_later(rig: Rig) -> None:
    rig.idle.follow(True)
    until(lambda: rig.webui.calls)
    rig.idle.disturb()
    with rig.webui.lock:
        made = len(rig.webui.calls)
        assert {state for _, state in rig.states()} == {"cancelled"} and not rig.warmup.busy()
        rig.idle.disturb()
    rig.idle.disturb()
    until(lambda: len(rig.webui.calls) > made)
    until(lambda: {size for size, state in rig.states() if state == "done"} >= {"72x64", "80x64 x2"})


def test_the_thread_lives_while_the_setting_is_on(rig: Rig) -> None:
    assert threads() == []
    for _ in range(3):
        rig.idle.follow(True)
        rig.idle.follow(True)
        assert len(threads()) == 1
        rig.idle.follow(False)
        until(lambda: threads() == [])
    rig.idle.disturb()
    rig.idle.stop()
    time.sleep(2 * IDLE)
    assert rig.webui.calls == []
