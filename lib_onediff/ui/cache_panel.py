"""The OneDiff tab: which resolutions are ready, and buttons to make them ready or to throw them away."""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import gradio as gr

from ..accelerator import Accelerator
from ..shapes.rows import ResolutionRow
from ..shapes.sizes import Size, parse_sizes
from ..shapes.warmup import CANCELLED, DONE, FAILED, Job, WarmUp, first_line
from .amounts import MEBIBYTE, counted, memory
from .cache_table import table_html, totals_html
from .events import LIVE, QUIET, kept_out_of_defaults
from .progress import jobs_html, sentence, watch
from .stream import UNCHANGED, show_stream

TITLE, ELEM_ID = "OneDiff", "onediff"
SOURCE = "panel"
PLACEHOLDER = "1024x1024, 832x1216 x2"
log = logging.getLogger("onediff")


def build_cache_tab(runtime: Accelerator, warmup: WarmUp) -> gr.Blocks:
    """The tab's content, for on_ui_tabs: (build_cache_tab(...), TITLE, ELEM_ID)."""
    with gr.Blocks(analytics_enabled=False) as tab, gr.Column(elem_id="onediff_cache"):
        totals = gr.HTML(elem_id="onediff_cache_totals", elem_classes=LIVE)
        with gr.Row(elem_classes="onediff-controls"):
            sizes = kept_out_of_defaults(gr.Textbox(
                label="Sizes to pre-warm", placeholder=PLACEHOLDER, elem_id="onediff_prewarm_sizes", scale=4,
                min_width=220,
            ))
            prewarm = a_button("Pre-warm", "onediff_prewarm", variant="primary")
            cancel = a_button("Cancel", "onediff_prewarm_cancel")
        result = gr.HTML(elem_id="onediff_cache_result", elem_classes=LIVE)
        jobs = gr.HTML(elem_id="onediff_cache_jobs", elem_classes=LIVE)
        table = gr.HTML(elem_id="onediff_cache_table", elem_classes=LIVE)
        with gr.Row(elem_classes="onediff-controls"):
            chosen = kept_out_of_defaults(gr.Dropdown(
                choices=[], value=[], multiselect=True, label="Resolutions to purge", elem_id="onediff_purge_chosen",
                scale=4, min_width=220,
            ))
            purge = a_button("Purge selected", "onediff_purge")
            purge_all = a_button("Purge all", "onediff_purge_all", variant="stop")
            refresh = a_button("Refresh", "onediff_cache_refresh")

        panel = Panel(runtime, warmup)
        view = [totals, table, chosen]
        asked = [
            ask(panel.prewarm, inputs=[sizes], outputs=[result], queue=False, **QUIET).then
            for ask in (prewarm.click, sizes.submit)
        ]
        show_stream(asked, panel.follow, inputs=[sizes], outputs=[result, jobs, *view])
        cancel.click(panel.cancel, inputs=[], outputs=[result], queue=False, **QUIET)
        purge.click(panel.purge, inputs=[chosen], outputs=[result, *view], queue=False, **QUIET)
        purge_all.click(panel.purge_all, inputs=[], outputs=[result, *view], queue=False, **QUIET)
        looked = refresh.click(panel.look, inputs=[], outputs=[result, *view], queue=False, **QUIET)
        show_stream([looked.then], panel.follow, inputs=[], outputs=[result, jobs, *view])
        tab.load(panel.look, inputs=[], outputs=[result, *view], queue=False, **QUIET)
    return tab


def a_button(text: str, elem_id: str, variant: str = "secondary") -> gr.Button:
    return kept_out_of_defaults(gr.Button(text, elem_id=elem_id, variant=variant, scale=1, min_width=110))


class Panel:
    """The handlers. None of them waits for the host's queue; what takes long runs in the pre-warm queue's thread."""

    def __init__(self, runtime: Accelerator, warmup: WarmUp) -> None:
        self.runtime = runtime
        self.warmup = warmup

    def prewarm(self, text: str) -> str:
        """Queue the sizes that were typed; the sentence to show."""
        try:
            sizes = parse_sizes(text or "")
        except ValueError as problem:
            return sentence(str(problem), wrong=True)
        if not sizes:
            return sentence("Type at least one size, for example 512x512.", wrong=True)
        self.warmup.add(sizes, SOURCE)
        return sentence(f"{counted(len(sizes), 'size')} in the queue.")

    def cancel(self) -> str:
        cancelled = self.warmup.stop()
        return sentence(f"{counted(cancelled, 'size')} cancelled." if cancelled else "Nothing is being pre-warmed.")

    def follow(self, text: str = "") -> Iterator[tuple[Any, ...]]:
        """Show the queue until it is empty and then what came of it, and the table whenever it has changed."""
        shown: tuple[Any, ...] = ()
        for jobs in watch(self.warmup, usable_sizes(text)):
            view = self.view()
            over = jobs and not any(job.pending for job in jobs)
            outcome = sentence(outcome_of(jobs)) if over else UNCHANGED
            yield outcome, jobs_html(jobs), *(view if view != shown else (UNCHANGED,) * len(view))
            shown = view

    def look(self) -> tuple[Any, ...]:
        return "", *self.view()

    def purge(self, chosen: list[str] | None) -> tuple[Any, ...]:
        if not chosen:
            return sentence("Choose at least one resolution first.", wrong=True), *self.view()
        return self.forget(chosen)

    def purge_all(self) -> tuple[Any, ...]:
        return self.forget(None)

    def forget(self, resolutions: list[str] | None) -> tuple[Any, ...]:
        """Purge these resolutions, or all; the sentence and what the table looks like afterwards."""
        doomed = [row for row in self.runtime.rows() if resolutions is None or row.resolution in resolutions]
        try:
            freed = self.runtime.purge(resolutions)
        except RuntimeError as error:
            log.exception("purging failed")
            return sentence(f"Purging failed: {first_line(error)}.", wrong=True), *self.view()
        return sentence(purged(doomed, freed)), *self.view(selected=[])

    def view(self, selected: list[str] | None = None) -> tuple[Any, ...]:
        """What to show in the totals, the table and the list of resolutions."""
        rows = self.runtime.rows()
        budget = self.runtime.settings.memory_budget * MEBIBYTE
        choices = list(dict.fromkeys(row.resolution for row in rows))
        selection = {} if selected is None else {"value": selected}
        return (
            totals_html(rows, self.runtime.status()["calls"], budget), table_html(rows),
            gr.update(choices=choices, **selection),
        )


def usable_sizes(text: str) -> list[Size]:
    """The sizes that were typed; none where prewarm has refused them."""
    try:
        return parse_sizes(text or "")
    except ValueError:
        return []


def outcome_of(jobs: list[Job]) -> str:
    """What came of jobs that are over."""
    states = Counter(job.state for job in jobs)
    parts = [f"{counted(states[DONE], 'size')} warmed up", f"{states[FAILED]} failed", f"{states[CANCELLED]} cancelled"]
    return ", ".join(part for part, state in zip(parts, (DONE, FAILED, CANCELLED), strict=True) if states[state]) + "."


def purged(doomed: list[ResolutionRow], freed: int) -> str:
    """What a purge has done."""
    if not doomed:
        return "There was nothing to purge."
    forgotten = f"{counted(len({row.resolution for row in doomed}), 'resolution')} forgotten"
    held = sum(row.bytes for row in doomed)
    if not held and not freed:
        return f"{forgotten}; no graph memory was held."
    if not freed:
        return f"{forgotten}; graphs share their memory, and these {memory(held)} come back with the last of them."
    return f"{forgotten}, freed {memory(freed)}."
