"""The Cache page: which resolutions are ready, and buttons to pre-warm or purge them.

javascript/onediff.js asks for what is new while the page can be seen, by a click on a hidden button: gradio 3 has no
timers. No handler waits for an image that is being made.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gradio as gr

from ...options.sizes import Size, parse_sizes
from ...prewarm.job import QUEUED, TOKEN_CHOICES, TOKENS, rows_with_jobs
from ...prewarm.presets import FAMILIES, SizePreset, families_for
from ...prewarm.worker import WarmUp
from ...runtime.runtime import Runtime
from ...store.store import NotKept
from .. import texts
from ..events import (
    ACTIONS,
    CONTROLS,
    DANGER,
    HIDDEN,
    QUIET,
    UNCHANGED,
    a_button,
    a_list,
    a_text,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    markup,
    nothing_seen,
)
from ..progress import jobs_html, sentence, whole_number
from . import purge as cache_purge
from .purge import Chore, Exclusively, Purge
from .table import ALL_MODELS, ORDERS, USUAL_ORDER, legend_html, models_of, resolution_and_model, selected, table_html
from .totals import chart_html, totals_html

SOURCE = "panel"
# How long a request waits for what it has begun; the page hears later of what takes longer.
SECONDS_FOR_A_CHORE = 1.0
PLACEHOLDER = "1024x1024, 832x1216 x2"
# What a page waits for: a purge that the user has not confirmed, or work that is not over.
Waiting = Purge | Chore | None
# The sentence below the pre-warm controls, the one below the table, and what the page waits for.
Answer = tuple[Any, Any, Waiting]


class Panel:
    """The handlers of the page. Each takes what its page waits for as the last argument."""

    def __init__(self, runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
        """exclusively: runs work while the WebUI makes no image."""
        self.runtime, self.warmup, self.exclusively = runtime, warmup, exclusively

    # --- the pre-warm queue ---------------------------------------------------------------------------------------

    def prewarm(self, text: str, batch: Any, tokens: Any, waiting: Waiting) -> Answer:
        """Queue the sizes that were typed."""
        try:
            sizes = parse_sizes(text or "")
            if not sizes:
                raise ValueError(texts.TYPE_A_SIZE)
            self._queue(sizes, batch, tokens)
        except ValueError as problem:
            return sentence(str(problem), wrong=True), "", waiting
        return "", "", waiting

    def preset(self, preset: SizePreset) -> Callable[..., Answer]:
        """A handler that queues the sizes of a preset."""
        return lambda batch, tokens, waiting: self.prewarm(", ".join(map(str, preset.sizes)), batch, tokens, waiting)

    def _queue(self, sizes: list[Size], batch: Any, tokens: Any) -> None:
        """Queue sizes; batch is for those without a number of images of their own."""
        images = whole_number(1 if batch is None else batch, "The batch size")
        wanted = [Size(size.width, size.height, images) if size.batch == 1 else size for size in sizes]
        self.warmup.add(wanted, SOURCE, tokens=whole_number(tokens or TOKENS, "The number of tokens"))

    def cancel_all(self, waiting: Waiting) -> Answer:
        return sentence(texts.cancelled(self.warmup.stop())), "", waiting

    def change_jobs(self, message: Any) -> None:
        """Do what the buttons beside the jobs ask for: JSON such as [["cancel", 5]]."""
        try:
            actions = [(str(action), int(job_id)) for action, job_id in json.loads(message)]
        except (TypeError, ValueError, OverflowError):
            return
        for action, job_id in actions:
            queue = [job.id for job in self.warmup.jobs() if job.state == QUEUED]
            if action == "cancel":
                self.warmup.cancel(job_id)
            elif job_id in queue and action in ("earlier", "later"):
                self.warmup.move(job_id, queue.index(job_id) + (-1 if action == "earlier" else 1))

    # --- the table ------------------------------------------------------------------------------------------------

    def pin(self, pinned: bool) -> Callable[..., Answer]:
        """A handler that pins the selected rows, or no longer."""

        def set_pins(keys: Any, waiting: Waiting) -> Answer:
            rows = [resolution_and_model(key) for key in read_keys(keys)]
            if not rows:
                return "", sentence(texts.SELECT_FIRST, wrong=True), waiting
            try:
                known = sum(self.runtime.pin(*row, pinned) for row in rows)
            except NotKept as problem:
                return "", sentence(str(problem), wrong=True), waiting
            return "", sentence(texts.pinned(known, pinned)), waiting

        return set_pins

    def ask_selected(self, keys: Any, waiting: Waiting) -> Answer:
        chosen = read_keys(keys)
        if not chosen:
            return "", sentence(texts.SELECT_FIRST, wrong=True), waiting
        return "", "", cache_purge.purge_of_rows(self.runtime, chosen)

    def ask_model(self, model: str, waiting: Waiting) -> Answer:
        known = models_of(self.runtime.rows())[1:]
        chosen = model if model in known else known[0] if len(known) == 1 else None
        if chosen is None:
            return "", sentence(texts.CHOOSE_MODEL if known else texts.NOTHING_TO_PURGE, wrong=True), waiting
        return "", "", cache_purge.purge_of_model(self.runtime, chosen)

    def ask_all(self, waiting: Waiting) -> Answer:
        if not self.runtime.rows():
            return "", sentence(texts.NOTHING_TO_PURGE), waiting
        return "", "", cache_purge.purge_of_all(self.runtime)

    def ask_disk(self, waiting: Waiting) -> Answer:
        return "", "", cache_purge.purge_of_disk(self.runtime)

    def confirm(self, waiting: Waiting) -> Answer:
        if not isinstance(waiting, Purge):
            return "", UNCHANGED, waiting
        return self._begin(Chore(waiting.doing, self.exclusively, waiting.work))

    def keep(self, waiting: Waiting) -> Answer:
        return "", sentence(texts.NOTHING_PURGED), None

    def release(self, waiting: Waiting) -> Answer:
        work = lambda: texts.released(self.runtime.release_memory())  # noqa: E731
        return self._begin(Chore("Releasing memory", self.exclusively, work))

    @staticmethod
    def _begin(chore: Chore) -> Answer:
        outcome = chore.outcome(SECONDS_FOR_A_CHORE)
        if outcome is None:
            return "", sentence(texts.waits(chore.name)), chore
        return "", sentence(outcome, wrong=chore.failed), None

    # --- what the page shows --------------------------------------------------------------------------------------

    def view(self, message: Any, model: str, order: str, every_family: bool, waiting: Waiting) -> tuple[Any, ...]:
        """The value of every component that shows what is so; gradio draws what has changed. message: see change_jobs.
        """
        self.change_jobs(message)
        outcome = waiting.outcome() if isinstance(waiting, Chore) else None
        below: Any = UNCHANGED
        if isinstance(waiting, Chore) and outcome is not None:
            below, waiting = sentence(outcome, wrong=waiting.failed), None
        known, jobs = self.runtime.rows(), self.warmup.jobs()
        rows = rows_with_jobs(known, jobs, self.warmup.model)
        models = models_of(rows)
        model = model if model in models else ALL_MODELS
        shown = selected(rows, model, order)
        asks = isinstance(waiting, Purge)
        families = FAMILIES if every_family else families_for(self.warmup.model)
        return (
            below, waiting, totals_html(self.runtime.totals(), known, jobs), jobs_html(jobs, controls=True),
            gr.update(choices=models, value=model), table_html(shown), chart_html(shown),
            sentence(waiting.question) if isinstance(waiting, Purge) else "", gr.update(visible=asks),
            *(gr.update(visible=family in families) for family in FAMILIES),
        )


def read_keys(text: Any) -> list[str]:
    """The rows that a page has selected, as it names them; none for what is no list of names."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return []
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def build_cache_tab(runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
    """The page, inside the gradio context that is open. exclusively: runs work while the WebUI makes no image."""
    panel = Panel(runtime, warmup, exclusively)
    with gr.Column(elem_id="onediff_cache"):
        waiting, keys, message = gr.State(None), nothing_seen(), nothing_seen()
        look = a_button("", "look", elem_classes=HIDDEN)
        totals = markup("cache_totals")
        with gr.Row(elem_classes="onediff-halves"):
            with gr.Column(min_width=320, scale=3):
                gr.HTML(f"<h3>{texts.PREWARM_SIZES}</h3>")
                rows, presets = build_presets()
                every_family = kept_out_of_defaults(gr.Checkbox(
                    False, label=texts.EVERY_FAMILY, elem_id="onediff_families", container=False,
                ))
                with gr.Row(elem_classes=CONTROLS):
                    sizes = a_text("Sizes", "prewarm_sizes", placeholder=PLACEHOLDER, scale=4, min_width=200)
                    batch = kept_out_of_defaults(gr.Number(
                        1, label="Batch size", precision=0, elem_id="onediff_prewarm_batch", scale=1, min_width=100,
                    ))
                    counts = [str(count) for count in TOKEN_CHOICES]
                    tokens = a_list("Prompt tokens", counts, counts[0], "tokens")
                with gr.Row(elem_classes=ACTIONS):
                    prewarm = a_button("Pre-warm", "prewarm", variant="primary")
                    cancel = a_button("Cancel all", "prewarm_cancel")
                told, jobs = markup("cache_result"), markup("cache_jobs")
            with gr.Column(min_width=320, scale=2):
                chart = markup("cache_chart")
        gr.HTML("<h3>Resolutions</h3>")
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            model = a_list("Model", [ALL_MODELS], ALL_MODELS, "model")
            order = a_list("Sorted by", list(ORDERS), USUAL_ORDER, "order")
        table = markup("cache_table")
        with gr.Row(elem_classes=ACTIONS):
            # javascript/onediff.js disables the buttons that have nothing to work on.
            pin, unpin = a_button("Pin selected", "pin"), a_button("Unpin selected", "unpin")
            release = a_button("Release memory", "release")
        with gr.Row(elem_classes=[*ACTIONS, "onediff-dangers"]):
            purge, purge_model, purge_all, purge_disk = (
                a_button(text, name, elem_classes=DANGER) for text, name in (
                    ("Purge selected", "purge"), ("Purge model", "purge_model"), ("Purge all", "purge_all"),
                    ("Purge disk", "purge_disk"),
                )
            )
        with gr.Row(elem_classes=[*ACTIONS, "onediff-confirm"], elem_id="onediff_confirm", visible=False) as asking:
            question = markup("cache_question")
            confirm, keep = a_button("Confirm", "purge_confirm", variant="stop"), a_button("Keep", "purge_keep")
        below = markup("cache_outcome")
        gr.HTML(legend_html())

    shown = {
        "inputs": [message, model, order, every_family, waiting], "queue": False, **QUIET,
        "outputs": [below, waiting, totals, jobs, model, table, chart, question, asking, *rows],
        **in_the_browser("(...values) => [window.onediff.actions(), ...values.slice(1, 5)]"),
    }
    for event in (look.click, model.input, order.input, every_family.input):
        event(panel.view, **shown)

    def on(event: Callable[..., Any], handler: Callable[..., Answer], *own: Any) -> None:
        """Have an event do something, and show what is so then."""
        values = [*own, waiting]
        script = f"(...values) => [window.onediff.selected(), ...values.slice(1, {len(values)})]"
        done = event(handler, inputs=values, outputs=[told, below, waiting], queue=False, **QUIET,
                     **(in_the_browser(script) if keys in own else {}))
        done.then(panel.view, **shown)

    for asked in (prewarm.click, sizes.submit):
        on(asked, panel.prewarm, sizes, batch, tokens)
    for button, preset in presets:
        on(button.click, panel.preset(preset), batch, tokens)
    on(cancel.click, panel.cancel_all)
    on(pin.click, panel.pin(True), keys)
    on(unpin.click, panel.pin(False), keys)
    on(release.click, panel.release)
    on(purge.click, panel.ask_selected, keys)
    on(purge_model.click, panel.ask_model, model)
    on(purge_all.click, panel.ask_all)
    on(purge_disk.click, panel.ask_disk)
    on(confirm.click, panel.confirm)
    on(keep.click, panel.keep)
    forget_when_changed([sizes, batch], told)


def build_presets() -> tuple[list[Any], list[tuple[Any, SizePreset]]]:
    """A row of buttons for each kind of model; the rows, and each button with its sizes."""
    rows, buttons = [], []
    for family in FAMILIES:
        with gr.Row(elem_classes="onediff-presets", elem_id=f"onediff_presets_{family.model}") as row:
            gr.HTML(f"<b>{family.name}</b>")
            for number, preset in enumerate(family.presets):
                button = a_button(preset.label, f"preset_{family.model}_{number}", size="sm", min_width=20)
                buttons.append((button, preset))
        rows.append(row)
    return rows, buttons
