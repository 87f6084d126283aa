"""The Compare page: makes the txt2img tab's image with two settings, and shows how the two differ."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from ...core.jobs import JobQueue
from ...core.settings import Settings
from ..accordion import EXTRA_OPTIONS, extra_options_box
from ..amounts import whole_number
from ..events import (
    ACTIONS,
    CONTROLS,
    HIDDEN,
    QUIET,
    UNCHANGED,
    a_button,
    a_list,
    browser_input,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    live_html,
)
from ..jobs import carry_out, jobs_html, read_clicks
from ..markup import sentence
from .job import (
    CHOICES,
    CURRENT,
    MOST_IMAGES,
    OFF,
    SIDE_NAMES,
    Comparison,
    Comparisons,
    Side,
    arguments_of_run,
    request_of,
    side_of,
)
from .report import outcome_html, request_html
from .viewer import gallery_of, images_of, viewer_data, viewer_html

ELEM_ID = "onediff_compare"
# Texts that the page always shows.
EXPLAINED = (
    "Generates the txt2img image (prompt, size, sampler, seed), without hires fix and scripts, with the OneDiff "
    "settings of the left and of the right column."
)
ONE_BY_ONE = "One comparison runs at a time; others wait in the list of jobs."
# Messages with which a comparison is not queued.
OFF_IN_TAB = "OneDiff is switched off in the settings. Switch it on there to compare."
SAME = "The same comparison runs or waits already, and is not queued again."
# Remarks on a comparison that was queued.
ALIKE = "Both sides have the same settings."
BOTH_OFF = "Both sides are made without OneDiff."
# Comes before the sentence of a ValueError about the accordion.
IN_ACCORDION = "in the OneDiff accordion of the txt2img tab: "
# Since gradio 4 a gallery's default is lossy WebP; gradio 3 has PNG alone, and no such argument.
LOSSLESS: dict[str, Any] = {"format": "png"} if "format" in inspect.signature(gr.Gallery.__init__).parameters else {}
# JavaScript that fills in an input of a handler: of begin(), the last one with the fields of the txt2img tab; of
# look(), the first one with the user's clicks.
READ_TXT2IMG = "(...values) => [...values.slice(0, 5), window.onediff.compare()]"
READ_CLICKS = "(...values) => [window.onediff.clicks(), ...values.slice(1, 2)]"


class ComparePanel:
    """The handlers of the page. Results are kept in the list of jobs, so every open page shows them, also after a
    reload.

    comparisons: queues comparisons. queue: the list of jobs.
    tab_settings: returns the settings tab's settings. settings_of_run: returns the settings of an image, given its
        script arguments; raises ValueError with a sentence for the user.
    """

    def __init__(
        self, comparisons: Comparisons, queue: JobQueue, tab_settings: Callable[[], Settings],
        settings_of_run: Callable[..., Settings],
    ) -> None:
        self.comparisons = comparisons
        self.queue = queue
        self.tab_settings = tab_settings
        self.settings_of_run = settings_of_run

    def begin(
        self, left: Any, left_changes: Any, right: Any, right_changes: Any, images: Any, txt2img: Any
    ) -> tuple[str, str, str]:
        """Queue a comparison. Returns three messages as markup, each "" if there is nothing to say: for below the left
        side, below the right side, and above the button.

        Nothing is queued if a side's message is not "", which is an error, or if the message above the button is
        OFF_IN_TAB, SAME, or an error in `images` or a field of the txt2img tab. With ALIKE, BOTH_OFF or "" there, and
        "" for the sides, the comparison is queued.

        left, right: each one of CHOICES. left_changes, right_changes: each side's extra options. images: the number of
            seeds, as typed.
        txt2img: the txt2img tab's fields and the accordion's controls, as the JSON object of window.onediff.compare()
            in javascript/onediff.js.
        """
        settings = self.tab_settings()
        if not settings.enabled:
            return "", "", sentence(OFF_IN_TAB, wrong=True)

        def current() -> Settings:
            try:
                return self.settings_of_run(*arguments_of_run(txt2img))
            except ValueError as problem:
                raise ValueError(f"{IN_ACCORDION}{problem}") from None

        sides = []
        problems = ["", ""]
        for number, (choice, changes) in enumerate(((left, left_changes), (right, right_changes))):
            try:
                sides.append(side_of(choice, changes, current, settings))
            except ValueError as problem:
                problems[number] = sentence(f"{SIDE_NAMES[number].capitalize()}: {problem}", wrong=True)
        if any(problems):
            return problems[0], problems[1], ""
        return "", "", self._queue(sides, images, txt2img)

    def _queue(self, sides: Sequence[Side], images: Any, txt2img: Any) -> str:
        """Queue a comparison of these sides. Returns the message above the button, as markup. If nothing is queued, it
        is SAME, or what is wrong with `images` or a field of the txt2img tab. If the comparison is queued, it is the
        remark BOTH_OFF or ALIKE, or "". Parameters: see begin."""
        try:
            count = whole_number(images, "The number of images", 1, MOST_IMAGES)
            before = {job.id for job in self.comparisons.comparisons() if job.pending}
            added = self.comparisons.add(sides, request_of(txt2img), count, txt2img)
        except ValueError as problem:
            return sentence(str(problem), wrong=True)
        if added.id in before:
            return sentence(SAME)
        left, right = (side.settings for side in sides)
        if not left.enabled and not right.enabled:
            return sentence(BOTH_OFF)
        return sentence(ALIKE) if left == right else ""

    def look(self, clicks: Any, seen: str) -> tuple[Any, ...]:
        """Carry out the clicks in the list of jobs, and return new values for four components: the list of jobs, the
        numbers and the images of one comparison, and a hidden text that identifies these images. The comparison is the
        one that the user clicked (Show), if it has an image; otherwise the newest comparison with an image.

        clicks: see ui.jobs.read_clicks. seen: the identifying text that the previous call returned. If it is still the
            same, or no comparison has an image, the last three values are UNCHANGED.
        """
        clicked = read_clicks(clicks)
        carry_out(clicked, self.queue)
        jobs = self.queue.jobs()
        comparisons = [job for job in jobs if isinstance(job, Comparison) and job.early]
        chosen = next((job for job in comparisons if job.id == clicked.shown), None)
        job = chosen or next(iter(reversed(comparisons)), None)
        if job is None:
            # A comparison that was cleared from the list stays on the page.
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
    """Add the components of the Compare page to the open gradio context, and connect them with the panel."""
    with gr.Column(elem_id=ELEM_ID):
        gr.HTML("<h2>Two settings, the same seed</h2>")
        # javascript/onediff.js writes the txt2img tab's size, steps, sampler, seed and prompt there.
        gr.HTML(f'<p class="onediff-reason">{EXPLAINED} <span data-onediff-asked></span></p>')
        with gr.Row():
            sides: list[Any] = []
            messages: list[Any] = []
            for label, chosen in (("Left", OFF), ("Right", CURRENT)):
                name = f"compare_{label.lower()}"
                with gr.Column(min_width=280):
                    sides.append(a_list(label, CHOICES, chosen, name))
                    sides.append(kept_out_of_defaults(extra_options_box(name, f"{label}: {EXTRA_OPTIONS.lower()}")))
                    messages.append(live_html(f"{name}_told"))
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            # Without bounds, because gradio's own message for a value beyond them does not name the field.
            images = kept_out_of_defaults(gr.Number(
                1, label="Images of each", precision=0, elem_id="onediff_compare_images", min_width=90,
            ))
        messages.append(live_html("compare_told"))
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
    clicks = browser_input()
    seen = gr.State("")
    shown: dict[str, Any] = {
        "inputs": [clicks, seen], "outputs": [jobs, numbers, gallery, seen], "queue": False, **QUIET,
        **in_the_browser(READ_CLICKS),
    }
    compare.click(
        panel.begin, inputs=[*sides, images, browser_input()], outputs=messages, queue=False, **QUIET,
        **in_the_browser(READ_TXT2IMG),
    ).then(panel.look, **shown)
    look.click(panel.look, **shown)
    for message in messages:
        forget_when_changed([*sides, images], message)
