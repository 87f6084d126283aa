"""Comparing two settings, and two machines."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..controls import ROWS, a_control, a_text_of_changes, connect_controls
from ..events import (
    ACTIONS,
    LIVE,
    QUIET,
    a_button,
    a_list,
    a_text,
    forget_when_changed,
    in_the_browser,
    kept_out_of_defaults,
    markup,
    show_stream,
)
from ..progress import sentence
from ..texts import CHANGES, COMPARE_FIRST, PASTE_HERE, REPORT_EXPLAINED, REPORT_FILES
from .handlers import ComparePanel
from .markup import style_html
from .sides import CURRENT, OFF
from .text_to_image import USUAL_SAMPLER, sampler_names

ELEM_ID, FACTS_ID = "onediff_compare", "onediff_facts_page"
# The elements of the txt2img tab that hold the prompt, the size and so on, in the order of build_order.
COPY_FROM_TXT2IMG = """(...values) => {
  const names = ["prompt", "neg_prompt", "width", "height", "steps", "cfg_scale", "sampling", "seed"];
  return names.map((name, place) => {
    const fields = "textarea, input[type=number], input:not([type=range]):not([type=file])";
    const field = document.querySelector(`#txt2img_${name}`)?.querySelector(fields);
    if (!field || (field.value === "" && !name.endsWith("prompt"))) return values[place];
    return typeof values[place] === "number" ? Number(field.value) : field.value;
  });
}"""
COPY = """async (text) => {
  const say = (words) => [`<p class="onediff-result" role="status">${words}</p>`];
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.querySelector("#onediff_facts textarea");
    area.focus();
    area.select();
    if (!document.execCommand("copy")) return say("The browser does not let us copy: press Ctrl+C.");
  }
  return say("Copied. Paste it on the other machine.");
}"""


def build_compare_page(panel: ComparePanel, opened: Callable[..., Any]) -> None:
    """The comparison of two settings, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=ELEM_ID):
        ComparePage(panel, opened).build()


class ComparePage:
    """Puts the components on the page that is being built, and connects them with the panel."""

    def __init__(self, panel: ComparePanel, opened: Callable[..., Any]) -> None:
        self.panel, self.opened = panel, opened
        self.job = gr.State(None)

    def build(self) -> None:
        gr.HTML(style_html(), elem_classes="onediff-hidden")
        gr.HTML("<h3>Two settings, the same seed</h3>")
        with gr.Row():
            sides = [*self.build_side("Left", "left", OFF), *self.build_side("Right", "right", CURRENT)]
        order = self.build_order()
        with gr.Row(elem_classes=ACTIONS):
            compare = a_button("Compare", "compare_start", variant="primary")
            cancel = a_button("Cancel", "compare_cancel", interactive=False)
            copy = a_button("Take from txt2img", "compare_copy")
            warm_up = kept_out_of_defaults(gr.Checkbox(
                True, label="Warm up first, so that times can be compared", elem_id="onediff_compare_warm", scale=0,
                min_width=400,
            ))
        told = gr.HTML(sentence(COMPARE_FIRST), elem_id="onediff_compare_told", elem_classes=LIVE)
        summary = markup("compare_summary")
        seeds = kept_out_of_defaults(gr.Radio(
            [], label="Images of", visible=False, elem_id="onediff_compare_seeds",
        ))
        images, numbers = markup("compare_images"), markup("compare_numbers")
        with gr.Row(elem_classes=ACTIONS, visible=False) as saving:
            save = a_button("Save report", "compare_save")
            saved = markup("compare_saved")
        files = gr.File(
            label=REPORT_FILES, file_count="multiple", visible=False, interactive=False,
            elem_id="onediff_compare_files",
        )

        # The user may have made presets since the page was built.
        self.opened(self.panel.refresh, inputs=[], outputs=[sides[0], sides[2]], queue=False, **QUIET)
        copy.click(None, inputs=order[:8], outputs=order[:8], api_name=False, **in_the_browser(COPY_FROM_TXT2IMG))
        show_stream([compare.click], self.panel.follow, [*sides, *order, warm_up],
                    [told, summary, seeds, images, numbers, saving, saved, files, self.job, cancel])
        cancel.click(self.panel.cancel, inputs=[self.job], outputs=[told], queue=False, **QUIET)
        forget_when_changed([*sides, *order], told)
        seeds.input(self.panel.choose, inputs=[seeds, self.job], outputs=[images], queue=False, **QUIET)
        save.click(self.panel.save, inputs=[self.job], outputs=[saved, files], queue=False, **QUIET)

    def build_side(self, label: str, name: str, chosen: str) -> list[Any]:
        """What chooses the settings of a side: one of the list, and the accordion's controls for changes on top."""
        tab = f"compare_{name}"
        with gr.Column(min_width=280):
            choice = a_list(label, self.panel.choices(), chosen, tab)
            with gr.Column(visible=chosen != OFF, elem_classes="onediff-side") as on_top:
                controls = []
                for names in ROWS:
                    with gr.Row(elem_classes="onediff-run"):
                        controls += [a_control(tab, name) for name in names]
                changes = kept_out_of_defaults(a_text_of_changes(tab, f"{label}: {CHANGES[0].lower()}{CHANGES[1:]}"))
                told = markup(f"{tab}_told")
        choice.change(
            lambda choice: gr.update(visible=choice != OFF), inputs=[choice], outputs=[on_top], queue=False, **QUIET
        )
        connect_controls(tab, [choice, changes], controls, told, self.panel.settings_of, str, self.opened)
        return [choice, changes]

    def build_order(self) -> list[Any]:
        """What the images shall be, in the order of request_of's arguments."""
        with gr.Row():
            # In columns as the sides are, so that they stand in line.
            with gr.Column(min_width=280):
                prompt = a_text("Prompt", "compare_prompt", lines=2)
            with gr.Column(min_width=280):
                negative = a_text("Negative prompt", "compare_negative", lines=2)
        names = sorted(sampler_names(), key=lambda name: name != USUAL_SAMPLER)
        with gr.Row(elem_classes="onediff-compare-numbers"):
            width, height = number("Width", "width", 512, 8), number("Height", "height", 512, 8)
            steps = number("Steps", "steps", 20)
            cfg = kept_out_of_defaults(gr.Number(
                7, label="CFG scale", elem_id="onediff_compare_cfg", min_width=90,
            ))
            sampler = a_list("Sampler", names, names[0], "compare_sampler")
            seed = number("Seed", "seed", -1)
            images = number("Images", "images", 1)
        return [prompt, negative, width, height, steps, cfg, sampler, seed, images]


def build_facts_page(panel: ComparePanel, opened: Callable[..., Any]) -> None:
    """The comparison of two machines, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=FACTS_ID):
        gr.HTML("<h3>The same seed, another image? Compare the machines</h3>")
        gr.HTML(f'<p class="onediff-reason">{" ".join(REPORT_EXPLAINED)}</p>')
        with gr.Row():
            with gr.Column(min_width=320):
                # gradio 4 would scroll to its end.
                mine = a_text("This machine", "facts", lines=12, max_lines=12, interactive=False, autoscroll=False)
                with gr.Row(elem_classes=ACTIONS):
                    copy, copied = a_button("Copy report", "facts_copy", variant="primary"), markup("compare_copied")
            with gr.Column(min_width=320):
                theirs = a_text(
                    "Another machine's report", "other_facts", lines=12, max_lines=12, placeholder=PASTE_HERE,
                )
        found = markup("compare_differences")
        # What the page shows may be old by now.
        fresh = copy.click(panel.report, inputs=[], outputs=[mine], queue=False, **QUIET)
        fresh.then(None, inputs=[mine], outputs=[copied], api_name=False, **in_the_browser(COPY))
        theirs.change(panel.differences, inputs=[theirs], outputs=[found], queue=False, **QUIET)
        opened(lambda: (panel.report(), ""), inputs=[], outputs=[mine, copied], queue=False, **QUIET)


def number(label: str, name: str, value: int, step: int = 1) -> gr.Number:
    """Without bounds: gradio refuses what is beyond them in words that name no field. job.py says more."""
    return kept_out_of_defaults(gr.Number(
        value, label=label, precision=0, step=step, elem_id=f"onediff_compare_{name}",
        min_width=90,
    ))
