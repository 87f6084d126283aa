"""Durations, memory sizes and times as text, and numbers parsed from what users type."""
from __future__ import annotations

import time
from typing import Any

from ..core.units import GIBIBYTE, KIBIBYTE, MEBIBYTE

NOTHING = "–"
MINUTE = 60
HOUR = 3600
DAY = 86400


def milliseconds(value: float | None) -> str:
    """A duration in milliseconds as text with three digits, for example "12.3 ms"; NOTHING for None."""
    if value is None:
        return NOTHING
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def seconds(value: float) -> str:
    """A duration in seconds, for example "0.3 s" or "12 s"."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def minutes(value: float) -> str:
    """A number of seconds in minutes, for example "4 min"."""
    return f"{max(1, round(value / MINUTE))} min"


def times(ratio: float | None) -> str:
    """A ratio of times in words, for example "1.6x faster", "1.2x slower" for a ratio below 1, or "no measurable
    difference"; NOTHING for None."""
    if ratio is None:
        return NOTHING
    if 0.95 < ratio < 1.05:
        return "no measurable difference"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"


def memory(size: int) -> str:
    """A number of bytes, for example "12 MiB"; less than one MiB in KiB."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.2f} GiB"
    if size >= MEBIBYTE or size == 0:
        return f"{size / MEBIBYTE:.0f} MiB"
    return f"{max(1, round(size / KIBIBYTE))} KiB"


def ago(moment: float) -> str:
    """The time since `moment`, a value of time.time(), for example "5 min ago"."""
    passed = max(0.0, time.time() - moment)
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if passed >= unit:
            return f"{passed // unit:.0f} {name} ago"
    return "just now"


def counted(number: int, one: str, more: str = "") -> str:
    """A number with its noun, for example "1 size" or "3 sizes". one: the noun. more: its plural, if that is not one +
    "s"."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def number_in(value: Any, name: str, least: float, most: float) -> float:
    """The number that a user has typed or chosen. name: of the field. Raises ValueError, with a sentence that names the
    field, if the value is not a number, or not between least and most."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, not {value!r}.") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}, not {number:g}.")
    return number


def whole_number(value: Any, name: str, least: int = 0, most: int = 2**32) -> int:
    """The whole number that a user has typed or chosen. Raises ValueError, as number_in does, also for a fraction."""
    number = number_in(value, name, least, most)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, not {value!r}.")
    return int(number)
