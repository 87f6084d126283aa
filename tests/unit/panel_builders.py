"""Rows to show, and the OneDiff tab of a page, with a real UNet behind the real runtime."""
from __future__ import annotations

import json
import re
from typing import Any

import builders
import pytest
from test_warmup import SECONDS, SmallWebUI

pytest.importorskip("gradio")

import gradio

from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.rows import ResolutionRow, ShapeRow, Totals
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.cache.handlers import PARTS, Panel, for_page
from lib_onediff.ui.cache.page import Page
from lib_onediff.ui.cache.table import ALL_MODELS, USUAL_ORDER

MEBIBYTE = 2**20
CALLS = {"graph": 12, "plain": 3, "blocks": 0, "host": 4}
TOTALS = Totals(vram=6 * MEBIBYTE, budget=0, disk=3 * MEBIBYTE, calls=CALLS, hit_rate=12 / 19)
SHAPE = ShapeRow(
    batch=2, tokens=77, dtype="float16", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=0.0, relative_error=1.5e-3, control=False, needs=5 * MEBIBYTE,
)
ROW = ResolutionRow(
    resolution="512x768", model="SD1", state="ready", reason="", step_ms=12.345, host_ms=24.69, ratio=2.0,
    bytes=3 * MEBIBYTE, uses=7, last_used=1.0, shapes=(SHAPE,), needs=5 * MEBIBYTE,
)


def changed(record: Any, **changes: Any) -> Any:
    return type(record)(**{**vars(record), **changes})


def text_of(markup: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


class Seen:
    """A page with the tab open: asks as javascript/onediff.js does, and knows what the page shows then."""

    def __init__(self, webui: SmallWebUI) -> None:
        self.webui = webui
        self.warmup = WarmUp(webui, runtime)
        self.panel = Panel(runtime, self.warmup, webui.exclusively)
        self.page: Page | None = None
        self.model, self.order = ALL_MODELS, USUAL_ORDER
        self.parts: dict[str, Any] = {}
        self.sent: set[str] = set()
        self.number = 0

    @classmethod
    def open(cls) -> Seen:
        return cls(SmallWebUI(builders.diffusers_unet()))

    def close(self) -> None:
        self.warmup.stop(SECONDS)
        diffusers_host.detach(self.webui.unet)

    def do(self, handler: Any, *own: Any) -> None:
        """Call a handler as gradio does, and show what it returns. sent: the parts that it returned."""
        self.show(self.ask(handler, *own))

    def ask(self, handler: Any, *own: Any) -> tuple[Any, ...]:
        """Call a handler, and leave its answer on the way."""
        answer = for_page(handler)(*own, self.model, self.order, self.page)
        self.page = answer[-1]
        return answer

    def show(self, answer: tuple[Any, ...]) -> None:
        names = ("beat", "told", "below", *PARTS)
        values = dict(zip(names, answer, strict=False))
        self.sent = {name for name, value in values.items() if value != gradio.update()}
        self.parts.update({name: value for name, value in values.items() if name in self.sent})

    def look(self, *actions: tuple[str, int]) -> None:
        self.number += 1
        turn = re.search(r'data-onediff-turn="(\d+)"', self.parts.get("beat", ""))
        message = json.dumps({"number": self.number, "turn": int(turn[1]) if turn else 0, "actions": actions})
        self.do(self.panel.tick, message)

    def look_until_idle(self) -> None:
        while True:
            self.look()
            if not self.page.busy and self.page.chore is None:
                return
            self.warmup.wait_for_change(-2, 0.05)

    def text(self, part: str) -> str:
        return text_of(self.parts.get(part, ""))


def keys(*resolutions: str) -> str:
    """What a page sends when these rows of the small test model are selected."""
    model = next(row.model for row in runtime.rows())
    return json.dumps([f"{resolution} {model}" for resolution in resolutions])


def used(webui: SmallWebUI, *widths: int) -> None:
    """Let the runtime serve a call at each of these widths, in pixels, and 64 high."""
    for width in widths:
        builders.served(webui.unet, builders.a_call(webui.unet, width=width // 8))
