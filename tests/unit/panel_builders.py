"""Table rows with fixed values, and the OneDiff tab without a browser, on a real UNet and this process's runtime."""
from __future__ import annotations

import json
import re
import time
from typing import Any

import builders
import pytest
from test_warmup import SECONDS, SmallWebUI

pytest.importorskip("gradio")

import gradio

from lib_onediff.core.jobs import JobQueue
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.rows import ResolutionRow, ShapeRow, Totals
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.cache.panel import Panel
from lib_onediff.ui.cache.table import ALL_MODELS
from lib_onediff.ui.chore import Chore

MEBIBYTE = 2**20
CALLS = {"graph": 12, "plain": 3, "host": 4}
TOTALS = Totals(vram=6 * MEBIBYTE, budget=0, disk=3 * MEBIBYTE, calls=CALLS, hit_rate=12 / 19)
SHAPE = ShapeRow(
    batch=2, tokens=77, dtype="float16", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=0.0, relative_error=1.5e-3, needs=5 * MEBIBYTE,
)
ROW = ResolutionRow(
    resolution="512x768", model="SD1", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=1.0, shapes=(SHAPE,), needs=5 * MEBIBYTE, images=3, prewarm_s=1.2,
    saved_s=0.9,
)


def text_of(markup: str) -> str:
    """The text of an HTML fragment, with single spaces."""
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


class Seen:
    """Acts as a page with the OneDiff tab open: calls the panel's handlers as the page does, and keeps what they show.

    parts: the present value of each part of the tab, by name. waiting: the work in progress (a Chore), which the page
    passes to the next handler; None if there is none.
    """

    def __init__(self) -> None:
        self.webui = SmallWebUI(builders.diffusers_unet())
        self.queue = JobQueue()
        self.warmup = WarmUp(self.webui, runtime, self.queue)
        self.panel = Panel(runtime, self.warmup, self.queue, self.webui.exclusively)
        self.waiting: Any = None
        self.parts: dict[str, Any] = {}

    def close(self) -> None:
        self.warmup.stop(SECONDS)
        diffusers_host.detach(self.webui.unet)

    def do(self, handler: Any, *own: Any) -> None:
        """Call the handler of a button, then request the present state, as the page does."""
        message, below, self.waiting = handler(*own, self.waiting)
        self._show(message=message, below=below)
        self.look()

    def look(self, *cancelled: int) -> None:
        """Request the present state, as the page does again and again. cancelled: ids of jobs to cancel."""
        shown = self.panel.view(json.dumps({"cancelled": cancelled}), ALL_MODELS, self.waiting)
        below, waiting, totals, jobs, models, table, sizes, message = shown
        if waiting != gradio.update():
            self.waiting = waiting
        self._show(
            below=below, totals=totals, jobs=jobs, models=models, table=table, sizes=sizes, message=message
        )

    def _show(self, **values: Any) -> None:
        self.parts.update({name: value for name, value in values.items() if value != gradio.update()})

    def look_until_idle(self) -> None:
        while isinstance(self.waiting, Chore) or any(job.pending for job in self.warmup.jobs()):
            time.sleep(0.05)
            self.look()
        self.look()

    def text(self, part: str) -> str:
        return text_of(self.parts.get(part, ""))


def used(webui: SmallWebUI, *widths: int) -> None:
    """Have the runtime serve one call at each of these widths in pixels; the height is 64."""
    for width in widths:
        builders.served(webui.unet, builders.a_call(webui.unet, width=width // 8))
