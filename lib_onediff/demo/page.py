"""The page: txt2img, the tabs that scripts add, and the settings."""
from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import gradio as gr

from .generation_tab import build_generation_tab
from .modules import paths, script_callbacks, scripts, shared
from .modules.options import OptionInfo

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Ubuntu", "sans-serif")
TAGS = re.compile(r"<[^>]*>")
MONOSPACE_FONTS = ("ui-monospace", "Consolas", "Liberation Mono", "monospace")


def appearance() -> dict[str, Any]:
    """What gr.mount_gradio_app gives the page: theme, styles and scripts."""
    theme = gr.themes.Default(
        primary_hue="orange", secondary_hue="orange", neutral_hue="slate", radius_size="md", font=FONTS,
        font_mono=MONOSPACE_FONTS,
    ).set(slider_color="*primary_500", slider_color_dark="*primary_500")
    # gradio rewrites the rules of css; the extension's own must reach the browser as they are, as in a WebUI.
    extension = Path(paths.script_path)
    scripts_of_page = "".join(f"<script>{read(file)}</script>" for file in sorted(extension.glob("javascript/*.js")))
    head = f"<style>{read(extension / 'style.css')}</style>{scripts_of_page}"
    return {"theme": theme, "css": read(Path(__file__).with_name("page.css")), "head": head}


def build_page() -> gr.Blocks:
    """Build the page, the scripts' components included."""
    script_callbacks.call_all("before_ui")
    # Outside of the page, as in a WebUI: what is built inside stands there already.
    tabs = [tab for tabs in script_callbacks.call_all("ui_tabs") for tab in tabs or ()]
    with gr.Blocks(title="OneDiff", analytics_enabled=False) as page:
        model = " · ".join(filter(None, (shared.sd_model.name, shared.sd_model.about)))
        gr.HTML(f"<h1>OneDiff</h1><span>{html.escape(model)}</span>", elem_id="onediff_header")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("txt2img", id="txt2img", elem_id="tab_txt2img"):
                build_generation_tab(scripts.scripts_txt2img)
            for content, title, elem_id in tabs:
                with gr.Tab(title, id=elem_id, elem_id=f"tab_{elem_id}"):
                    content.render()
            with gr.Tab("Settings", id="settings", elem_id="tab_settings"):
                build_settings_tab(page)
    return page


def read(file: Path) -> str:
    """The text of a file; none when there is no such file."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def build_settings_tab(page: gr.Blocks) -> None:
    """Build the tab inside the open gradio context; page shows the values in force whenever it is loaded."""
    with gr.Row():
        apply = gr.Button("Apply settings", variant="primary", elem_id="settings_submit", scale=0, min_width=200)
    result = gr.HTML(elem_id="settings_result")
    with gr.Column(elem_id="settings_onediff", elem_classes="settings-section"):
        components = {key: option_component(key, info) for key, info in shared.opts.data_labels.items()}
    apply.click(
        lambda *values: apply_settings(dict(zip(components, values, strict=True))), inputs=list(components.values()),
        outputs=[result], show_progress="hidden", api_visibility="private",
    )
    page.load(
        lambda: [getattr(shared.opts, key) for key in components], inputs=[], outputs=list(components.values()),
        show_progress="hidden", api_visibility="private",
    )


def option_component(key: str, info: OptionInfo) -> Any:
    """The component of one option."""
    return info.component(
        value=getattr(shared.opts, key), label=info.label, info=html.unescape(TAGS.sub("", info.explanation)),
        elem_id=f"setting_{key}", **info.component_args,
    )


def apply_settings(values: dict[str, Any]) -> str:
    """Set and save the options; what happened, as markup."""
    changed, problems = shared.opts.set_and_save(values, shared.config_filename)
    for problem in problems:
        # gradio shows it as markup.
        gr.Warning(html.escape(problem))
    count = {0: "No setting", 1: "1 setting"}.get(len(changed), f"{len(changed)} settings")
    names = f": {', '.join(changed)}" if changed else ""
    return html.escape(" ".join([f"{count} changed{names}.", *problems]))
