"""What is made ready by itself, as the user writes it: "512x512, 768x512 x2, most used 4, while idle"."""
from __future__ import annotations

import re
from typing import NamedTuple

from .sizes import MOST_SIZES, SEPARATOR, Size, parse_sizes

MOST_USED = re.compile(r"most used(?: (\d{1,6}))?", re.IGNORECASE)
WHILE_IDLE = "while idle"
USUAL_NUMBER = 8


class PrewarmList(NamedTuple):
    """sizes: to make ready after a checkpoint has loaded. most_used: how many of the most used sizes besides.
    while_idle: whether the most used sizes are made ready too when nobody has made an image for a minute."""

    sizes: list[Size]
    most_used: int
    while_idle: bool


def parse_prewarm(text: str) -> PrewarmList:
    """Raises ValueError with a sentence for what cannot be read."""
    sizes, most_used, while_idle = [], 0, False
    for part in filter(None, map(str.strip, SEPARATOR.split(text))):
        if found := MOST_USED.fullmatch(part):
            most_used = int(found[1] or USUAL_NUMBER)
        elif part.lower() == WHILE_IDLE:
            while_idle = True
        else:
            sizes.append(part)
    if most_used > MOST_SIZES:
        raise ValueError(f"{most_used} sizes are too many at once; give at most {MOST_SIZES}.")
    return PrewarmList(parse_sizes(", ".join(sizes)), most_used, while_idle)
