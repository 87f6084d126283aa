"""Durations, memory sizes and times as text, and numbers parsed from what users type."""
from __future__ import annotations

import time
from typing import Any

from ..core.units import GIBIBYTE, KIBIBYTE, MEBIBYTE

# Shown in place of a value that is not known.
NOTHING = "–"
MINUTE = 60
HOUR = 3600
DAY = 86400
# Durations from so many minutes on are given in hours.
MOST_MINUTES = 100


def milliseconds(value: float | None) -> str:
    """A duration in milliseconds as text with three digits, for example "12.3 ms"; NOTHING for None."""
    if value is None:
        return NOTHING
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def seconds(value: float) -> str:
    """A duration in seconds as text, for example "0.3 s"; without decimals from 10 on: "12 s"."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def minutes_or_hours(value: float) -> str:
    """A number of seconds as text in whole minutes, at least one, for example "4 min"; from 100 minutes on in hours:
    "1.7 h", and without decimals from 10 hours on."""
    if value < MOST_MINUTES * MINUTE:
        return f"{max(1, round(value / MINUTE))} min"
    hours = value / HOUR
    return f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h"


def duration(value: float) -> str:
    """A duration of any length as text: in seconds below two minutes, otherwise in minutes or hours."""
    return seconds(value) if value < 2 * MINUTE else minutes_or_hours(value)


def speedup(ratio: float | None) -> str:
    """A speedup in words, for example "1.6x faster", "1.2x slower" for a ratio below 1, or "no measurable difference"
    within 5 %; NOTHING for None. ratio: the time of the base, such as the WebUI, divided by the time of the side that
    the words describe, such as OneDiff."""
    if ratio is None:
        return NOTHING
    if 0.95 < ratio < 1.05:
        return "no measurable difference"
    return f"{ratio:.1f}x faster" if ratio > 1 else f"{1 / ratio:.1f}x slower"


def memory(size: int) -> str:
    """A number of bytes as text in KiB, MiB or GiB, for example "12 MiB"; "0 MiB" for 0."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.2f} GiB"
    if size >= MEBIBYTE or size == 0:
        return f"{size / MEBIBYTE:.0f} MiB"
    return f"{max(1, round(size / KIBIBYTE))} KiB"


def ago(moment: float) -> str:
    """The time since `moment`, a value of time.time(), in one unit: "5 min ago"; "just now" within the first minute,
    and if `moment` is in the future."""
    passed = max(0.0, time.time() - moment)
    for unit, name in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if passed >= unit:
            return f"{passed // unit:.0f} {name} ago"
    return "just now"


def counted(number: int, one: str, more: str = "") -> str:
    """A number with its noun, for example "1 size" or "3 sizes". one: the noun in singular. more: its plural, if that
    is not formed with "s"."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def number_in(value: Any, name: str, least: float, most: float) -> float:
    """The number that a user has typed or chosen in a field. name: the field's name, for the message. Raises ValueError
    with a sentence for the user if the value is not a number, below `least` or above `most`."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, not {value!r}.") from None
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}, not {number:g}.")
    return number


def whole_number(value: Any, name: str, least: int = 0, most: int = 2**32) -> int:
    """The whole number that a user has typed or chosen in a field, such as 2 or 2.0. Raises ValueError as number_in
    does, and for a number with a fraction."""
    number = number_in(value, name, least, most)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, not {value!r}.")
    return int(number)
