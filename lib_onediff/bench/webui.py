"""Time the images of a running WebUI with OneDiff on and off, in turn, over its API."""
from __future__ import annotations

import json
import statistics
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

SECONDS_FOR_AN_IMAGE = 600
STEPS_TO_SETTLE = 4
HEADINGS = (
    "model", "size", "seconds an image, off", "on", "x", "ms a step, off", "on", "x", "route",
)


@dataclass(frozen=True)
class ImageTimes:
    """Medians of images with OneDiff on, or off. step_ms: what each further step costs, everything included."""

    image_s: float
    step_ms: float


@dataclass(frozen=True)
class WebUIRow:
    model: str
    size: str
    off: ImageTimes
    on: ImageTimes
    routes: dict[str, int]

    def cells(self) -> list[str]:
        return [
            self.model, self.size, f"{self.off.image_s:.2f}", f"{self.on.image_s:.2f}",
            f"{self.off.image_s / self.on.image_s:.2f}", f"{self.off.step_ms:.1f}", f"{self.on.step_ms:.1f}",
            f"{self.off.step_ms / self.on.step_ms:.2f}",
            ", ".join(f"{count} {route}" for route, count in self.routes.items() if count),
        ]


class RunningWebUI:
    """A1111, Forge or the standalone host at url, with --api."""

    def __init__(self, url: str) -> None:
        self.url = self.asked = url.rstrip("/")
        # A WebUI is on this machine or beside it, whatever proxy the environment names.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the WebUI answers. Raises OSError, or ValueError for what is no JSON."""
        data = None if body is None else json.dumps(body).encode()
        self.asked = self.url + path
        request = urllib.request.Request(self.asked, data, {"Content-Type": "application/json"})
        with self._open(request, timeout=SECONDS_FOR_AN_IMAGE) as answer:
            return json.load(answer)

    def calls(self) -> dict[str, int]:
        return self.ask("/onediff/v1/status")["calls"]

    def seconds(self, size: tuple[int, int], steps: int, enabled: bool) -> float:
        """How long one image takes."""
        body = {
            "prompt": "a lighthouse at night", "seed": 1, "steps": steps, "width": size[0], "height": size[1],
            "sampler_name": "Euler", "cfg_scale": 7.0, "save_images": False,
            "alwayson_scripts": {"OneDiff": {"args": [{"enabled": enabled}]}},
        }
        began = time.perf_counter()
        self.ask("/sdapi/v1/txt2img", body)
        return time.perf_counter() - began


def measure_images(webui: RunningWebUI, size: tuple[int, int], steps: int, runs: int) -> WebUIRow:
    """Medians of runs images of steps and of 2 * steps steps, off and on in turn, after a short image each time."""
    for enabled in (False, True):
        webui.seconds(size, steps, enabled)
    model = webui.ask("/onediff/v1/status")["model"] or "?"
    taken: dict[tuple[bool, int], list[float]] = {}
    routes: dict[str, int] = {}
    for _ in range(runs):
        for enabled in (False, True):
            # Whoever is switched on lays the weights out as it likes them, and captures again: once, and not counted.
            webui.seconds(size, STEPS_TO_SETTLE, enabled)
            before = webui.calls()
            for count in (steps, 2 * steps):
                taken.setdefault((enabled, count), []).append(webui.seconds(size, count, enabled))
            if enabled:
                after = webui.calls()
                routes = {route: routes.get(route, 0) + after[route] - before[route] for route in after}
    return WebUIRow(model, f"{size[0]}x{size[1]}", timing(taken, False, steps), timing(taken, True, steps), routes)


def timing(taken: dict[tuple[bool, int], list[float]], enabled: bool, steps: int) -> ImageTimes:
    single, double = (statistics.median(taken[enabled, count]) for count in (steps, 2 * steps))
    return ImageTimes(single, (double - single) / steps * 1e3)
