"""What scripts get in their hooks beside the generation itself."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class PostSampleArgs:
    """The sampler's latents, (batch, 4, height / 8, width / 8); scripts may replace them."""

    samples: Any


@dataclass
class PostprocessImageArgs:
    """A finished picture (PIL image) and its number in the job; scripts may replace the picture."""

    image: Any
    index: int


@dataclass
class PostprocessBatchListArgs:
    """A batch's pictures as a list of (3, height, width) tensors."""

    images: list


@dataclass
class OnComponent:
    """A component of the page."""

    component: Any
