"""A comparison: images made with two settings in turn, in a thread of its own."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...guard import first_line, outcome_of
from ...options.settings import Settings
from ...quality import Difference, ImageComparison, compare, difference_map
from .sides import Side
from .text_to_image import Interrupted, Made, Order

# Enough for a graph to be recorded, and for what is only computed every few steps.
STEPS_TO_WARM_UP = 6
RUNNING, DONE, CANCELLED, FAILED = "running", "done", "cancelled", "failed"
Exclusively = Callable[[Callable[[], Any]], Any]
log = logging.getLogger("onediff")


@dataclass(frozen=True)
class Request:
    """What to compare. order: the first image; the others have the seeds that follow. images: how many of each
    side. warm_up: whether a short image of each side comes first, so that times do not count what happens once."""

    sides: tuple[Side, Side]
    order: Order
    images: int
    warm_up: bool


@dataclass(frozen=True)
class Pair:
    """The two images of a seed, and how they differ."""

    seed: int
    first: Made
    second: Made
    comparison: ImageComparison
    difference: Difference


class Maker(Protocol):
    """hosts.text_to_image.TextToImage, as a comparison needs it."""

    def make(self, order: Order, settings: Settings) -> Made: ...

    def interrupt(self) -> None: ...

    def share_done(self) -> float: ...


class Comparison:
    """A comparison that is being made. Its images wait their turn in the WebUI's queue, one by one."""

    def __init__(self, request: Request, maker: Maker, exclusively: Exclusively) -> None:
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
            if self.request.warm_up:
                short = replace(self.request.order, steps=min(STEPS_TO_WARM_UP, self.request.order.steps))
                for side in self.request.sides:
                    self._make(short, side)
            for number in range(self.request.images):
                self.pairs += (self._pair(number),)
            self.state = DONE
        except Interrupted:
            self.state = CANCELLED
        except Exception as error:
            log.exception("A comparison failed")
            self.state, self.problem = FAILED, f"The image could not be made: {first_line(error)}"
        finally:
            self._over.set()

    def _pair(self, number: int) -> Pair:
        order = replace(self.request.order, seed=self.request.order.seed + number)
        # What the first of two has to load or to encode is there for the other: they take turns in being first.
        turns = (0, 1) if number % 2 == 0 else (1, 0)
        made = {turn: self._make(order, self.request.sides[turn]) for turn in turns}
        first, second = made[0], made[1]
        return Pair(
            order.seed, first, second, compare(first.image, second.image), difference_map(first.image, second.image)
        )

    def _make(self, order: Order, side: Side) -> Made:
        """Make an image when it is our turn. Raises Interrupted."""

        def work() -> Made:
            self._go_on()
            return self._maker.make(order, side.settings)

        self._go_on()
        # Forge prints a traceback for what is raised in its main thread, and an interruption is none.
        made = self._exclusively(lambda: outcome_of(work)).result()
        self._made += 1
        return made

    def _go_on(self) -> None:
        """Raises Interrupted once the comparison is cancelled."""
        if self._cancelled.is_set():
            raise Interrupted
