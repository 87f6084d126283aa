"""The Cache page: which resolutions are ready, and buttons to pre-warm or purge them.

javascript/onediff.js asks for what is new while the page can be seen, by a click on a hidden button: gradio 3 has no
timers. No handler waits for an image that is being made.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ...core.refusal import NotKept
from ...core.sizes import LARGEST_BATCH, TOKEN_CHOICES, TOKENS, Size, parse_sizes
from ...prewarm.job import rows_with_jobs
from ...prewarm.presets import FAMILIES, SizePreset, families_for
from ...prewarm.worker import WarmUp
from ...runtime.rows import ResolutionRow
from ...runtime.runtime import Runtime
from ..amounts import counted, memory, whole_number
from ..chore import Chore, Exclusively
from ..events import (
    ACTIONS,
    CONTROLS,
    DANGER,
    HIDDEN,
    QUIET,
    UNCHANGED,
    a_button,
    a_list,
    a_place,
    a_text,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    nothing_seen,
)
from ..markup import sentence
from ..progress import jobs_html
from .table import ALL_MODELS, key_of, legend_html, models_of, resolutions_html, selected, totals_html

SOURCE = "panel"
# How long a request waits for what it has begun; the page hears later of what takes longer.
SECONDS_FOR_A_CHORE = 1.0
SELECT_FIRST = "Select at least one resolution in the table first."


@dataclass(frozen=True)
class Purge:
    """What the page asks before it throws something away. question: what the user confirms. name: of the work, for
    people. work: does it, and returns what came of it."""

    question: str
    name: str
    work: Callable[[], str]


# What a page waits for: a purge that the user has not confirmed, or work that is not over.
Waiting = Purge | Chore | None
# The sentence below the pre-warm controls, the one below the table, and what the page waits for.
Answer = tuple[Any, Any, Waiting]


class Panel:
    """The handlers of the page. Each takes what its page waits for as the last argument."""

    def __init__(self, runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
        self.runtime, self.warmup, self.exclusively = runtime, warmup, exclusively

    # --- the pre-warm queue ---------------------------------------------------------------------------------------

    def prewarm(self, text: str, batch: Any, tokens: Any, waiting: Waiting) -> Answer:
        """Queue the sizes that were typed; batch is for those without a number of images of their own."""
        try:
            sizes = parse_sizes(text or "")
            if not sizes:
                raise ValueError("Type at least one size, for example 512x512.")
            images = whole_number(1 if batch is None else batch, "The batch size", 1, LARGEST_BATCH)
            wanted = [Size(size.width, size.height, images) if size.batch == 1 else size for size in sizes]
            self.warmup.add(wanted, SOURCE, tokens=whole_number(tokens or TOKENS, "The number of tokens"))
        except ValueError as problem:
            return sentence(str(problem), wrong=True), "", waiting
        return "", "", waiting

    def preset(self, preset: SizePreset) -> Callable[..., Answer]:
        """A handler that queues the sizes of a preset."""
        return lambda batch, tokens, waiting: self.prewarm(", ".join(map(str, preset.sizes)), batch, tokens, waiting)

    def cancel_all(self, waiting: Waiting) -> Answer:
        sizes = self.warmup.stop()
        told = f"{counted(sizes, 'size')} cancelled." if sizes else "Nothing is being pre-warmed."
        return sentence(told), "", waiting

    # --- the table ------------------------------------------------------------------------------------------------

    def pin(self, pinned: bool) -> Callable[..., Answer]:
        """A handler that pins the selected rows, or no longer."""

        def set_pins(keys: Any, waiting: Waiting) -> Answer:
            chosen = read_list(keys, str)
            if not chosen:
                return "", sentence(SELECT_FIRST, wrong=True), waiting
            try:
                rows = (key.partition(" ") for key in chosen)
                known = sum(self.runtime.pin(resolution, model, pinned) for resolution, _, model in rows)
            except NotKept as problem:
                return "", sentence(str(problem), wrong=True), waiting
            return "", sentence(f"{counted(known, 'resolution')} {'pinned' if pinned else 'unpinned'}."), waiting

        return set_pins

    def ask_selected(self, keys: Any, waiting: Waiting) -> Answer:
        chosen = read_list(keys, str)
        if not chosen:
            return "", sentence(SELECT_FIRST, wrong=True), waiting
        return "", "", purge_of_rows(self.runtime, chosen)

    def ask_all(self, waiting: Waiting) -> Answer:
        rows = self.runtime.rows()
        if not rows:
            return "", sentence("There is nothing to purge."), waiting
        what = "the only resolution" if len(rows) == 1 else f"all {len(rows)} resolutions"
        return "", "", purge_of(self.runtime, what, rows, self.runtime.purge)

    def ask_disk(self, waiting: Waiting) -> Answer:
        return "", "", purge_of_disk(self.runtime)

    def confirm(self, waiting: Waiting) -> Answer:
        if not isinstance(waiting, Purge):
            return "", UNCHANGED, waiting
        return self._begin(waiting.name, waiting.work)

    def keep(self, waiting: Waiting) -> Answer:
        return "", sentence("Nothing was purged."), None

    def release(self, waiting: Waiting) -> Answer:
        return self._begin("Releasing memory", self._release)

    def _release(self) -> str:
        freed = self.runtime.release_memory()
        if not freed:
            return "No graph held memory, so none was released."
        return f"Released {memory(freed)} of VRAM; graphs are recorded again when needed."

    def _begin(self, name: str, work: Callable[[], str]) -> Answer:
        chore = Chore(name, self.exclusively, work)
        if chore.over(SECONDS_FOR_A_CHORE):
            return "", sentence(chore.outcome, wrong=chore.failed), None
        return "", sentence(f"{name} waits until no image is being made."), chore

    # --- what the page shows --------------------------------------------------------------------------------------

    def view(self, cancelled: Any, model: str, waiting: Waiting) -> tuple[Any, ...]:
        """The value of every component that shows what is so; gradio draws what has changed. cancelled: the ids of jobs
        whose buttons were clicked, as JSON."""
        for job in read_list(cancelled, int):
            self.warmup.cancel(job)
        # Somebody may have clicked on something since this look was begun: what the page waits for stays as it is.
        below, waits_now = UNCHANGED, UNCHANGED
        if isinstance(waiting, Chore) and waiting.over():
            below, waits_now = sentence(waiting.outcome, wrong=waiting.failed), None
        known, jobs = self.runtime.rows(), self.warmup.jobs()
        rows = rows_with_jobs(known, jobs, self.warmup.model)
        models = models_of(rows)
        model = model if model in models else ALL_MODELS
        question = sentence(waiting.question) if isinstance(waiting, Purge) else ""
        families = families_for(self.warmup.model)
        return (
            below, waits_now, totals_html(self.runtime.totals(), known, jobs), jobs_html(jobs),
            gr.update(choices=models, value=model), resolutions_html(selected(rows, model)), question,
            gr.update(visible=bool(question)), *(gr.update(visible=family in families) for family in FAMILIES),
        )


def read_list(text: Any, kind: type) -> list[Any]:
    """The values of this type in a list that a page has sent as JSON; none for anything else."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return []
    return [value for value in values if type(value) is kind] if isinstance(values, list) else []


def purge_of_rows(runtime: Runtime, keys: Iterable[str]) -> Purge:
    """Of rows by key_of."""
    chosen = set(keys)
    affected = [row for row in runtime.rows() if key_of(row) in chosen]
    by_model: dict[str, set[str]] = {}
    for row in affected:
        by_model.setdefault(row.model, set()).add(row.resolution)

    def free() -> int:
        freed = sum(runtime.purge(resolutions, model) for model, resolutions in by_model.items())
        # The VAE's shapes stood in the rows that are gone: they go too, unless another model's row has them.
        gone = {row.resolution for row in affected}
        left = [row for row in runtime.rows() if row.is_decode and row.resolution in gone]
        return freed + sum(runtime.purge({row.resolution}, row.model) for row in left)

    return purge_of(runtime, counted(len(affected), "resolution"), affected, free)


def purge_of(runtime: Runtime, what: str, affected: list[ResolutionRow], free: Callable[[], int]) -> Purge:
    """free: purges these rows and returns the bytes of GPU memory that were given back."""
    expected = would_free(runtime, affected)
    frees = f"This frees about {memory(expected)} of VRAM" if expected else "This frees no VRAM"

    def purge() -> str:
        freed = free()
        if not affected:
            return "There was nothing to purge."
        purged = f"{counted(len({key_of(row) for row in affected}), 'resolution')} purged"
        if freed:
            return f"{purged}, {memory(freed)} freed."
        if any(row.needs for row in affected):
            return f"{purged}; larger graphs share their memory, so nothing was freed."
        return f"{purged}; they held no graph memory."

    return Purge(f"Purge {what}? {frees}; the history on disk goes too.", "Purging", purge)


def purge_of_disk(runtime: Runtime) -> Purge:
    size = runtime.totals().disk
    frees = f"This frees about {memory(size)} of disk" if size else "The cache folder is empty"
    question = f"Delete everything in the cache folder? {frees}; what is ready stays ready until the WebUI ends."

    def delete() -> str:
        freed = runtime.purge_disk()
        return f"Freed {memory(freed)} of disk." if freed else "The cache folder is empty now."

    return Purge(question, "Deleting", delete)


def would_free(runtime: Runtime, affected: list[ResolutionRow]) -> int:
    """About how many bytes of GPU memory come back with these rows: all graphs lie over each other in one memory, which
    is as large as the largest of them."""
    keys = {key_of(row) for row in affected}
    largest_that_stays = max((row.needs for row in runtime.rows() if key_of(row) not in keys), default=0)
    least = max((row.bytes for row in affected), default=0)
    return least if len(affected) == 1 else max(least, runtime.totals().vram - largest_that_stays)


def build_cache_tab(runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
    """The page, inside the gradio context that is open."""
    panel = Panel(runtime, warmup, exclusively)
    with gr.Column(elem_id="onediff_cache"):
        waiting, keys, cancelled = gr.State(None), nothing_seen(), nothing_seen()
        look = a_button("", "look", elem_classes=HIDDEN)
        totals = a_place("cache_totals")
        gr.HTML("<h3>Pre-warm sizes</h3>")
        rows, presets = build_presets()
        with gr.Row(elem_classes=CONTROLS):
            sizes = a_text("Sizes", "prewarm_sizes", placeholder="1024x1024, 832x1216 x2", scale=4, min_width=200)
            batch = kept_out_of_defaults(gr.Number(
                1, label="Batch size", precision=0, elem_id="onediff_prewarm_batch", scale=1, min_width=100,
            ))
            tokens = a_list("Prompt tokens", [*map(str, TOKEN_CHOICES)], str(TOKEN_CHOICES[0]), "tokens")
        with gr.Row(elem_classes=ACTIONS):
            prewarm = a_button("Pre-warm", "prewarm", variant="primary")
            cancel = a_button("Cancel all", "prewarm_cancel")
        told, jobs = a_place("cache_result"), a_place("cache_jobs")
        gr.HTML("<h3>Resolutions</h3>")
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            model = a_list("Model", [ALL_MODELS], ALL_MODELS, "model")
        table = a_place("cache_table")
        with gr.Row(elem_classes=ACTIONS):
            # javascript/onediff.js disables the buttons that have nothing to work on.
            pin, unpin = a_button("Pin selected", "pin"), a_button("Unpin selected", "unpin")
            release = a_button("Release memory", "release")
        with gr.Row(elem_classes=[*ACTIONS, "onediff-dangers"]):
            purge = a_button("Purge selected", "purge", elem_classes=DANGER)
            purge_all = a_button("Purge all", "purge_all", elem_classes=DANGER)
            purge_disk = a_button("Purge disk", "purge_disk", elem_classes=DANGER)
        with gr.Row(elem_classes=[*ACTIONS, "onediff-confirm"], elem_id="onediff_confirm", visible=False) as asking:
            question = a_place("cache_question")
            confirm, keep = a_button("Confirm", "purge_confirm", variant="stop"), a_button("Keep", "purge_keep")
        below = a_place("cache_outcome")
        gr.HTML(legend_html())

    shown = {
        "inputs": [cancelled, model, waiting], "queue": False, **QUIET,
        "outputs": [below, waiting, totals, jobs, model, table, question, asking, *rows],
        **in_the_browser("(...values) => [window.onediff.cancelled(), ...values.slice(1, 3)]"),
    }
    for event in (look.click, model.input):
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
