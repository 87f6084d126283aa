"""The pre-warm queue takes turns with pictures, and leaves no thread behind."""
from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import builders
from test_warmup import SECONDS, SmallWebUI, queue, webui

from lib_onediff.core.sizes import Size
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime

__all__ = ["queue", "webui"]  # Fixtures.
ROOT = Path(__file__).resolve().parents[2]


class WakingLock:
    """As those of A1111 and Forge: it wakes who has waited longest, and goes to whoever comes first then."""

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
    """Its lock may go to who has just had it."""

    def __init__(self, unet: Any) -> None:
        super().__init__(unet)
        self.lock = WakingLock()  # type: ignore[assignment]

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """After the first, calls that never let another thread run, as launches and captures hardly do."""
        if not self.calls:
            super().warm(width, height, batch, tokens)
        self.calls.append((width, height, batch))
        end = time.perf_counter() + 0.003
        while time.perf_counter() < end:
            pass


def test_a_picture_is_not_passed_by_where_the_lock_is_not_fair() -> None:
    unet = builders.diffusers_unet()
    webui = UnfairWebUI(unet)
    queue = WarmUp(webui, runtime)
    queue.add([Size(64 + 8 * step, 64) for step in range(100)], "panel")
    while not webui.calls:
        time.sleep(0.001)
    passed_by = []
    for _ in range(10):
        asked = len(webui.calls)
        with webui.lock:
            passed_by.append(len(webui.calls) - asked)
        time.sleep(0.005)
    assert queue.busy(), "the warm-up was over before the pictures"
    queue.stop(SECONDS)
    diffusers_host.detach(unet)
    assert max(passed_by) <= 1, passed_by


def test_the_program_can_end_in_the_middle() -> None:
    """Python 3.10 to 3.13 abort when a daemon thread is inside a library of C++ at the end."""
    program = """
import sys, time
sys.path[:0] = ["tests", "tests/unit"]
import builders, test_warmup
from lib_onediff.runtime.runtime import runtime
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm.worker import WarmUp
webui = test_warmup.SmallWebUI(builders.diffusers_unet())
queue = WarmUp(webui, runtime)
queue.add([Size(256, 256 - 8 * step) for step in range(20)], "panel")
while not webui.calls:
    time.sleep(0.001)
print("leaving")
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")
