"""What the OneDiff tab does when somebody uses it. No handler waits for a picture that is being made."""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

import gradio as gr

from ...prewarm.job import QUEUED, TOKENS, Job, rows_with_jobs
from ...prewarm.presets import FAMILIES, Preset, families_for
from ...prewarm.worker import WarmUp
from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ...shapes.sizes import Size, parse_sizes
from ..amounts import counted, memory
from ..chores import Chore
from ..progress import jobs_html, outcome_of, sentence
from ..stream import UNCHANGED
from . import purge as cache_purge
from .chart import chart_html
from .page import Page, read_keys, read_message
from .purge import Purge
from .table import ROWS_AT_FIRST, resolution_and_model, table_html
from .totals import totals_html
from .view import ALL_MODELS, models_of, selected

SOURCE = "panel"
# How long a request waits for what it has begun; what takes longer is told later.
SECONDS_FOR_A_CHORE = 1.0
# The components that show what is so, in the order of the tab's outputs; the rows of presets follow.
PARTS = ("totals", "jobs", "models", "table", "more", "question", "confirm", "chart")
Shown = tuple[Any, ...]
Exclusively = Callable[[Callable[[], str]], str]


class Panel:
    """The handlers of one page's tab.

    Each ends with the arguments model and order, what the two lists above the table show, and page, what the server
    keeps of the page; it returns the value of every component in the order of the tab's outputs.
    """

    def __init__(self, runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
        """exclusively: runs work while the WebUI makes no picture."""
        self.runtime = runtime
        self.warmup = warmup
        self.exclusively = exclusively
        # Numbers of the answers of all pages.
        self._turns = itertools.count(1)
        self._answering = threading.Lock()

    # --- the pre-warm queue ---------------------------------------------------------------------------------------

    def prewarm(self, text: str, batch: Any, tokens: Any, model: str, order: str, page: Page | None) -> Shown:
        """Queue the sizes that were typed."""
        page = page or Page()
        try:
            sizes = parse_sizes(text or "")
            if not sizes:
                raise ValueError("Type at least one size, for example 512x512.")
            told = self._queue(sizes, batch, tokens, page)
        except ValueError as problem:
            told = sentence(str(problem), wrong=True)
        return self._answer(model, order, page, told)

    def preset(self, preset: Preset) -> Callable[..., Shown]:
        """A handler that queues the sizes of a preset."""

        def queue(batch: Any, tokens: Any, model: str, order: str, page: Page | None) -> Shown:
            page = page or Page()
            try:
                told = self._queue(preset.sizes, batch, tokens, page)
            except ValueError as problem:
                told = sentence(str(problem), wrong=True)
            return self._answer(model, order, page, told)

        return queue

    def _queue(self, sizes: Collection[Size], batch: Any, tokens: Any, page: Page) -> str:
        """Queue sizes, those without a number of pictures of their own with this one. Raises ValueError."""
        pictures = whole_number(1 if batch is None else batch, "The batch size")
        wanted = [Size(size.width, size.height, pictures) if size.batch == 1 else size for size in sizes]
        page.follow(self.warmup.add(wanted, SOURCE, tokens=whole_number(tokens or TOKENS, "The number of tokens")))
        return sentence(f"{counted(len(wanted), 'size')} in the queue.")

    def cancel_all(self, model: str, order: str, page: Page | None) -> Shown:
        page = page or Page()
        cancelled = self.warmup.stop()
        page.busy = False
        told = f"{counted(cancelled, 'size')} cancelled." if cancelled else "Nothing is being pre-warmed."
        return self._answer(model, order, page, sentence(told))

    def _change_job(self, action: str, job_id: int) -> None:
        waiting = [job.id for job in self.warmup.jobs() if job.state == QUEUED]
        if action == "cancel":
            self.warmup.cancel(job_id)
        elif job_id in waiting and action in ("earlier", "later"):
            self.warmup.move(job_id, waiting.index(job_id) + (-1 if action == "earlier" else 1))

    # --- the table ------------------------------------------------------------------------------------------------

    def look(self, model: str, order: str, page: Page | None) -> Shown:
        return self._answer(model, order, page)

    def more(self, model: str, order: str, page: Page | None) -> Shown:
        page = page or Page()
        page.limit += ROWS_AT_FIRST
        return self._answer(model, order, page)

    def pin(self, pinned: bool) -> Callable[..., Shown]:
        """A handler that pins the selected rows, or no longer."""

        def set_pins(keys: str, model: str, order: str, page: Page | None) -> Shown:
            rows = [resolution_and_model(key) for key in read_keys(keys)]
            if not rows:
                return self._answer(model, order, page, below=choose_first())
            known = sum(self.runtime.pin(*row, pinned) for row in rows)
            done = f"{counted(known, 'resolution')} {'pinned' if pinned else 'not pinned any more'}."
            return self._answer(model, order, page, below=sentence(done))

        return set_pins

    def ask_selected(self, keys: str, model: str, order: str, page: Page | None) -> Shown:
        chosen = read_keys(keys)
        if not chosen:
            return self._answer(model, order, page, below=choose_first())
        return self._ask(cache_purge.purge_of_rows(self.runtime, chosen), model, order, page)

    def ask_model(self, model: str, order: str, page: Page | None) -> Shown:
        known = models_of(self.runtime.rows())[1:]
        doomed = model if model in known else known[0] if len(known) == 1 else None
        if doomed is None:
            told = "Choose a model in the list above the table first." if known else "There is nothing to purge."
            return self._answer(model, order, page, below=sentence(told, wrong=True))
        return self._ask(cache_purge.purge_of_model(self.runtime, doomed), model, order, page)

    def ask_all(self, model: str, order: str, page: Page | None) -> Shown:
        if not self.runtime.rows():
            return self._answer(model, order, page, below=sentence("There is nothing to purge."))
        return self._ask(cache_purge.purge_of_all(self.runtime), model, order, page)

    def ask_disk(self, model: str, order: str, page: Page | None) -> Shown:
        return self._ask(cache_purge.purge_of_disk(self.runtime), model, order, page)

    def _ask(self, purge: Purge, model: str, order: str, page: Page | None) -> Shown:
        page = page or Page()
        page.purge = purge
        return self._answer(model, order, page, below="")

    def confirm(self, model: str, order: str, page: Page | None) -> Shown:
        page = page or Page()
        purge, page.purge = page.purge, None
        if purge is None:
            return self._answer(model, order, page)
        return self._begin(Chore(purge.doing, self.exclusively, purge.work), model, order, page)

    def keep(self, model: str, order: str, page: Page | None) -> Shown:
        page = page or Page()
        page.purge = None
        return self._answer(model, order, page, below=sentence("Nothing was purged."))

    def release(self, model: str, order: str, page: Page | None) -> Shown:
        def work() -> str:
            return f"Released {memory(self.runtime.release_memory())} of VRAM; each size is recorded anew when needed."

        return self._begin(Chore("Releasing memory", self.exclusively, work), model, order, page or Page())

    def _begin(self, chore: Chore, model: str, order: str, page: Page) -> Shown:
        page.chore = chore
        waiting = sentence(f"{chore.name} waits until no picture is being made.")
        return self._answer(model, order, page, below=UNCHANGED if chore.told(SECONDS_FOR_A_CHORE) else waiting)

    # --- the answer -----------------------------------------------------------------------------------------------

    def tick(self, message: str, model: str, order: str, page: Page | None) -> Shown:
        """What javascript/onediff.js asks while the tab can be seen: do this, and tell me what is new."""
        page, asked = page or Page(), read_message(message)
        if asked.turn != page.turn:
            # Of two answers at a time the older one may come last, and any may be lost: the page shows what was so.
            page.shown.clear()
        if asked.number != page.answered:
            for action in asked.actions:
                self._change_job(*action)
        page.answered = asked.number
        return self._answer(model, order, page)

    def _answer(
        self, model: str, order: str, page: Page | None, told: Any = UNCHANGED, below: Any = UNCHANGED
    ) -> Shown:
        """told, below: the sentences under the pre-warm controls and under the table."""
        page = page or Page()
        jobs = page.jobs(self.warmup.jobs())
        pending, something_else = any(job.pending for job in jobs), told is not UNCHANGED
        if page.busy and jobs and not pending and not something_else:
            told = sentence(outcome_of(jobs))
        page.busy = pending or (page.busy and something_else)
        chore_told = page.chore.told() if page.chore else None
        if page.chore and chore_told is not None:
            below, page.chore = sentence(chore_told, wrong=page.chore.failed), None
        parts = self._parts(model, order, page, jobs)
        with self._answering:
            changes = page.changes(parts)
            page.turn = next(self._turns)
            beat = beat_html(page)
        return (beat, told, below, *changes, page)

    def _parts(self, model: str, order: str, page: Page, jobs: list[Job]) -> dict[str, Any]:
        """The value of every component that shows what is so."""
        known = self.runtime.rows()
        rows = rows_with_jobs(known, jobs, self.warmup.model)
        models = models_of(rows)
        model = model if model in models else ALL_MODELS
        shown = selected(rows, model, order)
        families = families_for(self.warmup.model)
        return {
            "totals": totals_html(self.runtime.totals(), known, jobs),
            "jobs": jobs_html(jobs, controls=True),
            "models": gr.update(choices=models, value=model),
            "table": table_html(shown, page.limit),
            "more": more_button(shown, page.limit),
            "question": sentence(page.purge.question) if page.purge else "",
            "confirm": gr.update(visible=page.purge is not None),
            "chart": chart_html(shown),
            **{family.name: gr.update(visible=family in families) for family in FAMILIES},
        }


def whole_number(value: Any, name: str) -> int:
    """A number that somebody has typed or chosen. Raises ValueError with a sentence."""
    try:
        number = float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} must be a whole number.")


def choose_first() -> str:
    return sentence("Select at least one resolution in the table first.", wrong=True)


def more_button(rows: list[ResolutionRow], limit: int) -> Any:
    hidden = max(0, len(rows) - limit)
    return gr.update(visible=hidden > 0, value=f"Show {min(hidden, ROWS_AT_FIRST)} of {hidden} more")


def beat_html(page: Page) -> str:
    """Tells javascript/onediff.js which answer this is, to which message, and whether there will soon be more."""
    busy = "true" if page.busy or page.chore else "false"
    return (
        f'<span data-onediff-beat="{page.answered}" data-onediff-turn="{page.turn}" data-onediff-busy="{busy}"></span>'
    )


