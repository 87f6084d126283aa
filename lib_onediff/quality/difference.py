"""Where two images differ, as an image."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .pixels import WHITE, pair_of

MOST_GAIN = 64


@dataclass(frozen=True)
class Difference:
    """image: a PIL image of the absolute difference of each channel times gain, black where the images agree."""

    image: Any
    gain: int


def difference_map(first: Any, second: Any, gain: int | None = None) -> Difference:
    """The difference of two images of one size (see pixels.pixels_of), as an image.

    gain: how much it is amplified; by default the highest power of two, up to 64, at which nothing is cut off.
    """
    from PIL import Image

    one, other = pair_of(first, second)
    difference = (one - other).abs()
    if gain is None:
        gain = gain_for(difference.max().item())
    values = (difference * (gain * WHITE)).round().clamp(0, WHITE).to(torch.uint8).contiguous()
    data = bytes(values.flatten().tolist())
    return Difference(Image.frombytes("RGB", (values.shape[1], values.shape[0]), data), gain)


def gain_for(largest: float) -> int:
    """The highest power of two up to MOST_GAIN that keeps largest times it at 1 or below."""
    gain = 1
    while gain < MOST_GAIN and 2 * gain * largest <= 1:
        gain *= 2
    return gain
