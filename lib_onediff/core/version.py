"""OneDiff's version, and functions that parse version numbers."""
from __future__ import annotations

import re

# Raised with each change of results, of the store's format, or of the user interface.
__version__ = "0.2.0"
# The newest torch that is tested; pyproject.toml has the same.
NEWEST_TORCH = "2.14.1"


def release(version: str | None) -> tuple[int, ...]:
    """The numbers at the beginning of a version, for comparisons: (2, 7, 1) for "2.7.1+cu128". () if there are none, or
    version is None."""
    return tuple(int(number) for number in re.findall(r"\d+", (re.match(r"[\d.]*", version or "") or [""])[0]))


def written(numbers: tuple[int, ...]) -> str:
    """A version as text: "3.10" for (3, 10)."""
    return ".".join(map(str, numbers))
