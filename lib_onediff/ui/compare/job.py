"""A comparison: images made with two settings in turn, in a thread of its own."""
from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass, replace
from typing import Any

from ...guard import first_line, outcome_of
from ...quality import Difference, ImageComparison, compare, difference_map
from ...shapes.sizes import Size
from .. import texts
from ..cache.purge import Exclusively
from ..progress import whole_number
from .sides import Side
from .text_to_image import GeneratedImage, ImageRequest, TextToImage

# Enough for a graph to be recorded, and for what is only computed every few steps.
STEPS_TO_WARM_UP = 6
MOST_IMAGES, MOST_STEPS, LARGEST_SEED = 8, 150, 2**32 - 1
LEAST_CFG, MOST_CFG = 1.0, 30.0
RUNNING, DONE, CANCELLED, FAILED = "running", "done", "cancelled", "failed"
log = logging.getLogger("onediff")


@dataclass(frozen=True)
class Request:
    """What to compare. order: the first image; the others have the seeds that follow. images: how many of each
    side. warm_up: whether a short image of each side comes first, so that times do not count what happens once."""

    sides: tuple[Side, Side]
    order: ImageRequest
    images: int
    warm_up: bool


def request_of(
    sides: tuple[Side, Side], prompt: Any, negative_prompt: Any, width: Any, height: Any, steps: Any, cfg_scale: Any,
    sampler: Any, seed: Any, images: Any, warm_up: Any,
) -> Request:
    """The request. Raises ValueError with a sentence for the user.

    Both sides may have the same settings: that shows whether an image can be made twice.
    """
    size = Size(whole_number(width, "The width"), whole_number(height, "The height"))
    count = within("The number of images", whole_number(images, "The number of images"), 1, MOST_IMAGES)
    first = whole_number(-1 if seed is None else seed, "The seed")
    first = random.SystemRandom().randrange(LARGEST_SEED - count) if first == -1 else first
    return Request(
        sides,
        ImageRequest(
            str(prompt or ""), str(negative_prompt or ""), within("The seed", first, 0, LARGEST_SEED - count),
            size.width, size.height, within("The number of steps", whole_number(steps, "The number of steps"), 1,
                                            MOST_STEPS),
            within("The CFG scale", number(cfg_scale, "The CFG scale"), LEAST_CFG, MOST_CFG), str(sampler or ""),
        ),
        count, bool(warm_up),
    )


def number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(texts.wrong_number(name, value, "a number")) from None


def within(name: str, value: Any, least: Any, most: Any) -> Any:
    """value, if it is between these. Raises ValueError with a sentence."""
    if not least <= value <= most:
        raise ValueError(texts.out_of_range(name, value, least, most))
    return value


@dataclass(frozen=True)
class Pair:
    """The two images of a seed, and how they differ."""

    seed: int
    first: GeneratedImage
    second: GeneratedImage
    comparison: ImageComparison
    difference: Difference


class Comparison:
    """A comparison that is being made. Its images wait their turn in the WebUI's queue, one by one."""

    def __init__(self, request: Request, maker: TextToImage, exclusively: Exclusively) -> None:
        """exclusively: runs work while the WebUI makes no other image."""
        self.request = request
        self.pairs: tuple[Pair, ...] = ()
        self.state = RUNNING
        self.problem = ""
        self._maker, self._exclusively = maker, exclusively
        self._made, self._wanted = 0, 2 * (request.images + int(request.warm_up))
        self._cancelled = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="onediff-compare", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, for which this waits at most so long."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Stop; the pairs that are ready stay."""
        self._cancelled.set()
        self._maker.interrupt()

    def progress(self) -> tuple[float, str]:
        """How far it is, from 0 to 1, and what is being done."""
        share = (self._made + self._maker.share_done()) / self._wanted
        warming = self.request.warm_up and self._made < 2
        number = self._made + 1 - 2 * int(self.request.warm_up)
        what = f"warming up {self._made + 1} of 2" if warming else f"image {number} of {2 * self.request.images}"
        return min(1.0, share), what

    def _run(self) -> None:
        try:
            self.state = DONE if self._make_all() else CANCELLED
        except Exception as error:
            log.exception("A comparison failed")
            self.state, self.problem = FAILED, texts.not_made(first_line(error))
        finally:
            self._over.set()

    def _make_all(self) -> bool:
        """False where somebody has stopped it."""
        if self.request.warm_up:
            short = replace(self.request.order, steps=min(STEPS_TO_WARM_UP, self.request.order.steps))
            if not all(self._make(short, side) for side in self.request.sides):
                return False
        for number in range(self.request.images):
            pair = self._pair(number)
            if pair is None:
                return False
            self.pairs += (pair,)
        return True

    def _pair(self, number: int) -> Pair | None:
        order = replace(self.request.order, seed=self.request.order.seed + number)
        # What the first of two has to load or to encode is there for the other: they take turns in being first.
        made: dict[int, GeneratedImage] = {}
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            image = self._make(order, self.request.sides[place])
            if image is None:
                return None
            made[place] = image
        first, second = made[0].image, made[1].image
        return Pair(order.seed, made[0], made[1], compare(first, second), difference_map(first, second))

    def _make(self, order: ImageRequest, side: Side) -> GeneratedImage | None:
        """Make an image when it is our turn; none once the comparison is cancelled or the image is interrupted."""

        def work() -> GeneratedImage | None:
            return None if self._cancelled.is_set() else self._maker.make(order, side.settings)

        if self._cancelled.is_set():
            return None
        # Forge prints a traceback for what is raised in its main thread.
        made = self._exclusively(lambda: outcome_of(work)).result()
        self._made += made is not None
        return made
