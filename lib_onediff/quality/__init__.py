"""How two images differ: in numbers, in words, and as an image. Pure functions of pixels."""
from __future__ import annotations

from .comparison import Difference, ImageComparison, compare, difference_map
from .measures import require_scikit_image
from .pixels import pixels_of

__all__ = ["Difference", "ImageComparison", "compare", "difference_map", "pixels_of", "require_scikit_image"]
