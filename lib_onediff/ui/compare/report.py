"""The result of a comparison, as markup and as images for the page."""
from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.table import ENOUGH
from ..amounts import milliseconds, seconds, times
from ..infotext import describe
from ..markup import table_html
from ..status import ROUTES, reasons_of
from .job import SIDE_NAMES, GeneratedImage, Pair, Request, Side

COLUMNS = ("Seed", "Verdict", "PSNR", "SSIM", "Largest", "ΔE", "Left", "Right")
MEANINGS = {
    "PSNR": "peak signal-to-noise ratio: above 48 dB no difference is seen",
    "SSIM": "structural similarity: 1 is the same image",
    "Largest": "the largest difference of a pixel's channel, of 255",
    "ΔE": "mean distance in CIELAB; people notice 2.3",
    "Left": "how long the left image took", "Right": "how long the right image took",
}
MOST_GAIN = 64


def request_html(title: str, first: Request) -> str:
    """What a comparison is of."""
    prompt = f"“{first['prompt']}”" if first["prompt"] else "no prompt"
    asked = (
        f"{title}: {first['width']}x{first['height']}, {first['steps']} steps of {first['sampler_name']}, "
        f"seed {first['seed']}, {prompt}"
    )
    return f'<p class="onediff-reason">{html.escape(asked)}</p>'


def outcome_html(pairs: Sequence[Pair], sides: Sequence[Side]) -> str:
    """The verdict over all seeds, a table of the sides, and one of the seeds."""
    facts = [facts_of(side, pairs, number) for number, side in enumerate(sides)]
    rows = []
    for name in facts[0]:
        of_sides = [side[name] for side in facts]
        if any(of_sides):
            rows.append((name, *of_sides))
    columns = ("", f"Left: {sides[0].name}", f"Right: {sides[1].name}")
    return (
        f'<p class="onediff-verdict">{html.escape(verdict(pairs))}</p>'
        + table_html("The two sides", columns, rows, {})
        + table_html("How the images differ", COLUMNS, map(cells_of, pairs), MEANINGS)
    )


def verdict(pairs: Sequence[Pair]) -> str:
    """One sentence on the images of all seeds."""
    worst = min(pairs, key=lambda pair: pair.comparison.psnr)
    words = worst.comparison.sentence()
    return words if len(pairs) == 1 or worst.comparison.largest == 0 else f"Seed {worst.seed} differs most. {words}"


def speed_of_right(pairs: Sequence[Pair]) -> str:
    """How the right side's times compare with the left's, by the ratios of the two images of a seed; "" where they are
    too few."""
    ratios = []
    for pair in pairs:
        left, right = pair.images
        ratios.append(left.seconds / max(right.seconds, 1e-9))
    if len(ratios) < ENOUGH:
        return ""
    # Where they do not agree on which is faster, neither is.
    return times(1.0 if min(ratios) <= 1 <= max(ratios) else statistics.median(ratios))


def facts_of(side: Side, pairs: Sequence[Pair], number: int) -> dict[str, str]:
    """A side's settings, how long an image takes, and how the last was made."""
    status = pairs[-1].images[number].status
    on = side.settings.enabled
    mean = f"{seconds(statistics.fmean(pair.images[number].seconds for pair in pairs))} an image"
    return {
        "Settings": describe(side.settings), "Time": mean if len(pairs) == 1 else f"{mean}, mean of {len(pairs)}",
        "Speed": speed_of_right(pairs) if number else "",
        "Step": "" if status.get("step_ms") is None else milliseconds(status["step_ms"]),
        "Route": ROUTES.get(status.get("route", ""), ""), "Why": "; ".join(reasons_of(status)) if on else "",
    }


def cells_of(pair: Pair) -> Sequence[str]:
    """The differences between the images of a seed, in the order of COLUMNS."""
    found = pair.comparison
    times = [seconds(image.seconds) for image in pair.images]
    return (
        str(pair.seed), found.sentence(), "equal" if math.isinf(found.psnr) else f"{found.psnr:.1f} dB",
        f"{found.ssim:.4f}", f"{found.largest:.0f}", f"{found.delta_e:.2f}", *times,
    )


def early_images(early: Mapping[int, GeneratedImage], sides: Sequence[Side], seed: int) -> list[tuple[Any, str]]:
    """The images that were made to warm up, by the number of their side: to be seen before any is measured."""
    if len(early) == len(sides):
        return [(image, f"Seed {seed}, {words}") for image, words in of_both((early[0], early[1]), sides)]
    ((side, made),) = early.items()
    return [(made.image.convert("RGB"), f"Seed {seed}, {SIDE_NAMES[side]}: {sides[side].name}")]


def images_of(pair: Pair, sides: Sequence[Side]) -> list[tuple[Any, str]]:
    """Left, right, and what differs, each with its caption."""
    return [(image, f"Seed {pair.seed}, {words}") for image, words in of_both(pair.images, sides)]


def of_both(images: tuple[GeneratedImage, GeneratedImage], sides: Sequence[Side]) -> list[tuple[Any, str]]:
    left, right = (image.image.convert("RGB") for image in images)
    difference, caption = difference_of(left, right)
    return [(left, f"left: {sides[0].name}"), (right, f"right: {sides[1].name}"), (difference, caption)]


def difference_of(left: Any, right: Any) -> tuple[Any, str]:
    """The absolute difference of two images, amplified by a power of two at which nothing is cut off."""
    from PIL import ImageChops

    difference = ImageChops.difference(left, right)
    extrema: Any = difference.getextrema()
    largest = max(high for _, high in extrema)
    if not largest:
        return difference, "no pixel differs"
    gain = min(MOST_GAIN, 2 ** int(math.log2(255 / largest)))
    return difference.point(lambda value: gain * value), f"difference times {gain}"
