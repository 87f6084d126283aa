"""The page that compares two settings by images of what the txt2img tab asks for."""
from __future__ import annotations

import html
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from ...core.settings import Settings
from ..accordion import EXTRA_OPTIONS, a_text_of_changes
from ..amounts import whole_number
from ..chore import Exclusively
from ..events import (
    ACTIONS,
    CONTROLS,
    HIDDEN,
    QUIET,
    UNCHANGED,
    a_button,
    a_list,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    live_html,
    nothing_seen,
)
from ..markup import bar_html, sentence
from .job import CHOICES, CURRENT, MOST_IMAGES, OFF, Comparison, TextToImage, request_of, side_of
from .report import images_of, outcome_html

ELEM_ID = "onediff_compare"
EXPLAINED = "Generates the txt2img image (prompt, size, sampler, seed) twice, once with each setting."
# gradio 4 shows images as lossy webp otherwise; gradio 3 knows PNG alone.
LOSSLESS: dict[str, Any] = {"format": "png"} if "format" in inspect.signature(gr.Gallery.__init__).parameters else {}
# Puts what the txt2img tab holds in place of the last input.
READ_TXT2IMG = "(...values) => [...values.slice(0, 5), JSON.stringify(window.onediff.txt2img())]"


class ComparePanel:
    """The handlers of the page."""

    def __init__(self, maker: TextToImage, exclusively: Exclusively, standing: Callable[[], Settings]) -> None:
        """standing: the settings tab's."""
        self.maker = maker
        self.exclusively = exclusively
        self.standing = standing

    def begin(
        self, left: Any, left_changes: Any, right: Any, right_changes: Any, images: Any, asked: Any,
    ) -> tuple[Any, ...]:
        """Begin a comparison, and show that. asked: see request_of."""
        try:
            if not self.standing().enabled:
                raise ValueError("OneDiff is switched off in the settings. Switch it on there to compare.")
            sides = side_of(left, left_changes, self.standing()), side_of(right, right_changes, self.standing())
            count = whole_number(images, "The number of images", 1, MOST_IMAGES)
            job = Comparison(sides, request_of(asked), count, self.maker, self.exclusively)
        except ValueError as problem:
            return sentence(str(problem), wrong=True), *[UNCHANGED] * 5
        return "", progress_html(job), "", None, gr.update(interactive=True), job

    @staticmethod
    def look(job: Comparison | None) -> tuple[Any, ...]:
        """The progress, and the images that are finished."""
        if job is None:
            return (UNCHANGED,) * 5
        over = job.over()
        message = (sentence(job.outcome, wrong=True), "") if over else (UNCHANGED, progress_html(job))
        pairs = list(job.pairs)
        seen: tuple[Any, Any] = UNCHANGED, UNCHANGED
        if len(pairs) > job.shown:
            images: list[Any] = []
            for pair in pairs:
                images += images_of(pair, job.sides)
            seen = outcome_html(pairs, job.sides), images
            job.shown = len(pairs)
        return *message, *seen, gr.update(interactive=not over)

    def cancel(self, job: Comparison | None) -> str:
        if job is not None:
            job.cancel()
        return sentence("Stopping." if job is not None else "Nothing is being compared.")


def progress_html(job: Comparison) -> str:
    """A bar, and what is being done."""
    percent = round(100 * job.made / job.wanted)
    what = f"image {job.made - 1} of {job.wanted - 2}" if job.made >= 2 else f"warming up {job.made + 1} of 2"
    return (
        f'<div class="onediff-jobs"><div class="onediff-job">{bar_html(percent, "Comparing")}'
        f"<span>{percent} %, {html.escape(what)}</span></div></div>"
    )


def build_compare_page(panel: ComparePanel) -> None:
    """The comparison of two settings, on the page that is being built."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h2>Two settings, the same seed</h2>")
        # javascript/onediff.js says there what the txt2img tab asks for.
        gr.HTML(f'<p class="onediff-reason">{EXPLAINED} <span data-onediff-asked></span></p>')
        with gr.Row():
            sides: list[Any] = []
            for label, chosen in (("Left", OFF), ("Right", CURRENT)):
                name = f"compare_{label.lower()}"
                with gr.Column(min_width=280):
                    sides.append(a_list(label, CHOICES, chosen, name))
                    sides.append(kept_out_of_defaults(a_text_of_changes(name, f"{label}: {EXTRA_OPTIONS.lower()}")))
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            # Without bounds: gradio refuses what is beyond them in words that name no field.
            images = kept_out_of_defaults(gr.Number(
                1, label="Images of each", precision=0, elem_id="onediff_compare_images", min_width=90,
            ))
        with gr.Row(elem_classes=ACTIONS):
            compare = a_button("Compare", "compare_start", variant="primary")
            cancel = a_button("Cancel", "compare_cancel", interactive=False)
        message, progress, numbers = (live_html(f"compare_{name}") for name in ("told", "progress", "numbers"))
        gallery = gr.Gallery(
            label="Images", show_label=False, columns=3, object_fit="contain", elem_id="onediff_compare_gallery",
            **LOSSLESS,
        )
        look = a_button("", "compare_look", elem_classes=HIDDEN)
    job = gr.State(None)
    shown = [message, progress, numbers, gallery, cancel]
    compare.click(
        panel.begin, inputs=[*sides, images, nothing_seen()], outputs=[*shown, job], queue=False, **QUIET,
        **in_the_browser(READ_TXT2IMG),
    )
    look.click(panel.look, inputs=[job], outputs=shown, queue=False, **QUIET)
    cancel.click(panel.cancel, inputs=[job], outputs=[message], queue=False, **QUIET)
    forget_when_changed([*sides, images], message)
