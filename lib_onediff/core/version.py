"""OneDiff's version, and functions that parse version numbers."""
from __future__ import annotations

import re

# Raised with each change of results, of the store's format, or of the user interface.
__version__ = "0.2.0"
# The newest torch that is tested; pyproject.toml has the same.
NEWEST_TORCH = "2.14.1"


def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 7, 1) for 2.7.1+cu128, () where there are none."""
    return tuple(int(number) for number in re.findall(r"\d+", (re.match(r"[\d.]*", version or "") or [""])[0]))


def written(numbers: tuple[int, ...]) -> str:
    """(3, 10) as 3.10."""
    return ".".join(map(str, numbers))
