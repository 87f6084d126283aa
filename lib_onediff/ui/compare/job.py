"""A comparison: images made with two settings in turn, by the WebUI's own txt2img.

Only our script takes part, with arguments of its own: what other extensions are set to in the txt2img tab is left out.
"""
from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...core.quality import ImageComparison, compare
from ...core.settings import Settings, options_of_a_run
from ...core.sizes import Size
from ..amounts import number_in, whole_number
from ..chore import Chore, Exclusively
from ..infotext import read_changes
from ..presets import PRESETS, with_preset

CURRENT = "Current settings"
OFF = "Off: the WebUI's own"
CHOICES = [CURRENT, OFF, *PRESETS]
# Each side first makes the whole image, so that times do not count what happens once: and again, so many times at
# most, while its record tells of something that was checked, captured or compiled for the first time.
MOST_WARM_UPS = 4
MOST_IMAGES = 8
LARGEST_SEED = 2**32 - 1
# What the WebUI calls its work while it makes an image of ours.
JOB = "OneDiff comparison"
# An image to make: the arguments of the WebUI's StableDiffusionProcessingTxt2Img.
Request = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """Settings, and what they are called."""

    name: str
    settings: Settings


@dataclass(frozen=True)
class GeneratedImage:
    """An image (a PIL image) and how it came about. seconds: all of the WebUI's txt2img. status: runtime.status()
    right after it."""

    image: Any
    seconds: float
    status: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The left and the right image of a seed, and how they differ."""

    seed: int
    images: tuple[GeneratedImage, GeneratedImage]
    comparison: ImageComparison


def side_of(choice: Any, changes: Any, standing: Settings) -> Side:
    """The settings for a side.

    choice: one of CHOICES. changes: such as "backend eager; low_bit int8", also as an image's infotext has it.
    standing: the settings tab's. Raises ValueError with a sentence.
    """
    if choice == OFF:
        return Side(OFF, replace(standing, enabled=False))
    settings = standing if choice == CURRENT else with_preset(standing, str(choice))
    changed = read_changes(str(changes or ""))
    return Side(f"{choice} + {str(changes).strip()}" if changed else choice, settings.for_run(changed))


def request_of(fields: Any) -> Request:
    """The image that the txt2img tab asks for. fields: what its fields hold, by the ends of their ids, as JSON; see
    tab.py. Raises ValueError with a sentence for the user."""
    try:
        asked = dict(json.loads(fields))
    except (TypeError, ValueError):
        raise ValueError("The txt2img tab cannot be read.") from None
    seed = whole_number(asked.get("seed", -1), "The seed", -1, LARGEST_SEED - MOST_IMAGES)
    size = Size(whole_number(asked.get("width"), "The width"), whole_number(asked.get("height"), "The height"))
    return {
        "prompt": str(asked.get("prompt", "")), "negative_prompt": str(asked.get("neg_prompt", "")),
        "seed": random.SystemRandom().randrange(LARGEST_SEED - MOST_IMAGES) if seed == -1 else seed,
        "width": size.width, "height": size.height,
        "steps": whole_number(asked.get("steps"), "The number of steps", 1, 150),
        "cfg_scale": number_in(asked.get("cfg_scale"), "The CFG scale", 1, 30),
        "sampler_name": str(asked.get("sampling", "Euler a")), "scheduler": str(asked.get("scheduler", "Automatic")),
    }


class Stopped(Exception):
    """Somebody has stopped a comparison, or one of its images."""


class TextToImage:
    """Makes one image after the other. Call make through the adapter's exclusively()."""

    def __init__(self, make_script: Callable[[], Any], status: Callable[[], dict[str, Any]]) -> None:
        """make_script: our script's class, as the WebUI calls it. status: runtime.status."""
        self._make_script = make_script
        self._status = status

    def make(self, request: Request, settings: Settings) -> GeneratedImage | None:
        """Make an image with these settings; none where the user stops it. Raises whatever the WebUI raises."""
        from modules import processing, scripts, shared

        script = self._make_script()
        runner = scripts.ScriptRunner()
        script.filename = __file__
        script.is_txt2img = True
        script.is_img2img = False
        script.tabname = "txt2img"
        script.alwayson = True
        script.args_from = 0
        script.args_to = 1
        runner.scripts = [script]
        runner.alwayson_scripts = [script]
        p = processing.StableDiffusionProcessingTxt2Img(
            **request, batch_size=1, n_iter=1, do_not_save_samples=True, override_settings={},
        )
        p.do_not_save_grid = True
        # Our script alone is there, and none of those that fill in what a tab's components say.
        p.is_api = True
        p.scripts = runner
        p.script_args = ({name: getattr(settings, name) for name in options_of_a_run()},)
        shared.state.begin(job=JOB)
        try:
            with contextlib.closing(p):
                began = time.perf_counter()
                processed = processing.process_images(p)
                seconds = time.perf_counter() - began
                if shared.state.interrupted or shared.state.skipped or not processed.images:
                    return None
        finally:
            shared.state.end()
        return GeneratedImage(processed.images[0], seconds, self._status())

    def interrupt(self) -> None:
        """Stop the image that is being made, if it is one of ours."""
        from modules import shared

        if shared.state.job == JOB:
            shared.state.interrupt()


class Comparison(Chore):
    """A comparison that is being made. Its images wait their turn in the WebUI's queue, one by one.

    pairs: what there is already. shown: how many of them the page has. made, wanted: how many images, those to warm up
    included. outcome: when it is over, why it ended before all images were made, or "".
    """

    def __init__(
        self, sides: tuple[Side, Side], first: Request, images: int, maker: TextToImage, exclusively: Exclusively,
    ) -> None:
        """first: the image of the first seed; the others have the seeds that follow. images: of each side."""
        self.sides = sides
        self.pairs: list[Pair] = []
        self.shown = 0
        self._maker = maker
        self._cancelled = False
        self._first = first
        self._images = images
        self._exclusively = exclusively
        self.made = 0
        self.wanted = 2 + 2 * images
        super().__init__("Comparing", self._make_all)

    def _make_all(self) -> str:
        try:
            for side in range(2):
                self._warm_up(side)
            for number in range(self._images):
                image = {**self._first, "seed": self._first["seed"] + number}
                # They take turns: what the first of two loads or encodes is ready for the other.
                order = (0, 1) if number % 2 == 0 else (1, 0)
                made = {side: self._make(image, side) for side in order}
                self.pairs.append(Pair(image["seed"], (made[0], made[1]), compare(made[0].image, made[1].image)))
        except Stopped:
            return "Stopped."
        return ""

    def _warm_up(self, side: int) -> None:
        """Make a side's image until nothing of it happens for the first time."""
        for number in range(MOST_WARM_UPS):
            if number:
                self.wanted += 1
            made = self._make(self._first, side)
            if not (made.status.get("image") or {}).get("first_uses"):
                return

    def _make(self, image: Request, side: int) -> GeneratedImage:
        """A side's image. Raises Stopped once the comparison is cancelled, or the image is interrupted."""
        settings = self.sides[side].settings
        made = self._exclusively(lambda: None if self._cancelled else self._maker.make(image, settings))
        if made is None:
            raise Stopped
        self.made += 1
        return made

    def cancel(self) -> None:
        """Stop; the pairs that are ready stay."""
        self._cancelled = True
        self._maker.interrupt()
