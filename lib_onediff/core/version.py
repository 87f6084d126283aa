"""Our version, and how those of others are read."""
from __future__ import annotations

import re

# Changes whenever something changes that is computed, stored or shown.
__version__ = "0.2.0"
NEWEST_TORCH = "2.14.1"  # of those that are tested, as pyproject.toml has it


def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 7, 1) for 2.7.1+cu128, () where there are none."""
    return tuple(int(number) for number in re.findall(r"\d+", (re.match(r"[\d.]*", version or "") or [""])[0]))


def written(numbers: tuple[int, ...]) -> str:
    """(3, 10) as 3.10."""
    return ".".join(map(str, numbers))
