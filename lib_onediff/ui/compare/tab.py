"""The page that compares two settings, and what its buttons do."""
from __future__ import annotations

import html
import inspect
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from ...options.settings import Settings
from .. import texts
from ..cache.purge import Exclusively
from ..controls import a_text_of_changes
from ..events import (
    ACTIONS,
    LIVE,
    QUIET,
    UNCHANGED,
    a_button,
    a_list,
    a_text,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    markup,
    show_stream,
)
from ..progress import bar_html, sentence
from .job import CHOICES, CURRENT, OFF, Comparison, request_of, side_of
from .report import images_of, outcome_html, page_html
from .text_to_image import TextToImage, sampler_names

ELEM_ID = "onediff_compare"
SECONDS_BETWEEN_LOOKS = 0.5
USUAL_SAMPLER = "Euler a"
# gradio 4 shows images as lossy webp otherwise; gradio 3 knows PNG alone.
LOSSLESS = {"format": "png"} if "format" in inspect.signature(gr.Gallery.__init__).parameters else {}
# The elements of the txt2img tab that hold the prompt, the size and so on, in the order of build_fields.
COPY_FROM_TXT2IMG = """(...values) => {
  const names = ["prompt", "neg_prompt", "width", "height", "steps", "cfg_scale", "sampling", "seed"];
  return names.map((name, place) => {
    const fields = "textarea, input[type=number], input:not([type=range]):not([type=file])";
    const field = document.querySelector(`#txt2img_${name}`)?.querySelector(fields);
    if (!field || (field.value === "" && !name.endsWith("prompt"))) return values[place];
    return typeof values[place] === "number" ? Number(field.value) : field.value;
  });
}"""
NO_FILE = gr.update(value=None, visible=False)


class ComparePanel:
    """The handlers of the page."""

    def __init__(
        self, maker: TextToImage, exclusively: Exclusively, standing: Callable[[], Settings], facts: Callable[[], str],
    ) -> None:
        """standing: the settings tab's. facts: the consistency report."""
        self.maker, self.exclusively, self.standing, self.facts = maker, exclusively, standing, facts

    def follow(self, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Make the images, and show how far it is and what there is already.

        values: choice and changes of the left side, of the right side, then the arguments of request_of.
        """
        left, left_changes, right, right_changes, *fields = values
        try:
            if not self.standing().enabled:
                raise ValueError(texts.SWITCHED_OFF)
            sides = side_of(left, left_changes, self.standing()), side_of(right, right_changes, self.standing())
            job = Comparison(sides, *request_of(*fields), self.maker, self.exclusively)
        except ValueError as problem:
            yield sentence(str(problem), wrong=True), *[UNCHANGED] * 6
            return
        yield progress_html(job), "", None, gr.update(visible=False), NO_FILE, job, gr.update(interactive=True)
        shown: list[Any] = []
        while not job.over(SECONDS_BETWEEN_LOOKS):
            yield progress_html(job), *self._fresh(job, shown), *[UNCHANGED] * 4
        yield (
            sentence(job.problem, wrong=True), *self._fresh(job, shown), gr.update(visible=bool(job.pairs)), UNCHANGED,
            UNCHANGED, gr.update(interactive=False),
        )

    @staticmethod
    def _fresh(job: Comparison, shown: list[Any]) -> tuple[Any, Any]:
        """The numbers and the images, where there are more of them than shown, which then has them too."""
        pairs = job.pairs
        if 3 * len(pairs) == len(shown):
            return UNCHANGED, UNCHANGED
        shown += [image for pair in pairs[len(shown) // 3:] for image in images_of(pair, job.sides)]
        return outcome_html(pairs, job.sides), list(shown)

    def cancel(self, job: Comparison | None) -> Any:
        if job is None or job.over():
            return sentence(texts.NOTHING_COMPARED)
        job.cancel()
        return sentence(texts.STOPPING)

    def report(self, job: Comparison | None) -> Any:
        """Offer the report. gradio serves a copy of what lies in the folder of temporary files."""
        if job is None or not job.pairs:
            return NO_FILE
        page = Path(tempfile.mkdtemp(), f"onediff-{time.strftime('%Y%m%d-%H%M%S')}-{job.pairs[0].seed}.html")
        page.write_text(page_html(job.pairs, job.sides, self.facts()), encoding="utf-8")
        return gr.update(value=str(page), visible=True)


def progress_html(job: Comparison) -> str:
    """A bar, and what is being done."""
    percent, what = job.progress()
    return (
        f'<div class="onediff-jobs"><div class="onediff-job">{bar_html(percent, "Comparing")}'
        f"<span>{percent} %, {html.escape(what)}</span></div></div>"
    )


def build_compare_page(panel: ComparePanel) -> None:
    """The comparison of two settings, on the page that is being built."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h3>Two settings, the same seed</h3>")
        with gr.Row():
            sides = [*build_side("Left", OFF), *build_side("Right", CURRENT)]
        fields = build_fields()
        with gr.Row(elem_classes=ACTIONS):
            compare = a_button("Compare", "compare_start", variant="primary")
            cancel = a_button("Cancel", "compare_cancel", interactive=False)
            copy = a_button("Take from txt2img", "compare_copy")
        told = gr.HTML(sentence(texts.COMPARE_FIRST), elem_id="onediff_compare_told", elem_classes=LIVE)
        numbers = markup("compare_numbers")
        images = gr.Gallery(
            label="Images", show_label=False, columns=3, object_fit="contain", elem_id="onediff_compare_gallery",
            **LOSSLESS,
        )
        with gr.Row(elem_classes=ACTIONS, visible=False) as saving:
            save = a_button("Make report", "compare_save")
        file = gr.File(label="Report", visible=False, interactive=False, elem_id="onediff_compare_file")
    job = gr.State(None)
    copy.click(None, inputs=fields[:8], outputs=fields[:8], api_name=False, **in_the_browser(COPY_FROM_TXT2IMG))
    show_stream([compare.click], panel.follow, [*sides, *fields], [told, numbers, images, saving, file, job, cancel])
    cancel.click(panel.cancel, inputs=[job], outputs=[told], queue=False, **QUIET)
    forget_when_changed([*sides, *fields], told)
    save.click(panel.report, inputs=[job], outputs=[file], queue=False, **QUIET)


def build_side(label: str, chosen: str) -> tuple[Any, Any]:
    """What chooses the settings of a side: one of the list, and changes on top of it."""
    tab = f"compare_{label.lower()}"
    with gr.Column(min_width=280):
        return a_list(label, CHOICES, chosen, tab), kept_out_of_defaults(
            a_text_of_changes(tab, f"{label}: {texts.CHANGES[0].lower()}{texts.CHANGES[1:]}")
        )


def build_fields() -> list[Any]:
    """What the images shall be, in the order of request_of's arguments."""
    with gr.Row():
        # In columns as the sides are, so that they stand in line.
        with gr.Column(min_width=280):
            prompt = a_text("Prompt", "compare_prompt", lines=2)
        with gr.Column(min_width=280):
            negative = a_text("Negative prompt", "compare_negative", lines=2)
    names = sorted(sampler_names(), key=lambda name: name != USUAL_SAMPLER)
    with gr.Row(elem_classes="onediff-compare-numbers"):
        width, height = a_number("Width", "width", 512), a_number("Height", "height", 512)
        steps, cfg = a_number("Steps", "steps", 20), a_number("CFG scale", "cfg", 7, None)
        sampler = a_list("Sampler", names, names[0], "compare_sampler")
        seed, images = a_number("Seed", "seed", -1), a_number("Images", "images", 1)
    return [prompt, negative, width, height, steps, cfg, sampler, seed, images]


def a_number(label: str, name: str, value: int, precision: int | None = 0) -> gr.Number:
    """Without bounds: gradio refuses what is beyond them in words that name no field. job.py says more."""
    return kept_out_of_defaults(gr.Number(
        value, label=label, precision=precision, elem_id=f"onediff_compare_{name}", min_width=90,
    ))
