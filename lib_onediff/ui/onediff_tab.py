"""The OneDiff tab: the per-resolution cache, presets, comparing settings, comparing machines."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..consistency import Facts, machine_facts, onediff_facts
from ..hosts.contract import WebUI
from ..hosts.host_facts import checkpoint_name, host_facts
from ..options.presets import all_presets
from ..options.settings import Settings
from ..prewarm.worker import WarmUp
from ..runtime.runtime import Runtime
from .cache.panel import build_cache_tab
from .compare.handlers import ComparePanel
from .compare.tab import build_compare_page, build_facts_page
from .compare.text_to_image import TextToImage, output_folder
from .presets import PresetsPanel, Store, build_presets_page
from .settings_form import build_settings_form

TITLE, ELEM_ID = "OneDiff", "onediff"
CACHE, PRESETS, COMPARE, CONSISTENCY = "Cache", "Presets", "Compare", "Consistency"


def build_onediff_tab(
    runtime: Runtime, warmup: WarmUp, webui: WebUI, make_script: Callable[[], Any],
    standing: Callable[[], Settings], store: Store,
) -> gr.Blocks:
    """The tab's content, for on_ui_tabs: (build_onediff_tab(...), TITLE, ELEM_ID).

    make_script: our script's class. standing: the settings tab's settings. store: sets and keeps options of the
    settings tab; see presets.py.
    """

    def facts() -> Facts:
        tuned = runtime.history.tuned()
        return {
            **machine_facts(), **host_facts(webui.name), **onediff_facts(standing(), runtime.status(), tuned),
        }

    def presets() -> dict[str, dict[str, Any]]:
        return all_presets(standing(), standing().own_presets, checkpoint_name())

    maker = TextToImage(make_script, runtime.status)
    panel = ComparePanel(maker, webui.exclusively, standing, presets, facts, output_folder)
    with gr.Blocks(analytics_enabled=False) as tab, gr.Tabs(elem_id="onediff_pages"):
        with gr.Tab(CACHE, elem_id="onediff_page_cache"):
            build_cache_tab(runtime, warmup, webui.exclusively)
        with gr.Tab(PRESETS, elem_id="onediff_page_presets") as page:
            build_presets_page(PresetsPanel(lambda: runtime.settings, checkpoint_name, store), page.select)
        with gr.Tab(COMPARE, elem_id="onediff_page_compare") as page:
            build_compare_page(panel, page.select)
        with gr.Tab(CONSISTENCY, elem_id="onediff_page_consistency") as page:
            build_facts_page(panel, page.select)
    with tab:
        build_settings_form()
    return tab
