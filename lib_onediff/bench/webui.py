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


NO_DIFFERENCE = "no measurable difference"


@dataclass(frozen=True)
class ImageTimes:
    """Seconds of some images with OneDiff on, or off, one of steps steps and one of twice as many at every turn."""

    steps: int
    single: list[float]
    double: list[float]

    @property
    def image_s(self) -> float:
        return statistics.median(self.single)

    @property
    def step_ms(self) -> list[float]:
        """What each further step costs, everything included, at every turn."""
        return [(double - single) / self.steps * 1e3 for single, double in zip(self.single, self.double, strict=True)]


@dataclass(frozen=True)
class WebUIRow:
    model: str
    size: str
    off: ImageTimes
    on: ImageTimes
    routes: dict[str, int]

    def cells(self) -> list[str]:
        steps = [self.off.step_ms, self.on.step_ms]
        return [
            self.model, self.size, f"{self.off.image_s:.2f}", f"{self.on.image_s:.2f}",
            ratio(self.off.single, self.on.single), *(told(times) for times in steps), ratio(*steps),
            ", ".join(f"{count} {route}" for route, count in self.routes.items() if count),
        ]


def is_clear(differences: list[float]) -> bool:
    """Whether they are above zero, but for at most a quarter of them: images of few steps differ by more than a step
    costs, and their difference may be less than nothing."""
    return sorted(differences)[len(differences) // 4] > 0


def told(times: list[float]) -> str:
    return f"{statistics.median(times):.1f}" if is_clear(times) else ""


def ratio(off: list[float], on: list[float]) -> str:
    """How many times faster on is, of times that were measured in turn."""
    differences = [one - other for one, other in zip(off, on, strict=True)]
    differ = is_clear(differences) or is_clear([-difference for difference in differences])
    if not (differ and is_clear(off) and is_clear(on)):
        return NO_DIFFERENCE
    return f"{statistics.median(off) / statistics.median(on):.2f}"


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
    off, on = (ImageTimes(steps, taken[enabled, steps], taken[enabled, 2 * steps]) for enabled in (False, True))
    return WebUIRow(model, f"{size[0]}x{size[1]}", off, on, routes)
