"""The OneDiff accordion in the txt2img and img2img tabs."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from ..options.infotext import describe
from ..options.presets import AS_IN_SETTINGS
from ..options.settings import OFF_IN_SETTINGS, Settings
from ..prewarm.worker import WarmUp
from ..runtime.runtime import runtime
from ..shapes.sizes import Size
from .events import HIDDEN, LIVE, QUIET, UNCHANGED, kept_out_of_defaults, show_stream
from .progress import jobs_html, sentence, watch
from .run_settings import AS_AT_FIRST, EXAMPLE

SOURCE = "accordion"
# A hidden text box of A1111 and Forge that gets the description of every generation. The visible line under the
# images will not do: gradio 4 reports a change of an HTML component whenever anything on the page is redrawn.
CHANGES_AFTER_GENERATION = "generation_info_{tab}"
STATUS, PREWARM, PREWARM_RESULT = (
    "onediff_{tab}_status", "onediff_{tab}_prewarm", "onediff_{tab}_prewarm_result"
)
SIZE_COMPONENTS = ("{tab}_width", "{tab}_height", "{tab}_batch_size")


def build_accordion(
    tab: str, status_line: Callable[[], str], presets: Callable[[], list[str]], settings_of: Callable[..., Settings],
) -> list[Any]:
    """Create the accordion of a tab ("txt2img" or "img2img") and return the components that are script arguments.

    status_line: makes the status line's markup; called when the page loads and after each generation. presets: their
    names. settings_of: a run's settings by the values of the script arguments; raises ValueError with a sentence.
    """
    used, preset_at_first, changes_at_first = AS_AT_FIRST
    with gr.Accordion("OneDiff", open=True, elem_id=f"onediff_{tab}_accordion"):
        enabled = gr.Checkbox(used, label="Use OneDiff for this run", elem_id=f"onediff_{tab}_enabled")
        with gr.Row(elem_classes="onediff-run"):
            preset = gr.Dropdown(
                choices=[AS_IN_SETTINGS, *presets()], value=preset_at_first, label="Preset", min_width=160,
                elem_id=f"onediff_{tab}_preset",
            )
            changes = gr.Textbox(
                changes_at_first, label="Changed options for this run", placeholder=EXAMPLE, scale=2, min_width=240,
                lines=1, max_lines=1, elem_id=f"onediff_{tab}_changes",
            )
        told = gr.HTML(elem_id=f"onediff_{tab}_told", elem_classes=LIVE)
        connect_choices([enabled, preset, changes], told, presets, settings_of)
        gr.HTML(status_line, elem_id=STATUS.format(tab=tab), elem_classes=LIVE)
        with gr.Row(elem_classes="onediff-controls"):
            kept_out_of_defaults(gr.Button(
                "Pre-warm this size", size="sm", scale=0, min_width=170, elem_id=PREWARM.format(tab=tab),
            ))
            gr.HTML(elem_id=PREWARM_RESULT.format(tab=tab), elem_classes=["onediff-beside", LIVE])
    return [enabled, preset, changes]


def connect_choices(
    arguments: list[Any], told: Any, presets: Callable[[], list[str]], settings_of: Callable[..., Settings],
) -> None:
    """Say what the run will be, and keep the list of presets as it is now: the user's own come and go, and OneDiff may
    be switched off in the settings meanwhile."""
    enabled, preset, changes = arguments
    shown = gr.State([])
    # javascript/onediff_settings.js clicks it when somebody comes to the accordion: an update closes an open list.
    ask = kept_out_of_defaults(gr.Button("", elem_id=f"{preset.elem_id}_ask", elem_classes=HIDDEN))

    def offer(shown: list[str]) -> tuple[Any, Any]:
        now = [AS_IN_SETTINGS, *presets()]
        return (UNCHANGED, shown) if now == shown else (gr.update(choices=now), now)

    def tell(*values: Any) -> str:
        if not runtime.settings.enabled:
            return sentence(f"{OFF_IN_SETTINGS}: nothing here has an effect.", wrong=True)
        try:
            settings = settings_of(*values)
        except ValueError as problem:
            return sentence(f"{problem} OneDiff would be off for this run.", wrong=True)
        return "" if values == AS_AT_FIRST else sentence(f"This run: {describe(settings)}.")

    # Pasting can set the list to a preset that is younger than the page.
    for event in (ask.click, preset.change):
        event(offer, inputs=[shown], outputs=[preset, shown], queue=False, **QUIET)
    for event in (ask.click, enabled.change, preset.change, changes.submit, changes.blur):
        event(tell, inputs=arguments, outputs=[told], queue=False, **QUIET)


def connect(component: Any, tab: str, status_line: Callable[[], str], warmup: WarmUp) -> None:
    """Hear of every component that the host has just created, and connect the accordion with what it needs of them.

    The last that matters is the one that tells of new images: every host creates it after a tab's settings.
    """
    if component.elem_id != CHANGES_AFTER_GENERATION.format(tab=tab):
        return
    status = find_component(STATUS.format(tab=tab))
    if status is None:
        return
    component.change(status_line, inputs=[], outputs=[status], queue=False, **QUIET)
    connect_prewarm(tab, status, status_line, warmup)


def connect_prewarm(tab: str, status: Any, status_line: Callable[[], str], warmup: WarmUp) -> None:
    button, result = find_component(PREWARM.format(tab=tab)), find_component(PREWARM_RESULT.format(tab=tab))
    size = [find_component(elem_id.format(tab=tab)) for elem_id in SIZE_COMPONENTS]
    if button is None or result is None or None in size:
        return

    def ask(width: Any, height: Any, batch: Any) -> str:
        try:
            warmup.add([size_of(width, height, batch)], SOURCE)
        except ValueError as problem:
            return sentence(str(problem), wrong=True)
        return ""

    def follow(width: Any, height: Any, batch: Any) -> Iterator[tuple[str, Any]]:
        try:
            wanted = size_of(width, height, batch)
        except ValueError as problem:
            yield sentence(str(problem), wrong=True), UNCHANGED
            return
        for jobs in watch(warmup, [wanted]):
            over = not any(job.pending for job in jobs)
            # Nothing was queued: why, ask has said.
            yield jobs_html(jobs) if jobs else UNCHANGED, status_line() if over else UNCHANGED

    asked = button.click(ask, inputs=size, outputs=[result], queue=False, **QUIET)
    show_stream([asked.then], follow, inputs=size, outputs=[result, status])


def size_of(width: Any, height: Any, batch: Any) -> Size:
    """The size that three sliders show. Raises ValueError with a sentence."""
    numbers = (width, height, batch)
    if any(number is None or number != int(number) for number in numbers):
        raise ValueError("Width, height and batch size must be whole numbers.")
    return Size(*map(int, numbers))


def find_component(elem_id: str) -> Any | None:
    """The component of this id on the page that is being built."""
    from gradio.context import Context

    blocks = Context.root_block.blocks.values() if Context.root_block else ()
    return next((block for block in blocks if getattr(block, "elem_id", None) == elem_id), None)
