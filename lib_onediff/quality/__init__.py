"""How two pictures differ: in numbers, in words, and as a picture. Pure functions of pixels."""
from __future__ import annotations

from .comparison import PictureComparison, compare
from .difference import Difference, difference_map
from .pixels import pixels_of

__all__ = ["Difference", "PictureComparison", "compare", "difference_map", "pixels_of"]
