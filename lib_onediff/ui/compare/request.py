"""What somebody has typed into the comparison's fields, as a request."""
from __future__ import annotations

import random
from typing import Any

from ...shapes.sizes import Size
from ..cache.handlers import whole_number
from .job import Request
from .sides import Side
from .text_to_image import Order

MOST_IMAGES, MOST_STEPS, LARGEST_SEED = 8, 150, 2**32 - 1
LEAST_CFG, MOST_CFG = 1.0, 30.0


def request_of(
    sides: tuple[Side, Side], prompt: Any, negative_prompt: Any, width: Any, height: Any, steps: Any, cfg_scale: Any,
    sampler: Any, seed: Any, images: Any, warm_up: Any,
) -> Request:
    """The request. Raises ValueError with a sentence for the user.

    Both sides may have the same settings: that shows whether an image can be made twice.
    """
    size = Size(whole_number(width, "The width"), whole_number(height, "The height"))
    count = within("The number of images", whole_number(images, "The number of images"), 1, MOST_IMAGES)
    first = whole_number(-1 if seed is None else seed, "The seed")
    first = random.SystemRandom().randrange(LARGEST_SEED - count) if first == -1 else first
    return Request(
        sides,
        Order(
            str(prompt or ""), str(negative_prompt or ""), within("The seed", first, 0, LARGEST_SEED - count),
            size.width, size.height, within("The number of steps", whole_number(steps, "The number of steps"), 1,
                                            MOST_STEPS),
            within("The CFG scale", number(cfg_scale, "The CFG scale"), LEAST_CFG, MOST_CFG), str(sampler or ""),
        ),
        count, bool(warm_up),
    )


def number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number.") from None


def within(name: str, value: Any, least: Any, most: Any) -> Any:
    """value, if it is between these. Raises ValueError with a sentence."""
    if not least <= value <= most:
        raise ValueError(f"{name} is from {least:g} to {most:g}, not {value:g}.")
    return value
