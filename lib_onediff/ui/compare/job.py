"""A comparison: images made with two settings in turn, in a thread of its own."""
from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...core.guard import first_line, outcome_of
from ...options import infotext
from ...options.changes import read_changes
from ...options.option import did_you_mean
from ...options.presets import PRESETS, with_preset
from ...options.settings import Settings
from ...options.sizes import Size
from ...quality import ImageComparison, compare
from .. import texts
from ..cache.purge import Exclusively
from ..progress import whole_number
from .text_to_image import GeneratedImage, ImageRequest, TextToImage

CURRENT, OFF = "Current settings", "Off: the WebUI's own"
CHOICES = [CURRENT, OFF, *PRESETS]
# Each side first makes an image of so many steps, so that times do not count what happens once: enough for a graph to
# be recorded, and for what is only computed every few steps.
STEPS_TO_WARM_UP = 6
MOST_IMAGES, LARGEST_SEED = 8, 2**32 - 1
log = logging.getLogger("onediff")


@dataclass(frozen=True)
class Side:
    """Settings, and what they are called."""

    name: str
    settings: Settings

    @property
    def described(self) -> str:
        """The settings as infotext writes them."""
        return infotext.describe(self.settings)


def side_of(choice: Any, changes: Any, standing: Settings) -> Side:
    """The settings for a side.

    choice: one of CHOICES. changes: such as "backend eager; verify off", also as an image's infotext has it. standing:
    the settings tab's. Raises ValueError with a sentence.
    """
    if choice not in CHOICES:
        raise ValueError(texts.no_settings(choice, did_you_mean(str(choice), CHOICES)))
    if choice == OFF:
        return Side(OFF, replace(standing, enabled=False))
    settings = with_preset(standing, choice) if choice in PRESETS else standing
    changed = read_changes(str(changes or ""))
    return Side(f"{choice} + {str(changes).strip()}" if changed else choice, settings.for_run(changed))


def request_of(
    prompt: Any, negative_prompt: Any, width: Any, height: Any, steps: Any, cfg_scale: Any, sampler: Any, seed: Any,
    images: Any,
) -> tuple[ImageRequest, int]:
    """The first image, and how many each side makes; the others have the seeds that follow. Raises ValueError with a
    sentence for the user."""
    count = within(images, "The number of images", 1, MOST_IMAGES)
    chosen = random.SystemRandom().randrange(LARGEST_SEED - count) if seed in (None, -1) else seed
    size = Size(whole_number(width, "The width"), whole_number(height, "The height"))
    return ImageRequest(
        str(prompt or ""), str(negative_prompt or ""), within(chosen, "The seed", 0, LARGEST_SEED - count),
        size.width, size.height, within(steps, "The number of steps", 1, 150),
        within(cfg_scale, "The CFG scale", 1.0, 30.0, a_number), str(sampler or ""),
    ), count


def within(value: Any, name: str, least: Any, most: Any, read: Callable[[Any, str], Any] = whole_number) -> Any:
    """The number that somebody has typed. Raises ValueError with a sentence."""
    number = read(value, name)
    if not least <= number <= most:
        raise ValueError(texts.out_of_range(name, number, least, most))
    return number


def a_number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(texts.wrong_number(name, value, "a number")) from None


@dataclass(frozen=True)
class Pair:
    """The left and the right image of a seed, and how they differ; why_not: why that was not measured."""

    seed: int
    images: tuple[GeneratedImage, GeneratedImage]
    comparison: ImageComparison | None
    why_not: str = ""

    @classmethod
    def of(cls, seed: int, left: GeneratedImage, right: GeneratedImage) -> Pair:
        try:
            return cls(seed, (left, right), compare(left.image, right.image))
        except ValueError as problem:
            return cls(seed, (left, right), None, str(problem))


class Comparison:
    """A comparison that is being made. Its images wait their turn in the WebUI's queue, one by one.

    pairs: what there is already. problem: what to tell of one that ended before all images were made.
    """

    def __init__(
        self, sides: tuple[Side, Side], first: ImageRequest, images: int, maker: TextToImage, exclusively: Exclusively,
    ) -> None:
        """first, images: see request_of. exclusively: runs work while the WebUI makes no other image."""
        self.sides = sides
        self.pairs: tuple[Pair, ...] = ()
        self.problem = ""
        self._maker, self._exclusively = maker, exclusively
        warm = replace(first, steps=min(STEPS_TO_WARM_UP, first.steps))
        # What the first of two has to load or to encode is there for the other: they take turns in being first.
        self._plan = [(warm, 0), (warm, 1), *(
            (replace(first, seed=first.seed + number), (number + place) % 2)
            for number in range(images) for place in range(2)
        )]
        self._made = 0
        self._cancelled, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="onediff-compare", daemon=True).start()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it is over, for which this waits at most so long."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Stop; the pairs that are ready stay."""
        self._cancelled.set()
        self._maker.interrupt()

    def progress(self) -> tuple[int, str]:
        """How far it is in percent, and what is being done."""
        made, wanted = self._made, len(self._plan)
        what = f"image {made - 1} of {wanted - 2}" if made >= 2 else f"warming up {made + 1} of 2"
        return round(100 * made / wanted), what

    def _run(self) -> None:
        try:
            if not self._make_all():
                self.problem = texts.STOPPED_EARLY if self.pairs else texts.STOPPED
        except Exception as error:
            log.exception("A comparison failed")
            self.problem = texts.not_made(first_line(error))
        finally:
            self._over.set()

    def _make_all(self) -> bool:
        """False where somebody has stopped it."""
        latest: dict[int, GeneratedImage] = {}
        for image, place in self._plan:
            made = self._make(image, self.sides[place])
            if made is None:
                return False
            latest[place] = made
            self._made += 1
            if self._made > 2 and self._made % 2 == 0:
                self.pairs += (Pair.of(image.seed, latest[0], latest[1]),)
        return True

    def _make(self, image: ImageRequest, side: Side) -> GeneratedImage | None:
        """Make an image when it is our turn; none once the comparison is cancelled or the image is interrupted."""

        def work() -> GeneratedImage | None:
            return None if self._cancelled.is_set() else self._maker.make(image, side.settings)

        # Forge prints a traceback for what is raised in its main thread.
        return None if self._cancelled.is_set() else self._exclusively(lambda: outcome_of(work)).result()
