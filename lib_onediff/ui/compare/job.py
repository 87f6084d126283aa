"""A comparison: images made with two settings in turn, by the WebUI's own txt2img.

Only our script takes part, with arguments of its own: what other extensions are set to in the txt2img tab is left out.
"""
from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...core.jobs import COMPARISON, PREWARM, RUNNING, Exclusively, Job, JobQueue, Stopped, nothing
from ...core.quality import ImageComparison, compare
from ...core.settings import Settings, options_of_a_run
from ...core.sizes import Size
from ...hosts.images import step_of_host
from ..amounts import number_in, whole_number
from ..infotext import read_changes
from ..presets import PRESETS, with_preset
from ..run_settings import AS_AT_FIRST

CURRENT = "Current settings"
OFF = "Off: the WebUI's own"
CHOICES = [CURRENT, OFF, *PRESETS]
SIDE_NAMES = ("left", "right")
# The accordion's switch, speed and extra options, as javascript/onediff.js names them.
ACCORDION = ("enabled", "preset", "changes")
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


def side_of(place: str, choice: Any, changes: Any, current: Callable[[], Settings], standing: Settings) -> Side:
    """The settings for a side.

    place: "Left" or "Right". choice: one of CHOICES. changes: such as "backend eager; low_bit int8", also as an image's
    infotext has it. current: what the next image of the txt2img tab would have; raises ValueError. standing: the
    settings tab's. Raises ValueError with a sentence.
    """
    written = str(changes or "").strip()
    try:
        changed = read_changes(written)
        if choice == OFF:
            if written:
                raise ValueError(f"{written!r} has no effect where OneDiff is off: delete it, or choose another speed.")
            return Side(OFF, replace(standing, enabled=False))
        settings = current() if choice == CURRENT else with_preset(standing, str(choice))
        return Side(f"{choice} + {written}" if changed else str(choice), settings.for_run(changed))
    except ValueError as problem:
        raise ValueError(f"{place}: {problem}") from None


def fields_of(asked: Any) -> dict[str, Any]:
    """What the txt2img tab holds, by the ends of its fields' ids, from JSON. Raises ValueError with a sentence."""
    try:
        return dict(json.loads(asked))
    except (TypeError, ValueError):
        raise ValueError("The txt2img tab cannot be read.") from None


def arguments_of_run(asked: Any) -> tuple[Any, ...]:
    """The script arguments that the accordion of the txt2img tab holds; what it does not show is as at first. Raises
    ValueError with a sentence."""
    fields = fields_of(asked)
    return tuple(fields.get(name, usual) for name, usual in zip(ACCORDION, AS_AT_FIRST, strict=True))


def request_of(asked: Any) -> Request:
    """The image that the txt2img tab asks for. asked: see fields_of. Raises ValueError with a sentence for the user."""
    fields = fields_of(asked)
    seed = whole_number(fields.get("seed", -1), "The seed", -1, LARGEST_SEED - MOST_IMAGES)
    size = Size(whole_number(fields.get("width"), "The width"), whole_number(fields.get("height"), "The height"))
    return {
        "prompt": str(fields.get("prompt", "")), "negative_prompt": str(fields.get("neg_prompt", "")),
        "seed": random.SystemRandom().randrange(LARGEST_SEED - MOST_IMAGES) if seed == -1 else seed,
        "width": size.width, "height": size.height,
        "steps": whole_number(fields.get("steps"), "The number of steps", 1, 150),
        "cfg_scale": number_in(fields.get("cfg_scale"), "The CFG scale", 1, 30),
        "sampler_name": str(fields.get("sampling", "Euler a")), "scheduler": str(fields.get("scheduler", "Automatic")),
    }


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

    @staticmethod
    def share_of_image() -> float:
        """How far the image is that is being made, from 0 to 1."""
        step, steps = step_of_host()
        return step / max(1, steps)

    def interrupt(self) -> None:
        """Stop the image that is being made, if it is one of ours."""
        from modules import shared

        if shared.state.job == JOB:
            shared.state.interrupt()


@dataclass(eq=False)
class Comparison(Job):
    """The job of a comparison. Its images wait their turn in the WebUI's queue, one by one.

    first: the image of the first seed; the others have the seeds that follow. images: how many of each side. pairs:
    what there is already. early: the first image of each side, by its number, made to warm up: to be seen at once.
    made, wanted: how many images, those to warm up included.
    """

    sides: tuple[Side, ...] = ()
    first: Request = field(default_factory=dict)
    images: int = 1
    pairs: list[Pair] = field(default_factory=list)
    early: dict[int, GeneratedImage] = field(default_factory=dict)
    made: int = 0
    wanted: int = 0


class Comparisons:
    """Adds comparisons to the list of jobs, and does their work."""

    def __init__(self, maker: TextToImage, exclusively: Exclusively, queue: JobQueue) -> None:
        self._maker = maker
        self._exclusively = exclusively
        self._queue = queue

    def add(self, sides: Sequence[Side], first: Request, images: int, asked: Any) -> Comparison:
        """Queue a comparison ahead of sizes that wait, and return its job; that of one which runs or waits already
        where the same is asked. asked: what the txt2img tab holds."""
        left, right = (side.name.replace(OFF, "Off") for side in sides)
        more = f", {images} images each" if images > 1 else ""
        job = Comparison(
            COMPARISON, f"{left} and {right}{more}", "page", sides=tuple(sides), first=first, images=images,
            wanted=2 + 2 * images, key=(COMPARISON, tuple(sides), images, str(asked)),
        )
        job.total = job.wanted * first["steps"]
        job.work = partial(self._make_all, job)
        (added,) = self._queue.add([job], ahead_of=PREWARM)
        return added

    def comparisons(self) -> list[Comparison]:
        """Copies of the comparisons in the list, in its order."""
        return [job for job in self._queue.jobs() if isinstance(job, Comparison)]

    def _make_all(self, job: Comparison) -> str:
        for side in range(2):
            self._warm_up(job, side)
        for number in range(job.images):
            image = {**job.first, "seed": job.first["seed"] + number}
            # They take turns: what the first of two loads or encodes is ready for the other.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            made = {}
            for side in order:
                self._queue.say(job, f"{SIDE_NAMES[side]}, image {number + 1} of {job.images}")
                made[side] = self._make(job, image, side)
            job.pairs.append(Pair(image["seed"], (made[0], made[1]), compare(made[0].image, made[1].image)))
        return ""

    def _warm_up(self, job: Comparison, side: int) -> None:
        """Make a side's image until nothing of it happens for the first time."""
        for number in range(MOST_WARM_UPS):
            if number:
                job.wanted += 1
                self._queue.advance(job, total=job.wanted * job.first["steps"])
            self._queue.say(job, f"{SIDE_NAMES[side]}, image to warm up")
            made = self._make(job, job.first, side)
            job.early.setdefault(side, made)
            if not (made.status.get("image") or {}).get("first_uses"):
                return

    def _make(self, job: Comparison, image: Request, side: int) -> GeneratedImage:
        """A side's image. Raises Stopped once the comparison is cancelled, or the image is interrupted."""
        settings = job.sides[side].settings
        before = job.seconds

        def make() -> GeneratedImage | None:
            if job.state != RUNNING:
                return None
            began = time.perf_counter()

            def refresh() -> None:
                steps = job.first["steps"] * (job.made + self._maker.share_of_image())
                self._queue.advance(
                    job, done=int(steps), share=steps / job.total, seconds=before + time.perf_counter() - began,
                )

            job.refresh = refresh
            job.cancel = self._maker.interrupt
            try:
                return self._maker.make(image, settings)
            finally:
                job.refresh = nothing
                job.cancel = nothing

        made = self._queue.in_turn(job, self._exclusively, make)
        if made is None:
            raise Stopped
        job.made += 1
        done = job.made * job.first["steps"]
        self._queue.advance(job, done=done, share=done / job.total, seconds=before + made.seconds)
        return made
