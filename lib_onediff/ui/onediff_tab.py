"""The OneDiff tab: the per-resolution cache, and comparing settings and machines."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from ..core.jobs import Exclusively, JobQueue
from ..core.settings import Settings
from ..prewarm.worker import WarmUp
from ..runtime.runtime import Runtime
from .cache.panel import build_cache_tab
from .compare.job import Comparisons, TextToImage
from .compare.tab import ComparePanel, build_compare_page
from .consistency import build_facts
from .facts import Facts, host_facts, machine_facts, onediff_facts

TITLE = "OneDiff"
ELEM_ID = "onediff"


def build_onediff_tab(
    runtime: Runtime, warmup: WarmUp, queue: JobQueue, exclusively: Exclusively, make_script: Callable[[], Any],
    standing: Callable[[], Settings], settings_of_run: Callable[..., Settings], release: str,
) -> gr.Blocks:
    """Build the content of the OneDiff tab. The WebUI's callback on_ui_tabs returns it as
    (build_onediff_tab(...), TITLE, ELEM_ID).

    runtime, warmup, queue: the runtime, the pre-warming, and the list of jobs that the page shows. exclusively: the
        adapter's WebUI.exclusively, which runs a function while no image is being made.
    make_script: our script's class. standing: returns the settings tab's settings. settings_of_run: returns the
        settings of a run, given the values of the script arguments; raises ValueError with a sentence. release: the
        WebUI's name and version.
    """

    def facts() -> Facts:
        ours = onediff_facts(standing(), runtime.status(), runtime.history.tuned())
        return {**host_facts(release), **ours, **machine_facts()}

    comparisons = Comparisons(TextToImage(make_script, runtime.status), exclusively, queue)
    panel = ComparePanel(comparisons, queue, standing, settings_of_run)
    with gr.Blocks(analytics_enabled=False) as tab, gr.Tabs(elem_id="onediff_pages"):
        with gr.Tab("Cache", elem_id="onediff_page_cache"):
            build_cache_tab(runtime, warmup, queue, exclusively)
        with gr.Tab("Compare", elem_id="onediff_page_compare") as page:
            build_compare_page(panel)
            build_facts(facts, page.select)
    return tab
