"""The page that compares two machines: the report of this one, and what another's has otherwise."""
from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import gradio as gr

from .amounts import counted
from .events import QUIET, a_place, a_text
from .facts import Facts, differences, parse, report
from .markup import sentence

ELEM_ID = "onediff_facts_page"
EXPLAINED = (
    "The report names what an image depends on to its last digit; no paths, no secrets. "
    "Copy it and paste it on the other machine, or the other way round."
)
NOTHING_DIFFERS = "Nothing differs: both machines should make the same image."
# What differs, by what it does to an image: see facts.py.
RANKS = "These change images", "These change the last digits of an image", "These change no image by themselves"


def build_facts_page(facts: Callable[[], Facts], opened: Callable[..., Any]) -> None:
    """The page, inside the one that is being built. opened: the event that it is looked at."""
    lines: Any = {"lines": 12, "max_lines": 12}
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>The same seed, another image? Compare the machines</h3>")
        gr.HTML(f'<p class="onediff-reason">{EXPLAINED}</p>')
        with gr.Row():
            with gr.Column(min_width=320):
                # gradio 4 would scroll to its end.
                mine = a_text(
                    "This machine", "facts", interactive=False, autoscroll=False, show_copy_button=True, **lines,
                )
            with gr.Column(min_width=320):
                theirs = a_text("Another machine's report", "other_facts", placeholder="Paste it here.", **lines)
        found = a_place("compare_differences")
    theirs.change(lambda text: differences_html(text, facts()), [theirs], [found], queue=False, **QUIET)
    opened(lambda: report(facts()), [], [mine], queue=False, **QUIET)


def differences_html(text: str, mine: Facts) -> str:
    """What another machine's report has otherwise."""
    if not str(text or "").strip():
        return ""
    try:
        found = differences(mine, parse(text))
    except ValueError as problem:
        return sentence(str(problem), wrong=True)
    if not found:
        return sentence(NOTHING_DIFFERS)
    told = sentence(f"{counted(len(found), 'fact differs', 'facts differ')}.")
    for rank, title in enumerate(RANKS):
        if lines := "".join(f"<li>{html.escape(line.text)}</li>" for line in found if line.rank == rank):
            told += f'<h4 class="onediff-rank">{title}</h4><ul class="onediff-differing">{lines}</ul>'
    return told
