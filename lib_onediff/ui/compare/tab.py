"""The page that compares two settings by images of what the txt2img tab asks for."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from ...core.jobs import JobQueue
from ...core.settings import Settings
from ..accordion import EXTRA_OPTIONS, a_text_of_changes
from ..amounts import whole_number
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
from ..jobs import do, jobs_html, read_clicks
from ..markup import sentence
from .job import (
    CHOICES,
    CURRENT,
    MOST_IMAGES,
    OFF,
    Comparison,
    Comparisons,
    arguments_of_run,
    request_of,
    side_of,
)
from .report import outcome_html, request_html
from .viewer import gallery_of, images_of, viewer_data, viewer_html

ELEM_ID = "onediff_compare"
EXPLAINED = "Generates the txt2img image (prompt, size, sampler, seed) twice, once with each setting."
ONE_BY_ONE = "One comparison runs at a time; others wait in the list of jobs."
SAME = "The same comparison runs or waits already, and is not queued again."
# gradio 4 shows images as lossy webp otherwise; gradio 3 knows PNG alone.
LOSSLESS: dict[str, Any] = {"format": "png"} if "format" in inspect.signature(gr.Gallery.__init__).parameters else {}
# Puts what the txt2img tab holds in place of the last input.
READ_TXT2IMG = "(...values) => [...values.slice(0, 5), window.onediff.compare()]"
READ_CLICKS = "(...values) => [window.onediff.clicks(), ...values.slice(1, 2)]"


class ComparePanel:
    """The handlers of the page. What a page shows is in the list of jobs: a page that is opened later, or anew, shows
    it too."""

    def __init__(
        self, comparisons: Comparisons, queue: JobQueue, standing: Callable[[], Settings],
        settings_of_run: Callable[..., Settings],
    ) -> None:
        """standing: the settings tab's settings. settings_of_run: those of a run with script arguments."""
        self.comparisons = comparisons
        self.queue = queue
        self.standing = standing
        self.settings_of_run = settings_of_run

    def begin(self, left: Any, left_changes: Any, right: Any, right_changes: Any, images: Any, asked: Any) -> str:
        """Queue a comparison, and return what is to be known of it. asked: see request_of."""
        standing = self.standing()

        def current() -> Settings:
            return self.settings_of_run(*arguments_of_run(asked))

        try:
            if not standing.enabled:
                raise ValueError("OneDiff is switched off in the settings. Switch it on there to compare.")
            sides = [
                side_of(place, choice, changes, current, standing)
                for place, choice, changes in (("Left", left, left_changes), ("Right", right, right_changes))
            ]
            count = whole_number(images, "The number of images", 1, MOST_IMAGES)
            before = {job.id for job in self.comparisons.comparisons() if job.pending}
            added = self.comparisons.add(sides, request_of(asked), count, asked)
        except ValueError as problem:
            return sentence(str(problem), wrong=True)
        return sentence(SAME) if added.id in before else ""

    def look(self, clicks: Any, seen: str) -> tuple[Any, ...]:
        """The list of jobs, and the newest comparison that has an image, or the one that was clicked. seen: what the
        page shows of it already; the last value is what it shows now."""
        clicked = read_clicks(clicks)
        do(clicked, self.queue)
        jobs = self.queue.jobs()
        comparisons = [job for job in jobs if isinstance(job, Comparison) and job.early]
        chosen = next((job for job in comparisons if job.id == clicked.shown), None)
        job = chosen or next(iter(reversed(comparisons)), None)
        if job is None:
            # One that was taken out of the list stays on the page.
            return jobs_html(jobs), UNCHANGED, UNCHANGED, UNCHANGED
        pairs = list(job.pairs)
        now = f"{job.id}, {len(job.early)}, {len(pairs)}"
        if now == seen:
            return jobs_html(jobs), UNCHANGED, UNCHANGED, UNCHANGED
        seeds = images_of(job)
        outcome = outcome_html(pairs, job.sides) if pairs else ""
        numbers = viewer_data(job, seeds) + request_html(job.title, job.first) + outcome
        return jobs_html(jobs), numbers, gallery_of(job, seeds), now


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
        message = live_html("compare_told")
        with gr.Row(elem_classes=ACTIONS):
            compare = a_button("Compare", "compare_start", variant="primary")
        gr.HTML(f'<p class="onediff-reason">{ONE_BY_ONE}</p>')
        jobs = live_html("compare_jobs")
        gr.HTML(viewer_html())
        numbers = live_html("compare_numbers")
        # Serves the viewer's images.
        gallery = gr.Gallery(
            show_label=False, elem_id="onediff_compare_gallery", elem_classes=HIDDEN, **LOSSLESS,
        )
        look = a_button("", "compare_look", elem_classes=HIDDEN)
    clicks = nothing_seen()
    seen = gr.State("")
    shown: dict[str, Any] = {
        "inputs": [clicks, seen], "outputs": [jobs, numbers, gallery, seen], "queue": False, **QUIET,
        **in_the_browser(READ_CLICKS),
    }
    compare.click(
        panel.begin, inputs=[*sides, images, nothing_seen()], outputs=[message], queue=False, **QUIET,
        **in_the_browser(READ_TXT2IMG),
    ).then(panel.look, **shown)
    look.click(panel.look, **shown)
    forget_when_changed([*sides, images], message)
