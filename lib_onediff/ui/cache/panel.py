"""The Cache page: which resolutions are ready, and buttons to pre-warm or purge them.

While the page is visible, javascript/onediff.js asks for its current state by clicking a hidden button: gradio 3 has no
timers. No handler waits for an image in progress.
"""
from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import gradio as gr

from ...core.jobs import Exclusively, JobQueue
from ...core.refusal import NotKept
from ...core.sizes import PrewarmList, parse_prewarm, parse_size
from ...prewarm.worker import SizeJob, WarmUp, rows_with_jobs
from ...runtime.runtime import Runtime
from ..amounts import counted, memory
from ..chore import Chore
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
    browser_input,
    forget_when_changed,
    in_the_browser,
    live_html,
)
from ..jobs import carry_out, jobs_html, read_clicks
from ..markup import sentence
from .table import (
    ALL_MODELS,
    IN_TXT2IMG,
    MOST_USED,
    MUCH_SECONDS,
    estimate_words,
    has_gpu,
    key_of,
    legend_html,
    models_of,
    resolutions_html,
    selected,
    sizes_html,
    totals_html,
)

# Job.source of the jobs that this page queues.
SOURCE = "panel"
# A request waits at most this long for the work that it has begun. If the work takes longer, a later request shows its
# outcome.
SECONDS_FOR_A_CHORE = 1.0
# The number of most used sizes that the page offers.
MOST_YOURS = 4
# Messages on why nothing, or not everything, was done.
SELECT_FIRST = "Select at least one resolution in the table first."
NOTHING_PURGED = "Nothing was purged."
GONE = "The selected resolutions are no longer in the table: nothing was changed."
NONE_USED = "No size has been used with this model yet: make an image first, or type sizes."
NEWER_STAYS = "Files of a newer version of OneDiff in this folder were kept."
# The browser asks these before something is deleted; {} stands for the sizes.
PURGED = "Their graphs and their history on disk are deleted. The next image at such a size is checked again."
PURGE_SELECTED = f"Purge {{}}? {PURGED}"
PURGE_ALL = f"Purge all sizes of all models? {PURGED}"
PURGE_DISK = "Delete everything but pins in the cache folder? Sizes that are ready stay ready until the WebUI ends."
# JavaScript that returns the selected rows.
SELECTED = "window.onediff.selected()"


# The message below the pre-warm controls, the message below the table, each as markup ("" for none), and the work in
# progress whose outcome the page still has to show (None for none).
Answer = tuple[Any, Any, Chore | None]


class Panel:
    """The handlers of the page's buttons. The last argument of each handler, `waiting`, is the Answer's work from the
    handler before. A handler that begins no work returns it again; one that begins new work returns that in its place,
    and the outcome of the earlier work is not shown.

    runtime, warmup, queue: the runtime, the pre-warming and the list of jobs. exclusively: the adapter's
        WebUI.exclusively, which runs a function while no image is being made.
    """

    def __init__(self, runtime: Runtime, warmup: WarmUp, queue: JobQueue, exclusively: Exclusively) -> None:
        self.runtime = runtime
        self.warmup = warmup
        self.queue = queue
        self.exclusively = exclusively

    # --- the pre-warm queue ---------------------------------------------------------------------------------------

    def prewarm(self, text: str, waiting: Chore | None) -> Answer:
        """Queue the sizes in a text that a user has typed (core.sizes.parse_prewarm); None counts as an empty text. If
        the text has an error or no size, nothing is queued and the message says so."""
        try:
            told = self._queue_sizes(parse_prewarm(text or ""))
        except ValueError as problem:
            return sentence(str(problem), wrong=True), "", waiting
        return sentence(told), "", waiting

    def _queue_sizes(self, wanted: PrewarmList) -> str:
        """Queue the sizes of a list. Returns sentences for the user on sizes that were in the queue already, and on
        newly queued sizes that take minutes; "" if there are no such sizes. Raises ValueError with a sentence if the
        list has no size, also because no size of the model was used yet."""
        used = self.runtime.history.most_used(self.warmup.model, wanted.most_used) if wanted.most_used else []
        if not wanted.sizes and not used:
            raise ValueError(NONE_USED if wanted.most_used else "Type at least one size, for example 512x512.")
        before = {job.id for job in self.warmup.jobs() if job.pending}
        queued = self.warmup.add(wanted.sizes, SOURCE)
        for size, tokens in used:
            queued += self.warmup.add([size], SOURCE, tokens=tokens)
        known = [job.title for job in queued if job.id in before]
        said = []
        if known:
            verb = "runs or waits" if len(known) == 1 else "run or wait"
            said.append(f"{', '.join(known)}: {verb} already, not queued again.")
        estimates = self.warmup.estimates(job.size for job in queued if job.id not in before)
        said += [
            f"{size}: this takes {estimate_words(estimate)} on this machine; Cancel stops it."
            for size, estimate in estimates.items() if estimate.seconds >= MUCH_SECONDS
        ]
        return " ".join(said)

    def cancel_all(self, waiting: Chore | None) -> Answer:
        """Cancel all pre-warming, running and waiting. The message has the number of sizes, or says that there were
        none."""
        sizes = self.warmup.stop()
        message = f"{counted(sizes, 'size')} cancelled." if sizes else "Nothing is being pre-warmed."
        return sentence(message), "", waiting

    # --- the table ------------------------------------------------------------------------------------------------

    def pin(self, keys: Any, waiting: Chore | None, pinned: bool = True) -> Answer:
        """Pin the selected rows; unpin them if `pinned` is False. Rows that no longer exist are skipped. The message
        has the number of rows, or says that no row is selected or left, or that the disk could not be written. keys: a
        JSON list of the rows' keys (table.key_of), from the page."""
        chosen = read_list(keys, str)
        if not chosen:
            return "", sentence(SELECT_FIRST, wrong=True), waiting
        try:
            rows = (key.partition(" ") for key in chosen)
            known = sum(self.runtime.pin(resolution, model, pinned) for resolution, _, model in rows)
        except NotKept as problem:
            return "", sentence(str(problem), wrong=True), waiting
        if not known:
            return "", sentence(GONE, wrong=True), waiting
        return "", sentence(f"{counted(known, 'resolution')} {'pinned' if pinned else 'unpinned'}."), waiting

    def purge_selected(self, keys: Any, waiting: Chore | None) -> Answer:
        """Purge the selected rows that still exist, and the VAE's shapes at their resolutions unless another model's
        row has these shapes too. keys: a JSON list of the rows' keys (table.key_of), from the page; "" if the user has
        not confirmed, and then nothing is purged."""
        chosen = set(read_list(keys, str))
        affected = [row for row in self.runtime.rows() if key_of(row) in chosen]
        if chosen and not affected:
            return "", sentence(GONE, wrong=True), waiting
        by_model: dict[str, set[str]] = {}
        for row in affected:
            by_model.setdefault(row.model, set()).add(row.resolution)

        def free() -> int:
            """Purge the rows, and return the bytes of GPU memory that became free."""
            freed = sum(self.runtime.purge(resolutions, model) for model, resolutions in by_model.items())
            # A row shows the VAE's shapes of its resolution too: they are purged unless another model's row has them.
            gone = {row.resolution for row in affected}
            left = [row for row in self.runtime.rows() if row.is_decode and row.resolution in gone]
            return freed + sum(self.runtime.purge({row.resolution}, row.model) for row in left)

        return self._purge(len(affected), free, waiting)

    def purge_all(self, confirmed: Any, waiting: Chore | None) -> Answer:
        """Purge all sizes of all models. confirmed: a text, "" if the user has not confirmed; then nothing is purged.
        """
        return self._purge(len(self.runtime.rows()) if confirmed else 0, self.runtime.purge, waiting)

    def purge_disk(self, confirmed: Any, waiting: Chore | None) -> Answer:
        """Delete everything in the cache folder, except files of a newer version of OneDiff. What is ready in memory
        stays ready. confirmed: as in purge_all."""
        if not confirmed:
            return "", sentence(NOTHING_PURGED), waiting

        def delete() -> str:
            """Delete the files, and return a sentence for users."""
            freed = f"{memory(self.runtime.purge_disk())} of disk freed."
            return f"{freed} {NEWER_STAYS}" if self.runtime.history.is_shared_with_newer else freed

        return self._begin("Deleting", delete)

    def _purge(self, count: int, free: Callable[[], int], waiting: Chore | None) -> Answer:
        """Begin to purge, by calling `free`; if count is 0, only say that nothing was purged. count: the number of
        resolutions, for the message. free: purges them, and returns the bytes of GPU memory that became free."""
        if not count:
            return "", sentence(NOTHING_PURGED), waiting
        return self._begin("Purging", lambda: f"{counted(count, 'resolution')} purged, {memory(free())} of VRAM freed.")

    def release(self, waiting: Chore | None) -> Answer:
        """Release the GPU memory that OneDiff holds (Services.release_memory). Graphs and weights are made again when
        they are needed."""
        return self._begin("Releasing memory", lambda: f"{memory(self.runtime.release_memory())} of VRAM released.")

    def _begin(self, name: str, work: Callable[[], str]) -> Answer:
        """Start work that must not run beside an image, and wait at most SECONDS_FOR_A_CHORE for its end. The Answer
        has the outcome, or the work itself if it is not over: `view` shows its outcome later.

        name: the work's name for users, such as "Purging". work: returns a sentence for users.
        """
        chore = Chore(name, lambda: self.exclusively(work))
        if chore.over(SECONDS_FOR_A_CHORE):
            return "", sentence(chore.outcome, wrong=chore.failed), None
        return "", sentence(f"{name} waits until no image is being made."), chore

    # --- what the page shows --------------------------------------------------------------------------------------

    def view(self, clicks: Any, model: str, waiting: Chore | None) -> tuple[Any, ...]:
        """Carry out the clicks (cancel jobs, clear finished ones, pre-warm sizes), and return new values of all
        components that show the current state, in the order of the outputs in build_cache_tab; gradio redraws those
        that differ.

        clicks: JSON, see ui.jobs.read_clicks. model: the choice in the list of models. waiting: see Panel; once this
            work is over, its outcome is shown and no work is waited for.
        """
        clicked = read_clicks(clicks)
        carry_out(clicked, self.queue)
        told: Any = UNCHANGED
        if clicked.sizes:
            told = self.prewarm(", ".join(clicked.sizes), waiting)[0]
        # UNCHANGED and not None: a click since this request was sent may have given the page other work to wait for.
        below = UNCHANGED
        waits_now = UNCHANGED
        if waiting is not None and waiting.over():
            below = sentence(waiting.outcome, wrong=waiting.failed)
            waits_now = None
        known = self.runtime.rows()
        jobs = self.queue.jobs()
        sizes = [job for job in jobs if isinstance(job, SizeJob)]
        rows = rows_with_jobs(known, sizes, self.warmup.model)
        models = models_of(rows)
        model = model if model in models else ALL_MODELS
        totals = self.runtime.totals()
        table = resolutions_html(
            selected(rows, model, clicked.sort), has_gpu(totals), clicked.sort, self.jobs_of_rows(sizes),
        )
        return (
            below, waits_now, totals_html(totals, known, sizes, self.runtime.history.folder), jobs_html(jobs),
            gr.update(choices=models, value=model), table, self.sizes(clicked.asked), told,
        )

    def jobs_of_rows(self, jobs: Iterable[SizeJob]) -> dict[str, int]:
        """The ids of pending pre-warm jobs by the keys of their rows (table.key_of), for a Cancel button in each row.
        """
        return {f"{job.size.resolution} {self.warmup.model or ''}": job.id for job in jobs if job.pending}

    def sizes(self, asked: str) -> str:
        """Markup of buttons for sizes to pre-warm: the txt2img tab's size, the most used sizes, and the usual sizes of
        the loaded model.

        asked: the size in the txt2img tab, for example "512x512"; it gets no button if the text is no size.
        """
        model = self.warmup.model
        usual = self.runtime.services.families.usual_sizes(model)
        yours = {}
        with contextlib.suppress(ValueError):
            yours[str(parse_size(asked))] = IN_TXT2IMG
        for used in self.runtime.history.most_used(model, MOST_YOURS):
            yours.setdefault(used.size.resolution, MOST_USED)
        every = {*yours, *(size for row in usual for size in row.sizes)}
        return sizes_html(yours, usual, self.warmup.estimates(map(parse_size, every)))


def if_confirmed(question: str, value: str = "'yes'") -> str:
    """A JavaScript expression that asks the user a question. Its value is `value` if the user confirms, otherwise an
    empty text. question: "{}" in it stands for the selected sizes. value: a JavaScript expression, too."""
    asked = f"{json.dumps(question)}.replace('{{}}', () => window.onediff.selectedNames())"
    return f"window.confirm({asked}) ? {value} : ''"


def read_list(text: Any, kind: type) -> list[Any]:
    """The values of exactly this type in a list that a page has sent as JSON; other values are left out. [] if the text
    is no JSON list."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return []
    return [value for value in values if type(value) is kind] if isinstance(values, list) else []


def build_cache_tab(runtime: Runtime, warmup: WarmUp, queue: JobQueue, exclusively: Exclusively) -> None:
    """Build the Cache page inside the open gradio context. The arguments are those of Panel."""
    panel = Panel(runtime, warmup, queue, exclusively)
    with gr.Column(elem_id="onediff_cache"):
        waiting = gr.State(None)
        keys = browser_input()
        clicks = browser_input()
        look = a_button("", "look", elem_classes=HIDDEN)
        totals = live_html("cache_totals")
        gr.HTML("<h2>Pre-warm sizes</h2>")
        chips = live_html("cache_sizes")
        with gr.Row(elem_classes=CONTROLS):
            label = "Sizes (add x2 for a batch of two)"
            example = "1024x1024, 832x1216 x2, most used 4"
            sizes = a_text(label, "prewarm_sizes", placeholder=example, scale=4, min_width=200)
        message = live_html("cache_result")
        with gr.Row(elem_classes=ACTIONS):
            prewarm = a_button("Pre-warm", "prewarm", variant="primary")
            cancel = a_button("Cancel all sizes", "prewarm_cancel")
        jobs = live_html("cache_jobs")
        gr.HTML("<h2>Resolutions</h2>")
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            model = a_list("Model", [ALL_MODELS], ALL_MODELS, "model")
        table = live_html("cache_table")
        with gr.Row(elem_classes=[*ACTIONS, "onediff-of-rows"]):
            # javascript/onediff.js disables the buttons that have nothing to work on.
            pin = a_button("Pin selected", "pin")
            unpin = a_button("Unpin selected", "unpin")
            release = a_button("Release memory", "release")
        with gr.Row(elem_classes=[*ACTIONS, "onediff-dangers"]):
            purge = a_button("Purge selected", "purge", elem_classes=DANGER)
            purge_all = a_button("Purge all", "purge_all", elem_classes=DANGER)
            purge_disk = a_button("Purge disk", "purge_disk", elem_classes=DANGER)
        below = live_html("cache_outcome")
        gr.HTML(legend_html())

    shown = {
        "inputs": [clicks, model, waiting], "queue": False, **QUIET,
        "outputs": [below, waiting, totals, jobs, model, table, chips, message],
        **in_the_browser("(...values) => [window.onediff.clicks(), ...values.slice(1, 3)]"),
    }
    for event in (look.click, model.input):
        event(panel.view, **shown)

    def on(event: Callable[..., Any], handler: Callable[..., Answer], *own: Any, first: str = "") -> None:
        """Run a handler at an event, then show the new state. own: components whose values the handler takes. first: a
        JavaScript expression for the handler's first value, in place of the first component's."""
        values = [*own, waiting]
        script = f"(...values) => [{first}, ...values.slice(1, {len(values)})]"
        done = event(handler, inputs=values, outputs=[message, below, waiting], queue=False, **QUIET,
                     **(in_the_browser(script) if first else {}))
        done.then(panel.view, **shown)

    for asked in (prewarm.click, sizes.submit):
        on(asked, panel.prewarm, sizes)
    on(cancel.click, panel.cancel_all)
    on(pin.click, panel.pin, keys, first=SELECTED)
    on(unpin.click, lambda keys, waiting: panel.pin(keys, waiting, False), keys, first=SELECTED)
    on(release.click, panel.release)
    on(purge.click, panel.purge_selected, keys, first=if_confirmed(PURGE_SELECTED, SELECTED))
    on(purge_all.click, panel.purge_all, keys, first=if_confirmed(PURGE_ALL))
    on(purge_disk.click, panel.purge_disk, keys, first=if_confirmed(PURGE_DISK))
    forget_when_changed([sizes], message)
