"""The consistency report: facts as text, read back, and compared with another machine's.

    OneDiff consistency report, format 1
    [Machine]
    GPU: NVIDIA H200

The first line never changes its form; a section or a fact that a reader does not know is one like any other.
"""
from __future__ import annotations

import re
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


def differences(mine: Facts, theirs: Facts) -> list[str]:
    """One line for every fact that is not the same in both, in the order of mine; empty where nothing differs."""
    lines = []
    for section in {**mine, **theirs}:
        here, there = mine.get(section, {}), theirs.get(section, {})
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                values = f"here {here.get(name, 'not told')}, there {there.get(name, 'not told')}"
                lines.append(f"{section}, {name}: {values}")
    return lines


def as_fact(value: Any) -> str:
    """A value as a report shows it: one short line, and of a path only the last part."""
    if isinstance(value, bool):
        return SWITCHES[value]
    if value is None or value == "" or value == []:
        return NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_fact, value))
    if isinstance(value, float):
        return f"{value:g}"
    line = " ".join(str(value).split())
    return PATH_SEPARATORS.split(line)[-1][:LONGEST_VALUE].strip() or NOTHING
