"""The OneDiff accordion in the txt2img and img2img tabs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..core.settings import Settings
from ..core.sizes import Size
from ..prewarm.job import DONE, FAILED, Job
from ..prewarm.worker import WarmUp
from .amounts import whole_number
from .controls import ROWS, a_control, a_text_of_changes, connect_controls
from .events import HIDDEN, QUIET, UNCHANGED, a_button, a_place, in_the_browser
from .markup import bar_html, sentence
from .presets import AS_IN_SETTINGS, PRESETS
from .progress import job_sentence
from .run_settings import AS_AT_FIRST

SOURCE = "accordion"
PREWARM_THIS = "Pre-warm this size"
# A hidden text box of A1111 and Forge that gets the description of every generation. The visible line under the
# images will not do: gradio 4 reports a change of an HTML component whenever anything on the page is redrawn.
CHANGES_AFTER_GENERATION = "generation_info_{tab}"
PARTS = ("prewarm", "prewarm_result_look", "prewarm_result", "summary", "status", "ask")
SIZE_COMPONENTS = ("{tab}_width", "{tab}_height", "{tab}_batch_size")
# The status in the accordion's title, and the one inside it.
StatusLines = Callable[[], tuple[str, str]]


def build_accordion(tab: str, status_lines: StatusLines, settings_of: Callable[..., Settings]) -> list[Any]:
    """Create the accordion of a tab ("txt2img" or "img2img") and return the components that are script arguments.

    status_lines: called when the page loads and after each generation. settings_of: a run's settings by the values of
    the script arguments; raises ValueError with a sentence.

    The WebUI's own InputAccordion will not do: with it, closing switches off.
    """
    used, preset_at_first, changes_at_first = AS_AT_FIRST
    with gr.Column(elem_id=f"onediff_{tab}", elem_classes="onediff-accordion"):
        # Stands in the title of the accordion, by style.css.
        with gr.Row(elem_classes="onediff-title"):
            enabled = gr.Checkbox(
                used, label="Use OneDiff for this run", elem_id=f"onediff_{tab}_enabled", container=False, scale=0,
                min_width=20,
            )
            set_here = a_place(f"{tab}_set_here")
            a_place(f"{tab}_summary", value=lambda: status_lines()[0])
        with gr.Accordion("OneDiff", open=False, elem_id=f"onediff_{tab}_accordion"):
            with gr.Row(elem_classes="onediff-run"):
                preset = gr.Dropdown(
                    choices=[AS_IN_SETTINGS, *PRESETS], value=preset_at_first, label="Speed", min_width=160,
                    elem_id=f"onediff_{tab}_preset",
                )
                controls = [a_control(tab, name) for name in ROWS[0]]
            for names in ROWS[1:-1]:
                with gr.Row(elem_classes="onediff-run"):
                    controls += [a_control(tab, name) for name in names]
            with gr.Accordion("Expert", open=False, elem_id=f"onediff_{tab}_advanced"):
                with gr.Row(elem_classes="onediff-run"):
                    controls += [a_control(tab, name) for name in ROWS[-1]]
                changes = a_text_of_changes(tab, value=changes_at_first)
            with gr.Row(elem_classes="onediff-controls"):
                a_button(PREWARM_THIS, f"{tab}_prewarm", size="sm", min_width=190)
                a_button("", f"{tab}_prewarm_result_look", elem_classes=HIDDEN)
                a_place(f"{tab}_prewarm_result", "onediff-beside")
            # What changes by itself stands last, in a place of its own (style.css): no control moves away.
            with gr.Column(elem_classes="onediff-told"):
                told = a_place(f"{tab}_told")
                a_place(f"{tab}_status", value=lambda: status_lines()[1])
        arguments = [enabled, preset, changes]
        connect_controls(tab, arguments, controls, told, set_here, settings_of)
    return arguments


def connect(component: Any, tab: str, status_lines: StatusLines, warmup: WarmUp) -> None:
    """Hear of every component that the host has just created, and connect the accordion with what it needs of them.

    The last that matters is the one that tells of new images: every host creates it after a tab's settings.
    """
    if component.elem_id != CHANGES_AFTER_GENERATION.format(tab=tab):
        return
    parts = [found for part in PARTS if (found := find_component(f"onediff_{tab}_{part}")) is not None]
    size = [found for elem_id in SIZE_COMPONENTS if (found := find_component(elem_id.format(tab=tab))) is not None]
    if len(parts) < len(PARTS):
        return
    prewarm, look, result, summary, status, ask = parts
    for event in (ask.click, component.change):
        event(status_lines, inputs=[], outputs=[summary, status], queue=False, **QUIET)
    component.change(None, inputs=[], outputs=[], api_name=False, **in_the_browser(
        f"() => {{ onediffAccordion.ask({tab!r}); return []; }}"
    ))
    if len(size) < len(SIZE_COMPONENTS):
        return

    def begin(width: Any, height: Any, batch: Any) -> tuple[str, str, int | None]:
        """What the button says, what stands beside it, and the job."""
        try:
            numbers = {"The width": width, "The height": height, "The batch size": batch}
            (asked,) = warmup.add([Size(*(whole_number(value, name) for name, value in numbers.items()))], SOURCE)
        except ValueError as problem:
            return PREWARM_THIS, sentence(str(problem), wrong=True), None
        return *job_shown(asked), asked.id

    def follow(asked: int | None) -> tuple[Any, ...]:
        """What the button says, what stands beside it, and both statuses."""
        job = next((job for job in warmup.jobs() if job.id == asked), None)
        if job is None:
            return PREWARM_THIS, "", UNCHANGED, UNCHANGED
        return *job_shown(job), *((UNCHANGED, UNCHANGED) if job.pending else status_lines())

    asked = gr.State(None)
    prewarm.click(begin, inputs=size, outputs=[prewarm, result, asked], queue=False, **QUIET)
    look.click(follow, inputs=[asked], outputs=[prewarm, result, summary, status], queue=False, **QUIET)
    for slider in size:
        slider.change(None, inputs=[], outputs=[prewarm, result], api_name=False, **in_the_browser(
            f"() => [{PREWARM_THIS!r}, '']"
        ))


def job_shown(job: Job) -> tuple[str, str]:
    """What the button says of the size that it has queued, and what stands beside it."""
    text = f"✓ {job.size} is ready" if job.state == DONE else str(job.size) if job.pending else PREWARM_THIS
    bar = bar_html(100 * job.share, f"Pre-warming {job.size}") if job.pending else ""
    return text, bar + sentence(job_sentence(job), wrong=job.state == FAILED)


def find_component(elem_id: str) -> Any | None:
    """The component of this id on the page that is being built."""
    from gradio.context import Context

    blocks = Context.root_block.blocks.values() if Context.root_block else ()
    return next((block for block in blocks if getattr(block, "elem_id", None) == elem_id), None)
