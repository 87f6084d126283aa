"""What the comparison does when somebody uses it."""
from __future__ import annotations

import html
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from ...consistency import Facts, differences, parse, report
from ...options.settings import Settings
from ...quality import require_scikit_image
from .. import texts
from ..cache.purge import Exclusively
from ..events import UNCHANGED
from ..progress import bar_html, sentence
from .job import CANCELLED, FAILED, Comparison, Request, request_of
from .markup import images_html, numbers_html, summary_html
from .report import save
from .sides import Presets, Side, choices, side_of
from .text_to_image import TextToImage

SECONDS_BETWEEN_LOOKS = 0.5
NO_FILES = gr.update(value=None, visible=False)
# The components that show what came of it, in the order of what follow yields; the job itself is the last.
Shown = tuple[Any, ...]
# What the button Cancel is.
USABLE, IDLE = gr.update(interactive=True), gr.update(interactive=False)
log = logging.getLogger("onediff")


class ComparePanel:
    """The handlers of one page's comparison and consistency report."""

    def __init__(
        self, maker: TextToImage, exclusively: Exclusively, standing: Callable[[], Settings], presets: Presets,
        facts: Callable[[], Facts], folder: Callable[[], Path],
    ) -> None:
        """standing: the settings tab's. facts: of the consistency report. folder: where reports go."""
        self.maker, self.exclusively, self.standing, self.presets = maker, exclusively, standing, presets
        self.facts, self.folder = facts, folder

    def choices(self) -> list[str]:
        return choices(self.presets)

    def refresh(self) -> tuple[Any, Any]:
        """What both lists of settings offer now."""
        offered = gr.update(choices=self.choices())
        return offered, offered

    # --- making the images ----------------------------------------------------------------------------------------

    def follow(self, *values: Any) -> Iterator[Shown]:
        """Make the images, and show how far it is and what there is already.

        values: choice and changes of the left side, of the right side, then the arguments of request_of after sides.
        """
        try:
            request = self._request(*values)
        except ValueError as problem:
            yield sentence(str(problem), wrong=True), *[UNCHANGED] * 9
            return
        job = Comparison(request, self.maker, self.exclusively)
        yield progress_html(job), "", nothing_to_choose(), "", "", gr.update(visible=False), "", NO_FILES, job, USABLE
        shown = 0
        while True:
            over = job.wait(SECONDS_BETWEEN_LOOKS)
            pairs = job.pairs
            fresh = len(pairs) > shown
            yield (
                outcome_html(job) if over else progress_html(job),
                summary_html(pairs, request.sides, request.warm_up) if fresh else UNCHANGED,
                seeds_to_choose(job, first=not shown) if fresh else UNCHANGED,
                # Megabytes: once, and not again when another seed is ready.
                images_html(pairs[0], request.sides) if pairs and not shown else UNCHANGED,
                numbers_html(pairs) if fresh else UNCHANGED,
                gr.update(visible=bool(pairs)) if over else UNCHANGED, UNCHANGED, UNCHANGED, job,
                IDLE if over else UNCHANGED,
            )
            shown = len(pairs)
            if over:
                return

    def _request(
        self, left: Any, left_changes: Any, right: Any, right_changes: Any, *order: Any
    ) -> Request:
        if not self.standing().enabled:
            raise ValueError(texts.SWITCHED_OFF)
        require_scikit_image()
        return request_of((self._side(left, left_changes), self._side(right, right_changes)), *order)

    def _side(self, choice: Any, changes: Any) -> Side:
        return side_of(choice, changes, self.standing(), self.presets)

    def settings_of(self, choice: Any, changes: Any) -> Settings:
        """What a side will be. Raises ValueError with a sentence."""
        return self._side(choice, changes).settings

    def cancel(self, job: Comparison | None) -> Any:
        if job is None or job.over:
            return sentence(texts.NOTHING_COMPARED)
        job.cancel()
        return sentence(texts.STOPPING)

    def choose(self, seed: str, job: Comparison | None) -> Any:
        """Show the images of another seed."""
        if job is not None:
            for pair in job.pairs:
                if seed == seed_label(pair.seed):
                    return images_html(pair, job.request.sides)
        return UNCHANGED

    def save(self, job: Comparison | None) -> tuple[str, Any]:
        """Write the report, and offer what was written."""
        if job is None or not job.pairs:
            return sentence(texts.NOTHING_TO_SAVE, wrong=True), NO_FILES
        try:
            page, *images = save(job.request, job.pairs, report(self.facts()), self.folder())
        except OSError as error:
            log.warning("The comparison could not be saved: %s", error)
            return sentence(texts.not_saved(error.strerror), wrong=True), NO_FILES
        told = sentence(texts.saved(f"{page.parent.name}/{page.name}", len(images)))
        return told, gr.update(value=[str(page), *map(str, images)], visible=True)

    # --- the consistency report -----------------------------------------------------------------------------------

    def report(self) -> str:
        return report(self.facts())

    def differences(self, text: str) -> str:
        """What another machine's report has otherwise."""
        if not str(text or "").strip():
            return ""
        try:
            theirs = parse(text)
        except ValueError as problem:
            return sentence(str(problem), wrong=True)
        found = differences(self.facts(), theirs)
        if not found:
            return sentence(texts.NOTHING_DIFFERS)
        return sentence(texts.facts_differ(len(found))) + "".join(
            f'<h4 class="onediff-rank">{title}</h4><ul class="onediff-differing">{lines_html(lines)}</ul>'
            for rank, title in enumerate(texts.RANKS) if (lines := [line.text for line in found if line.rank == rank])
        )


def lines_html(lines: list[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def seed_label(seed: int) -> str:
    return f"Seed {seed}"


def nothing_to_choose() -> Any:
    return gr.update(choices=[], value=None, visible=False)


def seeds_to_choose(job: Comparison, first: bool) -> Any:
    labels = [seed_label(pair.seed) for pair in job.pairs]
    return gr.update(choices=labels, visible=len(labels) > 1, **({"value": labels[0]} if first else {}))


def progress_html(job: Comparison) -> str:
    """A bar, and what is being done."""
    share, what = job.progress()
    percent = round(100 * share)
    return (
        f'<div class="onediff-jobs"><div class="onediff-job">{bar_html(percent, "Comparing")}'
        f"<span>{percent} %, {html.escape(what)}</span></div></div>"
    )


def outcome_html(job: Comparison) -> str:
    """What came of a comparison that is over."""
    if job.state == FAILED:
        return sentence(job.problem, wrong=True)
    if job.state == CANCELLED:
        return sentence(texts.STOPPED_EARLY if job.pairs else texts.STOPPED)
    return ""
