"""Durations, memory and moments in words."""
from __future__ import annotations

import time

NOTHING = "–"
KIBIBYTE, MEBIBYTE, GIBIBYTE = 2**10, 2**20, 2**30
MINUTE, HOUR, DAY = 60, 3600, 86400


def milliseconds(value: float | None) -> str:
    """A duration to three digits, for example "12.3 ms"."""
    if value is None:
        return NOTHING
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def seconds(value: float) -> str:
    """A duration in seconds, for example "0.3 s" or "12 s"."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def times(ratio: float | None, bounds: tuple[float, float] | None = None) -> str:
    """A ratio, for example "1.62 x (1.55 to 1.70)". bounds: between what its spread puts it."""
    if ratio is None:
        return NOTHING
    spread = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    return f"{ratio:.2f} x{spread}"


def memory(size: int) -> str:
    """A number of bytes, for example "12 MiB"; less than one MiB in KiB."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.2f} GiB"
    if size >= MEBIBYTE or size == 0:
        return f"{size / MEBIBYTE:.0f} MiB"
    return f"{max(1, round(size / KIBIBYTE))} KiB"


def ago(moment: float) -> str:
    """How long a time.time() is over, for example "5 min ago"."""
    passed = max(0.0, time.time() - moment)
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if passed >= unit:
            return f"{passed // unit:.0f} {name} ago"
    return "just now"


def counted(number: int, one: str, more: str = "") -> str:
    """A number with its noun, for example "1 size" or "3 sizes"."""
    return f"{number} {one if number == 1 else more or one + 's'}"
