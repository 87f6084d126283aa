"""Makes the images of a comparison: each seed's image with two settings, by the WebUI's own txt2img.

Our script alone runs, so other extensions take no part, whatever their settings in the txt2img tab.
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

# What a user can choose for a side: the settings that the txt2img tab's next image would have, OneDiff switched off, or
# the settings tab with a preset.
CURRENT = "Current settings"
OFF = "Off: the WebUI's own"
CHOICES = [CURRENT, OFF, *PRESETS]
# By the number of the side: 0 is left, 1 is right.
SIDE_NAMES = ("left", "right")
# The names that javascript/onediff.js gives to the accordion's checkbox, list of presets and extra options.
ACCORDION = ("enabled", "preset", "changes")
# The largest number of warm-up images of a side; see Comparisons._warm_up.
MOST_WARM_UPS = 4
# The largest number of seeds of a comparison.
MOST_IMAGES = 8
LARGEST_SEED = 2**32 - 1
# The WebUI's name for its work while it makes an image of a comparison.
JOB = "OneDiff comparison"
# Arguments of the WebUI's StableDiffusionProcessingTxt2Img, for one image.
Request = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One of the two settings that are compared. name: for users, for example "Fast + backend eager"."""

    name: str
    settings: Settings


@dataclass(frozen=True)
class GeneratedImage:
    """One image of a comparison. image: a PIL image. seconds: the duration of the whole txt2img. status:
    runtime.status() right after it."""

    image: Any
    seconds: float
    status: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The left and the right image of one seed (in this order), and how they differ."""

    seed: int
    images: tuple[GeneratedImage, GeneratedImage]
    comparison: ImageComparison


def side_of(choice: Any, changes: Any, current: Callable[[], Settings], tab_settings: Settings) -> Side:
    """A side of a comparison, made from what the user has chosen for it.

    choice: one of CHOICES. changes: extra options that override the choice, such as "backend eager; low_bit int8", or
    an image's infotext; empty or None for none. current: returns the settings of the txt2img tab's next image, or
    raises ValueError; only called for CURRENT. tab_settings: the settings tab's.
    Raises ValueError with a sentence for the user: for an unknown choice, for wrong extra options, for any extra
    options with OFF, and what current() raises.
    """
    written = str(changes or "").strip()
    changed = read_changes(written)
    if choice == OFF:
        if written:
            raise ValueError(f"{written!r} has no effect where OneDiff is off: delete it, or choose another speed.")
        return Side(OFF, replace(tab_settings, enabled=False))
    settings = current() if choice == CURRENT else with_preset(tab_settings, str(choice))
    return Side(f"{choice} + {written}" if changed else str(choice), settings.for_run(changed))


def fields_of(txt2img: Any) -> dict[str, Any]:
    """The values of the txt2img tab's fields, by the end of the field's id ("width" for txt2img_width), and of the
    accordion's, by the names in ACCORDION. Any may be missing. txt2img: the JSON object of window.onediff.compare(), in
    javascript/onediff.js. Raises ValueError with a sentence for the user if this object cannot be read."""
    try:
        return dict(json.loads(txt2img))
    except (TypeError, ValueError):
        raise ValueError("The fields of the txt2img tab cannot be read: reload the page.") from None


def arguments_of_run(txt2img: Any) -> tuple[Any, ...]:
    """The three script arguments that the txt2img tab's accordion would give to the next image; the values of a new
    accordion (AS_AT_FIRST) for controls that the page does not have. txt2img and ValueError: see fields_of."""
    fields = fields_of(txt2img)
    return tuple(fields.get(name, default) for name, default in zip(ACCORDION, AS_AT_FIRST, strict=True))


def request_of(txt2img: Any) -> Request:
    """The Request for an image with the txt2img tab's prompts, size, steps, sampler, scheduler, CFG scale and seed; its
    other fields, such as hires fix, are not used. If the seed is -1 or missing, a random one is drawn here, so that the
    two sides use the same seed. txt2img: see fields_of. Raises ValueError with a sentence for the user if one of these
    fields is wrong, or if the width, the height, the steps or the CFG scale is missing."""
    fields = fields_of(txt2img)
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
    """Makes images by the WebUI's txt2img, one by one, with our script alone.

    make_script: the class of our script. status: runtime.status.
    """

    def __init__(self, make_script: Callable[[], Any], status: Callable[[], dict[str, Any]]) -> None:
        self._make_script = make_script
        self._status = status

    def make(self, request: Request, settings: Settings) -> GeneratedImage | None:
        """Make an image with these settings; None if the user interrupts or skips it, or the WebUI returns no image.
        Call this inside the adapter's exclusively(), so that no other image is made meanwhile. Raises what the WebUI
        raises."""
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
        # The runner has our script alone: without this, the WebUI would call scripts that read the tab's components.
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
        """The share of the steps of the image in progress that are done, from 0 to 1; 0 if unknown."""
        step, steps = step_of_host()
        return step / max(1, steps)

    def interrupt(self) -> None:
        """Interrupt the image in progress if a comparison is making it; do nothing to other images."""
        from modules import shared

        if shared.state.job == JOB:
            shared.state.interrupt()


@dataclass(eq=False)
class Comparison(Job):
    """The job of a comparison. Each of its images waits its turn in the WebUI's queue.

    sides: the left, then the right.
    first: the request with the first seed; the following images have this seed plus 1, 2, and so on.
    images: the number of seeds. pairs: the images of each finished seed, in the order of the seeds.
    early: the first warm-up image of each side (0: left, 1: right) that has one, which the page shows until there is a
        pair.
    made, wanted: how many images are made, and how many the comparison takes in all. Warm-up images count in made and
        wanted, and wanted grows with each further warm-up image that a side needs.
    """

    sides: tuple[Side, ...] = ()
    first: Request = field(default_factory=dict)
    images: int = 1
    pairs: list[Pair] = field(default_factory=list)
    early: dict[int, GeneratedImage] = field(default_factory=dict)
    made: int = 0
    wanted: int = 0


class Comparisons:
    """Queues comparisons as jobs, and makes their images when it is the job's turn.

    maker: makes one image. exclusively: the adapter's WebUI.exclusively, which runs a function while no other image is
        being made. queue: the list of jobs.
    """

    def __init__(self, maker: TextToImage, exclusively: Exclusively, queue: JobQueue) -> None:
        self._maker = maker
        self._exclusively = exclusively
        self._queue = queue

    def add(self, sides: Sequence[Side], first: Request, images: int, txt2img: Any) -> Comparison:
        """Queue a comparison ahead of sizes that wait for pre-warming, and return a copy of its job.

        If a pending comparison has the same sides, number of images and txt2img fields, nothing is queued, and a copy
        of that comparison is returned. sides: the left, then the right. first: see request_of. txt2img: see fields_of.
        """
        left, right = (side.name.replace(OFF, "Off") for side in sides)
        more = f", {images} images each" if images > 1 else ""
        job = Comparison(
            COMPARISON, f"{left} and {right}{more}", "page", sides=tuple(sides), first=first, images=images,
            wanted=2 + 2 * images, key=(COMPARISON, tuple(sides), images, str(txt2img)),
        )
        job.total = job.wanted * first["steps"]
        job.work = partial(self._make_all, job)
        (added,) = self._queue.add([job], ahead_of=PREWARM)
        return added

    def comparisons(self) -> list[Comparison]:
        """Copies of the comparisons in the list of jobs, in its order."""
        return [job for job in self._queue.jobs() if isinstance(job, Comparison)]

    def _make_all(self, job: Comparison) -> str:
        """The work of a comparison's job: makes all images, and fills job.pairs. Returns the job's remark for users,
        which is always "". Raises Stopped if the user cancels the job, or interrupts or skips one of its images."""
        for side in range(2):
            self._warm_up(job, side)
        for number in range(job.images):
            image = {**job.first, "seed": job.first["seed"] + number}
            # The sides alternate in who begins, because the second finds models loaded and prompts encoded.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            made = {}
            for side in order:
                self._queue.say(job, f"{SIDE_NAMES[side]}, image {number + 1} of {job.images}")
                made[side] = self._make(job, image, side)
            job.pairs.append(Pair(image["seed"], (made[0], made[1]), compare(made[0].image, made[1].image)))
        return ""

    def _warm_up(self, job: Comparison, side: int) -> None:
        """Make the first seed's image with a side's settings, and repeat it until the image's record counts no checks,
        captures or compilations (first_uses), at most MOST_WARM_UPS images in all. They are not compared. side: 0 for
        the left, 1 for the right."""
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
        """Wait for the job's turn, make an image with a side's settings, and count it as the job's progress. Raises
        Stopped if the comparison was cancelled, or the image interrupted or skipped."""
        settings = job.sides[side].settings
        before = job.seconds

        def make() -> GeneratedImage | None:
            """Make the image while it is the job's turn; None if the job was cancelled or the image interrupted."""
            if job.state != RUNNING:
                return None
            began = time.perf_counter()

            def refresh() -> None:
                """Called whenever the job is shown: bring its progress up to date."""
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
