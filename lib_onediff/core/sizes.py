"""Sizes as users write them, "1024x1024, 832x1216 x2", and the list of what is made ready by itself."""
from __future__ import annotations

import re
from dataclasses import dataclass

SIZE = re.compile(r"([0-9]{1,6})\s*[xX×*]\s*([0-9]{1,6})(?:\s*[xX×*]\s*([0-9]{1,6}))?")
SEPARATOR = re.compile(r"[,;\n]")
SMALLEST, LARGEST, STEP, LARGEST_BATCH = 64, 4096, 8, 64
MOST_SIZES = 100
LONGEST_QUOTE = 40
# The context's length for a prompt of ordinary length; every host makes longer ones of whole pieces of it.
TOKENS = 77
TOKEN_CHOICES = (TOKENS, 2 * TOKENS, 3 * TOKENS)
# Of earlier versions: the first image at a size takes hardly longer than the others.
GONE = re.compile(r"most used( \d+)?|while idle", re.IGNORECASE)


@dataclass(frozen=True)
class Size:
    """Pixels, and how many images are made at once. Raises ValueError with a sentence for what cannot be."""

    width: int
    height: int
    batch: int = 1

    def __post_init__(self) -> None:
        for name, pixels in (("width", self.width), ("height", self.height)):
            if pixels % STEP or not SMALLEST <= pixels <= LARGEST:
                wanted = f"a multiple of {STEP} from {SMALLEST} to {LARGEST} pixels"
                raise ValueError(f"{self}: the {name} must be {wanted}.")
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise ValueError(f"{self}: a batch has 1 to {LARGEST_BATCH} images.")

    @property
    def resolution(self) -> str:
        """Pixels, width x height."""
        return f"{self.width}x{self.height}"

    def __str__(self) -> str:
        return self.resolution if self.batch == 1 else f"{self.resolution} x{self.batch}"


def parse_sizes(text: str) -> list[Size]:
    """The sizes in a list with commas, each once, in the order given; none in an empty one.

    Raises ValueError with a sentence for what is no size, and for more than MOST_SIZES.
    """
    parts = [part.strip() for part in SEPARATOR.split(text)]
    sizes = list(dict.fromkeys(parse_size(part) for part in parts if part))
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{len(sizes)} sizes are too many at once; give at most {MOST_SIZES}.")
    return sizes


def parse_size(text: str) -> Size:
    """One size, such as "768x512" or "768x512 x2". Raises ValueError with a sentence."""
    found = SIZE.fullmatch(text.strip())
    if not found:
        shown = text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
        raise ValueError(f"{shown!r} is not a size; write for example 768x512, or 768x512 x2 for two images at once.")
    return Size(int(found[1]), int(found[2]), int(found[3] or 1))


def parse_prewarm(text: str) -> list[Size]:
    """The sizes in the pre-warm list, without the words that earlier versions took there. Raises ValueError with a
    sentence as parse_sizes does."""
    return parse_sizes(", ".join(part for part in SEPARATOR.split(text) if not GONE.fullmatch(part.strip())))
