"""The OneDiff tab: which resolutions are ready, and buttons to make them ready or to throw them away.

javascript/onediff.js asks for what is new while the tab can be seen, by a click on a hidden button: gradio has
generators and timers, but the former keep connections open (see events.py) and the latter are not in gradio 3.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ...prewarm.job import TOKEN_CHOICES
from ...prewarm.presets import FAMILIES
from ...prewarm.worker import WarmUp
from ...runtime.runtime import Runtime
from .. import texts
from ..events import (
    ACTIONS,
    CONTROLS,
    DANGER,
    HIDDEN,
    QUIET,
    a_button,
    a_list,
    a_text,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    markup,
    nothing_seen,
)
from .handlers import PARTS, Panel, for_page
from .purge import Exclusively
from .table import ALL_MODELS, ORDERS, USUAL_ORDER, legend_html

PLACEHOLDER = "1024x1024, 832x1216 x2"


def build_cache_tab(runtime: Runtime, warmup: WarmUp, exclusively: Exclusively) -> None:
    """The page, inside the gradio context that is open. exclusively: runs work while the WebUI makes no image."""
    with gr.Column(elem_id="onediff_cache"):
        CachePage(Panel(runtime, warmup, exclusively)).build()


class CachePage:
    """Puts the components on the page that is being built, and connects them with the panel."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.parts: dict[str, Any] = {}
        self.page = gr.State(None)

    def build(self) -> None:
        beat, tick, message = markup("cache_beat", HIDDEN), a_button("", "tick", elem_classes=HIDDEN), nothing_seen()
        totals = markup("cache_totals")
        with gr.Row(elem_classes="onediff-halves"):
            with gr.Column(min_width=320, scale=3):
                told, connect_prewarm = self.build_prewarm()
            with gr.Column(min_width=320, scale=2):
                chart = markup("cache_chart")
        gr.HTML("<h3>Resolutions</h3>")
        with gr.Row(elem_classes=[*CONTROLS, "onediff-filter"]):
            model = a_list("Model", [ALL_MODELS], ALL_MODELS, "model")
            order = a_list("Sorted by", list(ORDERS), USUAL_ORDER, "order")
        table = markup("cache_table")
        more = a_button("Show more", "more", visible=False, size="sm")
        connect_actions, below, question, confirm = self.build_actions()
        gr.HTML(legend_html())

        self.parts.update(
            totals=totals, models=model, table=table, more=more, question=question, confirm=confirm, chart=chart,
        )
        names = (*PARTS, *(family.name for family in FAMILIES))
        outputs = [beat, told, below, *(self.parts[name] for name in names), self.page]
        last = [model, order, self.page]

        def on(event: Callable[..., Any], handler: Callable[..., Any], *own: Any, ask: str = "") -> None:
            """ask: what of window.onediff gives the first input's value."""
            inputs = [*own, *last]
            script = f"(...values) => window.onediff.{ask}(values, {len(inputs)})"
            event(for_page(handler), inputs=inputs, outputs=outputs, queue=False, **QUIET,
                  **(in_the_browser(script) if ask else {}))

        on(tick.click, self.panel.tick, message, ask="message")
        on(more.click, self.panel.more)
        for choice in (model, order):
            on(choice.input, self.panel.look)
        connect_prewarm(on)
        connect_actions(on)

    def build_prewarm(self) -> tuple[Any, Callable[..., None]]:
        """The controls that make sizes ready; the sentence below them, and what connects them."""
        presets = []
        gr.HTML("<h3>Make sizes ready</h3>")
        for family in FAMILIES:
            with gr.Row(elem_classes="onediff-presets", elem_id=f"onediff_presets_{family.model}") as row:
                gr.HTML(f"<b>{family.name}</b>")
                for number, preset in enumerate(family.presets):
                    button = a_button(preset.label, f"preset_{family.model}_{number}", size="sm", min_width=20)
                    presets.append((button, preset))
            self.parts[family.name] = row
        more = self.parts["families"] = a_button(texts.MORE_FAMILIES, "families", visible=False, size="sm")
        with gr.Row(elem_classes=CONTROLS):
            sizes = a_text("Own sizes", "prewarm_sizes", placeholder=PLACEHOLDER, scale=4, min_width=200)
            batch = kept_out_of_defaults(gr.Number(
                1, label="Batch size", precision=0, elem_id="onediff_prewarm_batch", scale=1, min_width=100,
            ))
            tokens = a_list("Prompt tokens", [str(count) for count in TOKEN_CHOICES], str(TOKEN_CHOICES[0]), "tokens")
        with gr.Row(elem_classes=ACTIONS):
            prewarm = a_button("Pre-warm", "prewarm", variant="primary")
            cancel = a_button("Cancel all", "prewarm_cancel")
        told = markup("cache_result")
        forget_when_changed([sizes, batch], told)
        self.parts["jobs"] = markup("cache_jobs")

        def connect(on: Callable[..., None]) -> None:
            for event in (prewarm.click, sizes.submit):
                on(event, self.panel.prewarm, sizes, batch, tokens)
            for button, preset in presets:
                on(button.click, self.panel.preset(preset), batch, tokens)
            on(cancel.click, self.panel.cancel_all)
            on(more.click, self.panel.other_families)

        return told, connect

    def build_actions(self) -> tuple[Callable[..., None], Any, Any, Any]:
        """What can be done with rows; what connects it, the sentence below, the question and the row that asks it."""
        with gr.Row(elem_classes=ACTIONS):
            # javascript/onediff.js disables those of rows while none is selected.
            pin, unpin = a_button("Pin selected", "pin"), a_button("Unpin selected", "unpin")
            release = a_button("Release memory", "release")
        with gr.Row(elem_classes=[*ACTIONS, "onediff-dangers"]):
            purges = [
                (a_button("Purge selected", "purge", elem_classes=DANGER), self.panel.ask_selected, True),
                (a_button("Purge model", "purge_model", elem_classes=DANGER), self.panel.ask_model, False),
                (a_button("Purge all", "purge_all", elem_classes=DANGER), self.panel.ask_all, False),
                (a_button("Purge disk", "purge_disk", elem_classes=DANGER), self.panel.ask_disk, False),
            ]
        with gr.Row(elem_classes=[*ACTIONS, "onediff-confirm"], elem_id="onediff_confirm", visible=False) as row:
            question = markup("cache_question")
            confirm, keep = a_button("Confirm", "purge_confirm", variant="stop"), a_button("Keep", "purge_keep")
        below = markup("cache_outcome")
        keys = nothing_seen()

        def connect(on: Callable[..., None]) -> None:
            on(pin.click, self.panel.pin(True), keys, ask="selected")
            on(unpin.click, self.panel.pin(False), keys, ask="selected")
            on(release.click, self.panel.release)
            for button, handler, of_selected in purges:
                on(button.click, handler, *([keys] if of_selected else []), ask="selected" if of_selected else "")
            on(confirm.click, self.panel.confirm)
            on(keep.click, self.panel.keep)

        return connect, below, question, row
