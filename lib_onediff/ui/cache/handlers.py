"""What the OneDiff tab does when somebody uses it. No handler waits for an image that is being made."""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

import gradio as gr

from ...prewarm.job import QUEUED, TOKENS, Job, rows_with_jobs
from ...prewarm.presets import FAMILIES, SizePreset, families_for
from ...prewarm.worker import WarmUp
from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ...shapes.sizes import Size, parse_sizes
from ...store.store import NotKept
from .. import texts
from ..events import UNCHANGED
from ..progress import jobs_html, outcome_of, sentence
from . import purge as cache_purge
from .page import Page, read_keys, read_message
from .purge import Chore, Exclusively, Purge
from .table import ALL_MODELS, ROWS_AT_FIRST, models_of, resolution_and_model, selected, table_html
from .totals import chart_html, totals_html

SOURCE = "panel"
# How long a request waits for what it has begun; what takes longer is told later.
SECONDS_FOR_A_CHORE = 1.0
# The components that show what is so, in the order of the tab's outputs; the rows of presets follow.
PARTS = ("totals", "jobs", "families", "models", "table", "more", "question", "confirm", "chart")
Shown = tuple[Any, ...]


class Panel:
    """The handlers of one page's tab.

    Each ends with the argument page, what the server keeps of the page (see for_page); it returns the value of every
    component in the order of the tab's outputs.
    """

    def __init__(self, runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
        """exclusively: runs work while the WebUI makes no image."""
        self.runtime = runtime
        self.warmup = warmup
        self.exclusively = exclusively
        # Numbers of the answers of all pages.
        self._turns = itertools.count(1)
        self._answering = threading.Lock()

    # --- the pre-warm queue ---------------------------------------------------------------------------------------

    def prewarm(self, text: str, batch: Any, tokens: Any, page: Page) -> Shown:
        """Queue the sizes that were typed."""
        return self._queue(lambda: parse_sizes(text or ""), batch, tokens, page)

    def preset(self, preset: SizePreset) -> Callable[..., Shown]:
        """A handler that queues the sizes of a preset."""

        return lambda batch, tokens, page: self._queue(lambda: preset.sizes, batch, tokens, page)

    def _queue(self, asked: Callable[[], Collection[Size]], batch: Any, tokens: Any, page: Page) -> Shown:
        """Queue sizes, those without a number of images of their own with this one."""
        try:
            sizes, batch_size = asked(), whole_number(1 if batch is None else batch, "The batch size")
            if not sizes:
                raise ValueError(texts.TYPE_A_SIZE)
            wanted = [Size(size.width, size.height, batch_size) if size.batch == 1 else size for size in sizes]
            page.follow(self.warmup.add(wanted, SOURCE, tokens=whole_number(tokens or TOKENS, "The number of tokens")))
            told = sentence(texts.in_queue(len(wanted)))
        except ValueError as problem:
            told = sentence(str(problem), wrong=True)
        return self._answer(page, told)

    def other_families(self, page: Page) -> Shown:
        """Show the usual sizes of other models too, or no longer."""
        page.all_families = not page.all_families
        return self._answer(page)

    def cancel_all(self, page: Page) -> Shown:
        cancelled = self.warmup.stop()
        page.busy = False
        return self._answer(page, sentence(texts.cancelled(cancelled)))

    def _change_job(self, action: str, job_id: int) -> None:
        waiting = [job.id for job in self.warmup.jobs() if job.state == QUEUED]
        if action == "cancel":
            self.warmup.cancel(job_id)
        elif job_id in waiting and action in ("earlier", "later"):
            self.warmup.move(job_id, waiting.index(job_id) + (-1 if action == "earlier" else 1))

    # --- the table ------------------------------------------------------------------------------------------------

    def look(self, page: Page) -> Shown:
        return self._answer(page)

    def more(self, page: Page) -> Shown:
        page.limit += ROWS_AT_FIRST
        return self._answer(page)

    def pin(self, pinned: bool) -> Callable[..., Shown]:
        """A handler that pins the selected rows, or no longer."""

        def set_pins(keys: str, page: Page) -> Shown:
            rows = [resolution_and_model(key) for key in read_keys(keys)]
            if not rows:
                return self._answer(page, below=choose_first())
            try:
                known = sum(self.runtime.pin(*row, pinned) for row in rows)
            except NotKept as problem:
                return self._answer(page, below=sentence(str(problem), wrong=True))
            return self._answer(page, below=sentence(texts.pinned(known, pinned)))

        return set_pins

    def ask_selected(self, keys: str, page: Page) -> Shown:
        chosen = read_keys(keys)
        if not chosen:
            return self._answer(page, below=choose_first())
        return self._ask(cache_purge.purge_of_rows(self.runtime, chosen), page)

    def ask_model(self, page: Page) -> Shown:
        known = models_of(self.runtime.rows())[1:]
        model = page.model if page.model in known else known[0] if len(known) == 1 else None
        if model is None:
            told = texts.CHOOSE_MODEL if known else texts.NOTHING_TO_PURGE
            return self._answer(page, below=sentence(told, wrong=True))
        return self._ask(cache_purge.purge_of_model(self.runtime, model), page)

    def ask_all(self, page: Page) -> Shown:
        if not self.runtime.rows():
            return self._answer(page, below=sentence(texts.NOTHING_TO_PURGE))
        return self._ask(cache_purge.purge_of_all(self.runtime), page)

    def ask_disk(self, page: Page) -> Shown:
        return self._ask(cache_purge.purge_of_disk(self.runtime), page)

    def _ask(self, purge: Purge, page: Page) -> Shown:
        page.purge = purge
        return self._answer(page, below="")

    def confirm(self, page: Page) -> Shown:
        purge, page.purge = page.purge, None
        if purge is None:
            return self._answer(page)
        return self._begin(Chore(purge.doing, self.exclusively, purge.work), page)

    def keep(self, page: Page) -> Shown:
        page.purge = None
        return self._answer(page, below=sentence(texts.NOTHING_PURGED))

    def release(self, page: Page) -> Shown:
        work = lambda: texts.released(self.runtime.release_memory())  # noqa: E731
        return self._begin(Chore("Releasing memory", self.exclusively, work), page)

    def _begin(self, chore: Chore, page: Page) -> Shown:
        page.chore = chore
        waiting = sentence(texts.waits(chore.name))
        return self._answer(page, below=UNCHANGED if chore.told(SECONDS_FOR_A_CHORE) else waiting)

    # --- the answer -----------------------------------------------------------------------------------------------

    def tick(self, message: str, page: Page) -> Shown:
        """What javascript/onediff.js asks while the tab can be seen: do this, and tell me what is new."""
        page, asked = page or Page(), read_message(message)
        if asked.turn != page.turn:
            # Of two answers at a time the older one may come last, and any may be lost: the page shows what was so.
            page.shown.clear()
        if asked.number != page.answered:
            for action in asked.actions:
                self._change_job(*action)
        page.answered = asked.number
        return self._answer(page)

    def _answer(self, page: Page, told: Any = UNCHANGED, below: Any = UNCHANGED) -> Shown:
        """told, below: the sentences under the pre-warm controls and under the table."""
        # What was said of a click before this one is over.
        if told is not UNCHANGED and below is UNCHANGED:
            below = ""
        elif below is not UNCHANGED and told is UNCHANGED and not page.busy:
            told = ""
        jobs = page.jobs(self.warmup.jobs())
        pending, something_else = any(job.pending for job in jobs), told is not UNCHANGED
        if page.busy and jobs and not pending and not something_else:
            told = sentence(outcome_of(jobs))
        page.busy = pending or (page.busy and something_else)
        chore_told = page.chore.told() if page.chore else None
        if page.chore and chore_told is not None:
            below, page.chore = sentence(chore_told, wrong=page.chore.failed), None
        parts = self._parts(page, jobs)
        with self._answering:
            changes = page.changes(parts)
            page.turn = next(self._turns)
            beat = beat_html(page)
        return (beat, told, below, *changes, page)

    def _parts(self, page: Page, jobs: list[Job]) -> dict[str, Any]:
        """The value of every component that shows what is so."""
        known = self.runtime.rows()
        rows = rows_with_jobs(known, jobs, self.warmup.model)
        models = models_of(rows)
        model = page.model if page.model in models else ALL_MODELS
        shown = selected(rows, model, page.order)
        own = families_for(self.warmup.model)
        families = FAMILIES if page.all_families else own
        word = texts.FEWER_FAMILIES if page.all_families else texts.MORE_FAMILIES
        return {
            "totals": totals_html(self.runtime.totals(), known, jobs),
            "jobs": jobs_html(jobs, controls=True),
            "families": gr.update(value=word, visible=own != FAMILIES),
            "models": gr.update(choices=models, value=model),
            "table": table_html(shown, page.limit),
            "more": more_button(shown, page.limit),
            "question": sentence(page.purge.question) if page.purge else "",
            "confirm": gr.update(visible=page.purge is not None),
            "chart": chart_html(shown),
            **{family.name: gr.update(visible=family in families) for family in FAMILIES},
        }


def for_page(handler: Callable[..., Shown]) -> Callable[..., Shown]:
    """A handler as gradio calls it: its last three values are those of the two lists above the table, and the page,
    None at first."""

    def call(*values: Any) -> Shown:
        *own, model, order, page = values
        page = page or Page()
        page.model, page.order = model, order
        return handler(*own, page)

    return call


def whole_number(value: Any, name: str) -> int:
    """A number that somebody has typed or chosen. Raises ValueError with a sentence."""
    try:
        number = float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(texts.wrong_number(name, value, "a whole number"))


def choose_first() -> str:
    return sentence(texts.SELECT_FIRST, wrong=True)


def more_button(rows: list[ResolutionRow], limit: int) -> Any:
    hidden = max(0, len(rows) - limit)
    return gr.update(visible=hidden > 0, value=f"Show {min(hidden, ROWS_AT_FIRST)} of {hidden} more")


def beat_html(page: Page) -> str:
    """Tells javascript/onediff.js which answer this is, to which message, and whether there will soon be more."""
    busy = "true" if page.busy or page.chore else "false"
    return (
        f'<span data-onediff-beat="{page.answered}" data-onediff-turn="{page.turn}" data-onediff-busy="{busy}"></span>'
    )
