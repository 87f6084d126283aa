"""A picture that shows the same images made with several options: a row for each."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from ..core.refusal import Refusal

# In pixels: the side of each image, the width of the labels at the left, and the space between images.
SIDE = 168
LABEL_WIDTH = 230
GAP = 6
# The heights of a prompt's line and of the text below the images.
LINE = 17
BOTTOM = 62
LABEL_SIZE = 17
TEXT_SIZE = 14


@dataclass(frozen=True)
class SheetRow:
    """A row of a sheet. label: its options. facts: lines below the label, such as the time of an image. images: one for
    each prompt."""
    label: str
    facts: Sequence[str]
    images: Sequence[Image.Image]


def sheet(rows: Sequence[SheetRow], prompts: Sequence[str], settings: str) -> Image.Image:
    """The rows below each other, each with its label at the left; below them the prompt of each column, and a line with
    the settings that all images have in common. A prompt takes two lines, because a column is narrow: the second begins
    with its first " on ".

    Raises Refusal if Pillow is older than 10.1, which has no font of a chosen size.
    """
    try:
        large = ImageFont.load_default(LABEL_SIZE)
        small = ImageFont.load_default(TEXT_SIZE)
    except TypeError as problem:
        raise Refusal("the picture needs Pillow 10.1 or newer") from problem
    bottom = len(rows) * (SIDE + GAP)
    picture = Image.new("RGB", (LABEL_WIDTH + len(prompts) * (SIDE + GAP), bottom + BOTTOM), "white")
    draw = ImageDraw.Draw(picture)
    for index, row in enumerate(rows):
        top = index * (SIDE + GAP)
        draw.text((8, top + 50), row.label, "black", large)
        for number, fact in enumerate(row.facts):
            draw.text((8, top + 78 + 20 * number), fact, "black", small)
        for column, image in enumerate(row.images):
            picture.paste(image.resize((SIDE, SIDE)), (LABEL_WIDTH + column * (SIDE + GAP), top))
    for column, prompt in enumerate(prompts):
        left = LABEL_WIDTH + column * (SIDE + GAP)
        first, on, second = prompt.partition(" on ")
        draw.text((left, bottom + 2), first, "black", small)
        draw.text((left, bottom + 2 + LINE), on.lstrip() + second, "black", small)
    draw.text((8, bottom + 39), settings, "black", small)
    return picture
