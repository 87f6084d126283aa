"""Comparing two settings, and two machines."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..events import (
    ACTIONS,
    QUIET,
    a_button,
    a_list,
    a_text,
    in_the_browser,
    kept_out_of_defaults,
    markup,
    show_stream,
)
from .handlers import ComparePanel
from .job import LEAST_CFG, MOST_CFG, MOST_IMAGES, MOST_STEPS
from .markup import style_html
from .sides import CURRENT, OFF
from .text_to_image import USUAL_SAMPLER, sampler_names

ELEM_ID, FACTS_ID = "onediff_compare", "onediff_facts_page"
CHANGES = "backend eager; verify off"
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
        lists = ComparePage(panel).build()
    # The user may have made presets since the page was built.
    opened(panel.refresh, inputs=[], outputs=lists, queue=False, **QUIET)


class ComparePage:
    """Puts the components on the page that is being built, and connects them with the panel."""

    def __init__(self, panel: ComparePanel) -> None:
        self.panel = panel
        self.job = gr.State(None)

    def build(self) -> list[Any]:
        """The two lists of settings."""
        gr.HTML(style_html(), elem_classes="onediff-hidden")
        gr.HTML("<h3>Two settings, the same seed</h3>")
        with gr.Row():
            sides = [*self.build_side("Left", "left", OFF), *self.build_side("Right", "right", CURRENT)]
        order = self.build_order()
        with gr.Row(elem_classes=ACTIONS):
            compare = a_button("Compare", "compare_start", variant="primary")
            cancel = a_button("Cancel", "compare_cancel")
            copy = a_button("Take from txt2img", "compare_copy")
            warm_up = kept_out_of_defaults(gr.Checkbox(
                True, label="Warm up first, so that times can be compared", elem_id="onediff_compare_warm", scale=0,
                min_width=400,
            ))
        told, summary = markup("compare_told"), markup("compare_summary")
        seeds = kept_out_of_defaults(gr.Radio(
            [], label="Images of", visible=False, elem_id="onediff_compare_seeds",
        ))
        images, numbers = markup("compare_images"), markup("compare_numbers")
        with gr.Row(elem_classes=ACTIONS, visible=False) as saving:
            save = a_button("Save report", "compare_save")
            saved = markup("compare_saved")

        copy.click(None, inputs=order[:8], outputs=order[:8], api_name=False, **in_the_browser(COPY_FROM_TXT2IMG))
        show_stream([compare.click], self.panel.follow, [*sides, *order, warm_up],
                    [told, summary, seeds, images, numbers, saving, self.job])
        cancel.click(self.panel.cancel, inputs=[self.job], outputs=[told], queue=False, **QUIET)
        seeds.input(self.panel.choose, inputs=[seeds, self.job], outputs=[images], queue=False, **QUIET)
        save.click(self.panel.save, inputs=[self.job], outputs=[saved], queue=False, **QUIET)
        return [sides[0], sides[2]]

    def build_side(self, label: str, name: str, chosen: str) -> list[Any]:
        """What chooses the settings of a side: one of the list, and changes on top."""
        with gr.Column(min_width=280):
            choice = a_list(label, self.panel.choices(), chosen, f"compare_{name}")
            changes = a_text(f"{label}: changed options", f"compare_{name}_changes", placeholder=CHANGES)
        return [choice, changes]

    def build_order(self) -> list[Any]:
        """What the images shall be, in the order of request_of's arguments."""
        with gr.Row():
            prompt = a_text("Prompt", "compare_prompt", lines=2, min_width=280)
            negative = a_text("Negative prompt", "compare_negative", lines=2, min_width=280)
        names = sorted(sampler_names(), key=lambda name: name != USUAL_SAMPLER)
        with gr.Row(elem_classes="onediff-compare-numbers"):
            width, height = number("Width", "width", 512, 64, 4096, 8), number("Height", "height", 512, 64, 4096, 8)
            steps = number("Steps", "steps", 20, 1, MOST_STEPS)
            cfg = kept_out_of_defaults(gr.Number(
                7, label="CFG scale", elem_id="onediff_compare_cfg", minimum=LEAST_CFG, maximum=MOST_CFG, min_width=90,
            ))
            sampler = a_list("Sampler", names, names[0], "compare_sampler")
            seed = number("Seed", "seed", -1, -1, 2**32)
            images = number("Images", "images", 1, 1, MOST_IMAGES)
        return [prompt, negative, width, height, steps, cfg, sampler, seed, images]


def build_facts_page(panel: ComparePanel, opened: Callable[..., Any]) -> None:
    """The comparison of two machines, on the page that is being built. opened: the event that it is looked at."""
    with gr.Column(elem_id=FACTS_ID):
        mine = build_facts(panel)
    opened(panel.report, inputs=[], outputs=[mine], queue=False, **QUIET)


def build_facts(panel: ComparePanel) -> gr.Textbox:
    """The component that shows this machine's report."""
    gr.HTML("<h3>The same seed, another image? Compare the machines</h3>")
    gr.HTML('<p class="onediff-reason">The report names everything that the last digits of an image depend on. It has '
            "no paths and no secrets. Copy it here, paste it on the other machine, or the other way round.</p>")
    with gr.Row():
        with gr.Column(min_width=320):
            mine = a_text("This machine", "facts", lines=12, max_lines=12, interactive=False)
            with gr.Row(elem_classes=ACTIONS):
                copy, copied = a_button("Copy report", "facts_copy", variant="primary"), markup("compare_copied")
        with gr.Column(min_width=320):
            theirs = a_text(
                "Another machine's report", "other_facts", lines=12, max_lines=12, placeholder="Paste it here.",
            )
    found = markup("compare_differences")
    # What the page shows may be old by now.
    fresh = copy.click(panel.report, inputs=[], outputs=[mine], queue=False, **QUIET)
    fresh.then(None, inputs=[mine], outputs=[copied], api_name=False, **in_the_browser(COPY))
    theirs.change(panel.differences, inputs=[theirs], outputs=[found], queue=False, **QUIET)
    return mine


def number(label: str, name: str, value: int, least: int, most: int, step: int = 1) -> gr.Number:
    return kept_out_of_defaults(gr.Number(
        value, label=label, precision=0, minimum=least, maximum=most, step=step, elem_id=f"onediff_compare_{name}",
        min_width=90,
    ))
