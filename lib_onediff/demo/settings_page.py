"""The Settings tab: every option that the host and its scripts have registered, by section."""
from __future__ import annotations

import html
import re
from typing import Any

import gradio as gr

from .modules import shared
from .modules.options import OptionInfo

TAGS = re.compile(r"<[^>]*>")


def build_settings_tab(page: gr.Blocks) -> None:
    """Build the tab inside the open gradio context; page shows the values in force whenever it is loaded."""
    labels = shared.opts.data_labels
    sections = sorted({info.section for info in labels.values()}, key=lambda section: section[1])
    with gr.Row():
        apply = gr.Button("Apply settings", variant="primary", elem_id="settings_submit", scale=0, min_width=200)
    result = gr.HTML(elem_id="settings_result")
    components: dict[str, Any] = {}
    for identifier, title in sections:
        with gr.Column(elem_id=f"settings_{identifier}", elem_classes="settings-section"):
            gr.Markdown(f"### {title}")
            for key, info in labels.items():
                if info.section == (identifier, title):
                    components[key] = option_component(key, info)
    outputs = list(components.values())
    shown = {key for key, info in labels.items() if info.do_not_save}
    settable = {key: component for key, component in components.items() if key not in shown}
    apply.click(
        lambda *values: apply_settings(list(settable), values), inputs=list(settable.values()), outputs=[result],
        show_progress="hidden", api_name=False,
    )
    page.load(
        lambda: [getattr(shared.opts, key) for key in components], inputs=[], outputs=outputs, show_progress="hidden",
        api_name=False,
    )


def option_component(key: str, info: OptionInfo) -> Any:
    """The component of one option."""
    value = getattr(shared.opts, key)
    kinds = {bool: gr.Checkbox, int: gr.Number, float: gr.Number, list: gr.CheckboxGroup}
    make = info.component or kinds.get(type(info.default), gr.Textbox)
    explanation = html.unescape(TAGS.sub("", info.comment_after)).strip()
    if explanation.startswith("(") and explanation.endswith(")"):
        explanation = explanation[1:-1]
    return make(
        value=value, label=info.label, info=explanation or None, elem_id=f"setting_{key}", **info.arguments()
    )


def apply_settings(keys: list[str], values: tuple[Any, ...]) -> str:
    """Set and save the options; what happened, as markup."""
    changed, problems = [], []
    for key, value in zip(keys, values, strict=True):
        info = shared.opts.data_labels[key]
        if isinstance(info.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        problem = info.problem(value)
        if problem:
            problems.append(f"{info.label} {problem}.")
        else:
            is_new = shared.opts.set(key, value)
            if getattr(shared.opts, key) != value:
                problems.append(f"{info.label} did not accept {value!r}.")
            elif is_new:
                changed.append(info.label)
    shared.opts.save(shared.config_filename)
    for problem in problems:
        # gradio shows it as markup.
        gr.Warning(html.escape(problem))
    count = {0: "No setting", 1: "1 setting"}.get(len(changed), f"{len(changed)} settings")
    names = f": {', '.join(changed)}" if changed else ""
    return html.escape(" ".join([f"{count} changed{names}.", *problems]))
