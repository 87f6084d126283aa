"""The viewer of a comparison: the left and the right image in one place, with a slider, a flip and the difference map.

A hidden gallery has gradio serve the images. Each has a name as its caption, which gradio 3 to 6 write into the `alt`
attribute of the img element. There javascript/onediff_viewer.js looks up the addresses of the images that viewer_data
names, and shows them in the markup of viewer_html.
"""
from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core.quality import ImageComparison
from .job import SIDE_NAMES, Comparison, GeneratedImage

DIFFERENCE = "difference"
# The largest factor by which the difference map is multiplied; see difference_of.
MOST_GAIN = 64
# The keys of SeedImages.images.
IMAGES = (*SIDE_NAMES, DIFFERENCE)
# The text and the tooltip of each button that chooses a view, by the view.
VIEWS = {
    "slider": ("Slider", "Drag in the picture, or use the arrow keys"),
    "flip": ("Flip", "Shows the other image in the same place; so does a click in the picture"),
    DIFFERENCE: ("Difference", "How far apart the colours of each pixel are"),
}


def viewer_html() -> str:
    """The viewer's markup, without images. It is hidden until javascript/onediff_viewer.js has filled it in.

    The range input over the picture is the slider for keyboards and screen readers. Mouse and touch go to the frame: a
    touch on a range input works on its thumb alone in some browsers.
    """
    buttons = "".join(
        f'<button type="button" class="onediff-small" data-onediff-view="{view}" title="{title}">{text}</button>'
        for view, (text, title) in VIEWS.items()
    )
    saves = "".join(f'<a data-onediff-save="{name}">{name}</a>' for name in IMAGES)
    names = "".join(f'<b data-onediff-name="{name}"></b>' for name in IMAGES)
    # The left image lies over the right one, and the difference map over both.
    layers = "".join(
        f'<img data-onediff-image="{name}" alt="" draggable="false">' for name in ("right", "left", DIFFERENCE)
    )
    return (
        '<div class="onediff-viewer" data-onediff-viewer hidden>'
        '<div class="onediff-strip" role="group" aria-label="Seed"></div>'
        f'<div class="onediff-views" role="group" aria-label="View">{buttons}'
        f'<span class="onediff-saves">Save: {saves}</span></div>'
        f'<div class="onediff-names">{names}</div>'
        f'<div class="onediff-frame">{layers}'
        '<input type="range" min="0" max="100" value="50" aria-label="Divider between the left and the right image">'
        '<div class="onediff-divider" aria-hidden="true"></div></div>'
        '<p class="onediff-reason" data-onediff-verdict></p>'
        '<span class="onediff-unseen" role="status"></span></div>'
    )


@dataclass(frozen=True)
class SeedImages:
    """The images of one seed.

    images: PIL images by "left", "right" and "difference" (the difference map). An image that is not made yet is
        missing, and so is the difference map then.
    difference: the caption of the difference map; "" without one. measured: how left and right differ; None for warm-up
        images.
    """

    seed: int
    images: dict[str, Any]
    difference: str = ""
    measured: ImageComparison | None = None


def images_of(job: Comparison) -> list[SeedImages]:
    """The images of a comparison, seed by seed, in the order of the pairs. Until there is a pair, one SeedImages with
    the first seed's warm-up images: of two sides, one, or none."""
    pairs = list(job.pairs)
    if not pairs:
        return [images_of_seed(job.first["seed"], dict(job.early))]
    return [images_of_seed(pair.seed, dict(enumerate(pair.images)), pair.comparison) for pair in pairs]


def images_of_seed(
    seed: int, made: dict[int, GeneratedImage], measured: ImageComparison | None = None
) -> SeedImages:
    """The SeedImages of one seed. made: the images that are made, by side (0: left, 1: right). With two images, it has
    the difference map and `measured` (see SeedImages); with fewer, neither."""
    images = {SIDE_NAMES[side]: image.image.convert("RGB") for side, image in made.items()}
    if len(images) < len(SIDE_NAMES):
        return SeedImages(seed, images)
    difference, caption = difference_of(*(images[name] for name in SIDE_NAMES))
    return SeedImages(seed, {**images, DIFFERENCE: difference}, caption, measured)


def difference_of(left: Any, right: Any) -> tuple[Any, str]:
    """The absolute difference of two RGB PIL images of one size, multiplied by the largest power of two that clips no
    pixel (at most MOST_GAIN), and its caption for users."""
    from PIL import ImageChops

    difference = ImageChops.difference(left, right)
    extrema: Any = difference.getextrema()
    largest = max(high for _, high in extrema)
    if not largest:
        return difference, "No pixel differs"
    gain = min(MOST_GAIN, 2 ** int(math.log2(255 / largest)))
    return difference.point(lambda value: gain * value), f"Difference times {gain}" if gain > 1 else "Difference"


def gallery_of(job: Comparison, seeds: Sequence[SeedImages]) -> list[tuple[Any, str]]:
    """The value of the hidden gallery: each image with its name (name_of) as caption."""
    return [(image, name_of(job, each, side)) for each in seeds for side, image in each.images.items()]


def name_of(job: Comparison, images: SeedImages, side: str) -> str:
    """The name of one image of a seed, for example "7 measured 42 left", or "7 warm-up 42 left" if the images were not
    compared. side: a key of SeedImages.images. The name is unique since the server's start, so a page with an old
    gallery never shows one image in place of another."""
    return f"{job.id} {'warm-up' if images.measured is None else 'measured'} {images.seed} {side}"


def viewer_data(job: Comparison, seeds: Sequence[SeedImages]) -> str:
    """Hidden markup with JSON for javascript/onediff_viewer.js: the names of the sides, the images' width and height in
    pixels, and for each seed its numbers and the names of its images (name_of)."""
    told = {
        "sides": {name: f"{name.capitalize()}: {side.name}" for name, side in zip(SIDE_NAMES, job.sides, strict=True)},
        "size": [job.first["width"], job.first["height"]],
        "seeds": [
            {
                "seed": each.seed, "difference": each.difference, "psnr": psnr_of(each.measured),
                "verdict": each.measured.sentence() if each.measured else "",
                "images": {side: name_of(job, each, side) for side in each.images},
            }
            for each in seeds
        ],
    }
    return f'<span hidden data-onediff-compared="{html.escape(json.dumps(told))}"></span>'


def psnr_of(measured: ImageComparison | None) -> str:
    """The peak signal-to-noise ratio as text, for example "41.2 dB", or "equal"; "" for images that were not compared.
    """
    if measured is None:
        return ""
    return "equal" if math.isinf(measured.psnr) else f"{measured.psnr:.1f} dB"
