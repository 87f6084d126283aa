"""Arithmetic of the memory that the graphs of one architecture share: they lie over each other in it, so it is as large
as the largest of them, and it shrinks only when it is given up and those that stay are captured again."""
from __future__ import annotations

from collections.abc import Iterable

MEBIBYTE = 2**20
# torch maps device memory in such pages.
PAGE = 2 * MEBIBYTE
# For the graphs' outputs, and all else that is small.
SMALL_THINGS = PAGE
# What the gaps between a forward's tensors take of a memory in one piece, in proportion to the most that is in use: a
# twelfth for SDXL, an eighth for SD1.5, whatever the size; and of one in many pieces.
GAPS_IN_ONE_PIECE, GAPS_IN_MANY = 1 / 7, 2 / 5
# Less is not worth capturing every graph that stays again.
LEAST_GAIN = 16 * MEBIBYTE
LEAST_SHARE = 1 / 16


def pages(size: float) -> int:
    """Rounded up to whole pages."""
    return -int(-size // PAGE) * PAGE


def needs_of(peak: int, in_one_piece: bool = True) -> int:
    """What a graph takes of a memory, for the most that its forward has in use at a time."""
    return pages(peak * (1 + (GAPS_IN_ONE_PIECE if in_one_piece else GAPS_IN_MANY)))


def memory_of(needs: Iterable[int]) -> int:
    """What graphs with these needs hold together, in a memory made for them."""
    largest = max(needs, default=None)
    return 0 if largest is None else pages(largest) + SMALL_THINGS


def gives_back(held: int, needs_of_the_rest: Iterable[int]) -> int:
    """By how much a memory of this size shrinks when only graphs with these needs stay; 0 where it is left alone."""
    rest = list(needs_of_the_rest)
    gain = held - memory_of(rest)
    return held if not rest else gain if gain >= max(LEAST_GAIN, LEAST_SHARE * held) else 0


def fits(size: int, allowed: int) -> bool:
    """Whether so many bytes are within what is allowed; 0 allows any."""
    return not allowed or size <= allowed


def too_large(needed: int, allowed: int) -> str:
    """Why a graph cannot be, in one line for the user."""
    return (
        f"its graph needs {-(-needed // MEBIBYTE)} MiB, and the setting 'Graph memory in MiB' allows "
        f"{allowed // MEBIBYTE}"
    )
