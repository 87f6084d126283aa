"""The consistency report: facts as text, read back, and compared with another machine's.

    OneDiff consistency report, format 1
    [Machine]
    GPU: NVIDIA H200

The first line never changes its form; a section or a fact that a reader does not know is one like any other.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# Section to name to value, in the order in which they are shown.
Facts = dict[str, dict[str, str]]

FORMAT = 1
TITLE = "OneDiff consistency report, format {}"
FIRST_LINE = re.compile(r"OneDiff consistency report, format ([0-9]+)")
SECTION = re.compile(r"\[([^\[\]]+)\]")
LONGEST_VALUE, MOST_LINES = 160, 2000
NOTHING = "none"
SWITCHES = {True: "on", False: "off"}
CHANGES_IMAGES, CHANGES_DIGITS, CHANGES_NOTHING = range(3)
# Another model, other options of the WebUI, and OneDiff's lossy options.
SECTIONS_OF_IMAGES = {"Model", "WebUI options"}
NAMES_OF_IMAGES = {
    "deepcache_interval", "deepcache_depth", "guidance_end", "low_bit", "low_bit_budget", "low_bit_only",
    "matmul_accumulation", "convolution_accumulation",
}
# What says how much there is, or when it is made.
NAMES_OF_NOTHING = {
    "System", "GPU memory", "Python", "memory_budget", "prewarm",
}
PATH_SEPARATORS = re.compile(r"[/\\]")


def report(facts: Facts) -> str:
    """The facts as text, which parse reads back as they are."""
    lines = [TITLE.format(FORMAT)]
    for section, values in facts.items():
        lines.append(f"[{section}]")
        lines += [f"{name}: {value}" for name, value in values.items()]
    return "\n".join(lines)


def parse(text: str) -> Facts:
    """The facts in a report, which may stand in other text, indented or quoted with ">".

    Raises ValueError with a sentence for a text that is none of ours, or of a later form.
    """
    lines = [line.strip().lstrip(">").strip() for line in str(text).splitlines()[:MOST_LINES]]
    starts = [(number, first) for number, line in enumerate(lines) if (first := FIRST_LINE.fullmatch(line))]
    if not starts:
        raise ValueError('This is no consistency report: it begins with "OneDiff consistency report, format 1".')
    start, first = starts[0]
    if int(first[1]) > FORMAT:
        raise ValueError("This consistency report is of a newer OneDiff; update OneDiff here to compare with it.")
    facts: Facts = {}
    section = ""
    for line in lines[start + 1:]:
        heading = SECTION.fullmatch(line)
        name, colon, value = line.partition(": ")
        if heading:
            section = heading[1]
            facts.setdefault(section, {})
        elif colon and section:
            facts[section].setdefault(name, value.strip())
    return facts


@dataclass(frozen=True)
class Line:
    """A fact that differs. rank: CHANGES_IMAGES, CHANGES_DIGITS or CHANGES_NOTHING."""

    text: str
    rank: int


def rank_of(section: str, name: str) -> int:
    """What a fact does to an image where it differs. What is not known may change digits."""
    if section in SECTIONS_OF_IMAGES or name in NAMES_OF_IMAGES:
        return CHANGES_IMAGES
    return CHANGES_NOTHING if name in NAMES_OF_NOTHING else CHANGES_DIGITS


def differences(mine: Facts, theirs: Facts) -> list[Line]:
    """One line for every fact that is not the same in both, those that change images first and then in the order of
    mine; empty where nothing differs."""
    lines = []
    for section in {**mine, **theirs}:
        here, there = mine.get(section, {}), theirs.get(section, {})
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                values = f"here {here.get(name, 'not told')}, there {there.get(name, 'not told')}"
                lines.append(Line(f"{section}, {name}: {values}", rank_of(section, name)))
    return sorted(lines, key=lambda line: line.rank)


def as_fact(value: Any) -> str:
    """A value as a report shows it: one short line, and of a path only the last part."""
    return shortened(PATH_SEPARATORS.split(line_of(value))[-1])


def as_words(value: Any) -> str:
    """A value that is no path, such as a user's own text, as a report shows it: one short line."""
    return shortened(line_of(value))


def line_of(value: Any) -> str:
    if isinstance(value, bool):
        return SWITCHES[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_fact, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else " ".join(str(value).split())


def shortened(line: str) -> str:
    return line[:LONGEST_VALUE].strip() or NOTHING
