"""The page that compares two machines: the report of this one, and what another's has otherwise."""
from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import gradio as gr

from ..runtime.consistency import Facts, differences, parse, report
from . import texts
from .events import ACTIONS, QUIET, a_button, a_text, in_the_browser, markup
from .progress import sentence

ELEM_ID = "onediff_facts_page"
COPY = """async (text) => {
  const say = (words) => [`<p class="onediff-result" role="status">${words}</p>`];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.querySelector("#onediff_facts textarea");
    area.focus();
    area.select();
    if (!document.execCommand("copy")) return say("The browser does not let us copy: press Ctrl+C.");
  }
  return say("Copied. Paste it on the other machine.");
}"""


def build_facts_page(facts: Callable[[], Facts], opened: Callable[..., Any]) -> None:
    """The page, inside the one that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>The same seed, another image? Compare the machines</h3>")
        gr.HTML(f'<p class="onediff-reason">{" ".join(texts.REPORT_EXPLAINED)}</p>')
        with gr.Row():
            with gr.Column(min_width=320):
                # gradio 4 would scroll to its end.
                mine = a_text("This machine", "facts", lines=12, max_lines=12, interactive=False, autoscroll=False)
                with gr.Row(elem_classes=ACTIONS):
                    copy, copied = a_button("Copy report", "facts_copy", variant="primary"), markup("compare_copied")
            with gr.Column(min_width=320):
                theirs = a_text(
                    "Another machine's report", "other_facts", lines=12, max_lines=12, placeholder=texts.PASTE_HERE,
                )
        found = markup("compare_differences")
    # What the page shows may be old by now.
    fresh = copy.click(lambda: report(facts()), inputs=[], outputs=[mine], queue=False, **QUIET)
    fresh.then(None, inputs=[mine], outputs=[copied], api_name=False, **in_the_browser(COPY))
    theirs.change(
        lambda text: differences_html(text, facts()), inputs=[theirs], outputs=[found], queue=False, **QUIET
    )
    opened(lambda: (report(facts()), ""), inputs=[], outputs=[mine, copied], queue=False, **QUIET)


def differences_html(text: str, mine: Facts) -> str:
    """What another machine's report has otherwise."""
    if not str(text or "").strip():
        return ""
    try:
        found = differences(mine, parse(text))
    except ValueError as problem:
        return sentence(str(problem), wrong=True)
    if not found:
        return sentence(texts.NOTHING_DIFFERS)
    told = sentence(texts.facts_differ(len(found)))
    for rank, title in enumerate(texts.RANKS):
        if lines := "".join(f"<li>{html.escape(line.text)}</li>" for line in found if line.rank == rank):
            told += f'<h4 class="onediff-rank">{title}</h4><ul class="onediff-differing">{lines}</ul>'
    return told
