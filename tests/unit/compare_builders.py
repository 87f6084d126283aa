"""Comparisons of painted images, without a WebUI."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from quality_images import desaturated, painted

from lib_onediff.options.settings import Settings
from lib_onediff.quality import compare, difference_map
from lib_onediff.ui.compare.job import Pair, Request
from lib_onediff.ui.compare.sides import CURRENT, OFF, Side
from lib_onediff.ui.compare.text_to_image import GeneratedImage, ImageRequest

SIDES = (Side(OFF, Settings(enabled=False)), Side(CURRENT, Settings()))
ORDER = ImageRequest("a <b>fox</b>", "blurry & dark", 7, 160, 128, 20, 7.0, "Euler a")
SECONDS = 20


def image_of(seed: int, kept: float = 1.0) -> Any:
    values = (desaturated(painted(seed), kept).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(values.numpy())


class Painter:
    """Stands where hosts.text_to_image.TextToImage does: the settings tell in how much colour it paints."""

    def __init__(self, kept: Callable[[Settings], float] = lambda settings: 1.0) -> None:
        self.kept = kept
        self.orders: list[tuple[ImageRequest, Settings]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.interrupted = threading.Event()

    def make(self, order: ImageRequest, settings: Settings) -> GeneratedImage | None:
        self.orders.append((order, settings))
        while not self.hold.wait(0.02):
            if self.interrupted.is_set():
                return None
        if order.prompt == "fail":
            raise RuntimeError("no memory\nfor this")
        route = "plain" if settings.enabled else "host"
        image = image_of(order.seed, self.kept(settings))
        infotext = f"{order.prompt}\nSteps: 20, Seed: {order.seed}, Size: 1x1"
        status = {"route": route, "step_ms": 12.3, "reason": ""}
        return GeneratedImage(image, infotext, 2.0 - settings.enabled, status)

    def interrupt(self) -> None:
        self.interrupted.set()

    def share_done(self) -> float:
        return 0.5


def exclusively(work: Callable[[], Any]) -> Any:
    return work()


def a_pair(seed: int = 7, kept: float = 1.0) -> Pair:
    painter = Painter(lambda settings: kept if settings.enabled else 1.0)
    order = ImageRequest(**{**vars(ORDER), "seed": seed})
    first, second = (painter.make(order, side.settings) for side in SIDES)
    return Pair(seed, first, second, compare(first.image, second.image), difference_map(first.image, second.image))


def a_request(**changes: Any) -> Request:
    return Request(**{"sides": SIDES, "order": ORDER, "images": 2, "warm_up": True, **changes})
