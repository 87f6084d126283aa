"""The page: txt2img, img2img, the tabs that scripts add, and the settings."""
from __future__ import annotations

import html
from pathlib import Path

import gradio as gr

from .generation_tab import build_generation_tab
from .modules import paths, script_callbacks, scripts, shared
from .settings_page import build_settings_tab

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Ubuntu", "sans-serif")
EXTENSION_STYLE, EXTENSION_SCRIPTS = Path(paths.script_path, "style.css"), Path(paths.script_path, "javascript")
MONOSPACE_FONTS = ("ui-monospace", "Consolas", "Liberation Mono", "monospace")


def build_page() -> gr.Blocks:
    """Build the page and note the scripts' default arguments."""
    script_callbacks.before_ui_callback()
    theme = gr.themes.Default(
        primary_hue="orange", secondary_hue="orange", neutral_hue="slate", radius_size="md", font=FONTS,
        font_mono=MONOSPACE_FONTS,
    ).set(slider_color="*primary_500", slider_color_dark="*primary_500")
    # gradio rewrites the rules of css; the extension's own must reach the browser as they are, as in a WebUI.
    own, extensions = (style_sheet(file) for file in (Path(__file__).with_name("page.css"), EXTENSION_STYLE))
    head = f"<style>{extensions}</style>{script_elements(EXTENSION_SCRIPTS)}"
    # Outside of the page, as in a WebUI: what is built inside stands there already.
    tabs = script_callbacks.ui_tabs_callback()
    with gr.Blocks(title="OneDiff", theme=theme, css=own, head=head, analytics_enabled=False) as page:
        gr.HTML(f"<h1>OneDiff</h1><span>{html.escape(shared.sd_model.name)}</span>", elem_id="onediff_header")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("txt2img", id="txt2img", elem_id="tab_txt2img"):
                build_generation_tab(scripts.scripts_txt2img, "txt2img")
            with gr.Tab("img2img", id="img2img", elem_id="tab_img2img"):
                build_generation_tab(scripts.scripts_img2img, "img2img")
            for content, title, elem_id in tabs:
                with gr.Tab(title, id=elem_id, elem_id=f"tab_{elem_id}"):
                    content.render()
            with gr.Tab("Settings", id="settings", elem_id="tab_settings"):
                build_settings_tab(page)
    for runner in (scripts.scripts_txt2img, scripts.scripts_img2img):
        if runner is not None:
            runner.read_default_arguments()
    return page


def style_sheet(file: Path) -> str:
    """The rules in file; none when there is no such file."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def script_elements(folder: Path) -> str:
    """The scripts in folder, for the page's head; none when there is no such folder."""
    return "".join(f"<script>{file.read_text(encoding='utf-8')}</script>" for file in sorted(folder.glob("*.js")))
