"""Parses sizes of images as users write them, "1024x1024, 832x1216 x2" (x2: two images at once), and the option
Pre-warm list, "1024x1024, most used 4"."""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# Groups: width, height, and batch if given.
SIZE = re.compile(r"([0-9]{1,6})\s*[xX×*]\s*([0-9]{1,6})(?:\s*[xX×*]\s*([0-9]{1,6}))?")
SEPARATOR = re.compile(r"[,;\n]")
# The limits of width and height, in pixels.
SMALLEST = 64
LARGEST = 4096
MULTIPLE = 8
# In images.
LARGEST_BATCH = 64
# The largest number of sizes in a list, and of "most used".
MOST_SIZES = 100
# The number of characters of a wrong text that a message quotes, and of wrong items of a list that it names.
LONGEST_QUOTE = 40
MOST_QUOTES = 5
HOW_TO_WRITE_A_SIZE = "Write for example 768x512, or 768x512 x2 for two images at once."
# The length in tokens of a prompt that fits into one CLIP chunk. Hosts encode longer prompts in several whole chunks.
TOKENS = 77
# The lengths of prompts for which a size can be made ready.
TOKEN_CHOICES = (TOKENS, 2 * TOKENS, 3 * TOKENS)
MOST_USED = re.compile(r"most\s+used(?:\s+(\d{1,6}))?", re.IGNORECASE)
# The number of sizes that "most used" without a number means.
USUAL_NUMBER = 8


@dataclass(frozen=True)
class Size:
    """The size of an image in pixels, and batch, the number of images made at once. Making one raises ValueError with a
    sentence for the user if a value is out of range, or width or height is no multiple of MULTIPLE."""

    width: int
    height: int
    batch: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError, with a sentence for users, if a value is not possible."""
        for name, pixels in (("width", self.width), ("height", self.height)):
            if pixels % MULTIPLE or not SMALLEST <= pixels <= LARGEST:
                wanted = f"a multiple of {MULTIPLE} from {SMALLEST} to {LARGEST} pixels"
                raise ValueError(f"{self}: the {name} must be {wanted}.")
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise ValueError(f"{self}: a batch has 1 to {LARGEST_BATCH} images.")

    @property
    def resolution(self) -> str:
        """Width and height in pixels, as "512x768"."""
        return f"{self.width}x{self.height}"

    def __str__(self) -> str:
        """The size as users write it: "512x768", or "512x768 x2" for a batch of two."""
        return self.resolution if self.batch == 1 else f"{self.resolution} x{self.batch}"


class WantedSize(NamedTuple):
    """A size to make ready (pre-warm), and the length in tokens of the prompt that it is made ready for."""

    size: Size
    tokens: int


def parse_sizes(text: str) -> list[Size]:
    """The sizes in a list, each once, in the order given. The items are separated by commas, semicolons or lines; empty
    ones are skipped, so "" gives []. Raises ValueError with sentences for the user: one for each item that is no size
    (see all_problems), or one for more than MOST_SIZES."""
    sizes: dict[Size, None] = {}
    problems = []
    for item in items_of(text):
        try:
            sizes[parse_size(item)] = None
        except ValueError as problem:
            problems.append(str(problem))
    if problems:
        raise ValueError(all_problems(problems))
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{len(sizes)} sizes are too many at once; give at most {MOST_SIZES}.")
    return list(sizes)


def items_of(text: str) -> list[str]:
    """The items of a list that a user has written, without empty ones."""
    return list(filter(None, map(str.strip, SEPARATOR.split(text))))


def all_problems(problems: Iterable[str]) -> str:
    """One text of several sentences for the user on wrong items: each sentence once, the first MOST_QUOTES of them, and
    then once how to write a size."""
    different = list(dict.fromkeys(problem.removesuffix(HOW_TO_WRITE_A_SIZE).strip() for problem in problems))
    hidden = len(different) - MOST_QUOTES
    more = [f"{hidden} more {'is' if hidden == 1 else 'are'} wrong."] if hidden > 0 else []
    return " ".join([*different[:MOST_QUOTES], *more, HOW_TO_WRITE_A_SIZE])


def parse_size(text: str) -> Size:
    """The size in a text such as "768x512" or "768x512 x2". Raises ValueError with a sentence for the user for any
    other text, and for a size that is out of range."""
    found = SIZE.fullmatch(text.strip())
    if not found:
        shown = text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
        raise ValueError(f"{shown!r} is not a size. {HOW_TO_WRITE_A_SIZE}")
    return Size(int(found[1]), int(found[2]), int(found[3] or 1))


class PrewarmList(NamedTuple):
    """The option Pre-warm list: what to make ready after a checkpoint has loaded.

    sizes: the sizes in the list. most_used: the number of sizes to add from those that were used most; 0 for none.
    """

    sizes: list[Size]
    most_used: int


def parse_prewarm(text: str) -> PrewarmList:
    """The list in a text such as "512x512, 768x512 x2, most used 4". "" gives no sizes; of several "most used", the
    last counts, and "most used" without a number means USUAL_NUMBER. Raises ValueError with a sentence for the user for
    any other text, for a size that is out of range, and for more than MOST_SIZES."""
    sizes = []
    most_used = 0
    for item in items_of(text):
        if found := MOST_USED.fullmatch(item):
            most_used = int(found[1] or USUAL_NUMBER)
        else:
            sizes.append(item)
    wanted = PrewarmList(parse_sizes(", ".join(sizes)), most_used)
    if most_used > MOST_SIZES:
        raise ValueError(f"{most_used} sizes are too many at once; give at most {MOST_SIZES}.")
    return wanted
