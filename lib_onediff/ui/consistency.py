"""The consistency report: a text with all facts that an image depends on. The differences between two machines' reports
show why the same seed gives another image on the other machine.

    OneDiff consistency report, format 1
    [Model]
    Checkpoint: emoji-sd

Sections and facts that this version of OneDiff does not know are read and compared like those that it knows.
"""
from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import gradio as gr

from .amounts import counted
from .events import COPY_BUTTON, QUIET, a_text, live_html
from .facts import Facts
from .markup import sentence

ELEM_ID = "onediff_facts_page"
EXPLAINED = (
    "The report lists everything that an image's exact pixels depend on. It has no paths and no secrets. "
    "Copy it and paste it on the other machine, or paste the other machine's report here."
)
TITLE = "OneDiff consistency report, format 1"


def build_facts(facts: Callable[[], Facts], opened: Callable[..., Any]) -> None:
    """Build a folded part of the Compare page with this machine's report and a box for another machine's report, inside
    the open gradio context. facts: returns this machine's facts. opened: the gradio event by which this machine's
    report is made: the user opens the page (tab.select)."""
    lines: Any = {"lines": 12, "max_lines": 12}
    with gr.Accordion("Why does the same seed differ on another machine?", open=False, elem_id=ELEM_ID):
        gr.HTML(f'<p class="onediff-reason">{EXPLAINED}</p>')
        with gr.Row():
            with gr.Column(min_width=320):
                # autoscroll: gradio 4 would scroll to the end.
                mine = a_text(
                    "This machine", "facts", interactive=False, autoscroll=False, **COPY_BUTTON, **lines,
                )
            with gr.Column(min_width=320):
                theirs = a_text("Another machine's report", "other_facts", placeholder="Paste it here.", **lines)
        found = live_html("compare_differences")
    theirs.change(lambda text: differences_html(text, facts()), [theirs], [found], queue=False, **QUIET)
    opened(lambda: report(facts()), [], [mine], queue=False, **QUIET)


def differences_html(text: str, mine: Facts) -> str:
    """The differences between this machine's facts (mine) and another machine's report (text), as markup: a list; a
    sentence if nothing differs; an error if the text is no report; "" for an empty text."""
    if not str(text or "").strip():
        return ""
    try:
        found = differences(mine, parse(text))
    except ValueError as problem:
        return sentence(str(problem), wrong=True)
    if not found:
        return sentence("Nothing differs: both machines should make the same image.")
    summary = sentence(f"{counted(len(found), 'fact differs', 'facts differ')}, the likeliest causes first.")
    return f'{summary}<ul class="onediff-differing">{"".join(f"<li>{html.escape(line)}</li>" for line in found)}</ul>'


def report(facts: Facts) -> str:
    """The facts as a text in the format of the module's docstring; the inverse of parse."""
    lines = [TITLE]
    for section, values in facts.items():
        lines += [f"[{section}]", *(f"{name}: {value}" for name, value in values.items())]
    return "\n".join(lines)


def parse(text: str) -> Facts:
    """The facts in a text that contains a report. Other text may come before the report, and the report's lines may be
    indented or quoted with ">". All lines of the form "name: value" after the title count as facts; of two with one
    name in a section, the first counts.

    Raises ValueError with a sentence for users if the text has no report of this format version.
    """
    lines = iter([line.strip().lstrip("> \t") for line in str(text).splitlines()])
    if TITLE not in lines:
        raise ValueError(f'This text is not a consistency report of this version, which begins with "{TITLE}".')
    facts: Facts = {}
    values: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(": ")
        if line.startswith("[") and line.endswith("]"):
            values = facts.setdefault(line[1:-1], {})
        elif colon:
            values.setdefault(name, value.strip())
    return facts


def differences(mine: Facts, theirs: Facts) -> list[str]:
    """A line for every fact that differs or is in one of the two only, such as "Model, Hash: here 1, there 2"; [] if
    mine and theirs agree. In the order of `mine`: sections, and facts of a section, that only `theirs` has come last.
    """
    lines = []
    for section in {**mine, **theirs}:
        here = mine.get(section, {})
        there = theirs.get(section, {})
        for name in {**here, **there}:
            one = here.get(name, "not in the report")
            other = there.get(name, "not in the report")
            if one != other:
                lines.append(f"{section}, {name}: here {one}, there {other}")
    return lines
