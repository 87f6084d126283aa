"""The OneDiff tab and the accordion as gradio components."""
from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio
from panel_builders import Seen

from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import accordion
from lib_onediff.ui.cache import panel as cache_panel


def tab_of(seen: Seen) -> gradio.Blocks:
    with gradio.Blocks() as tab:
        cache_panel.build_cache_tab(runtime, seen.warmup, seen.queue, seen.panel.exclusively)
    return tab


def handlers(page: gradio.Blocks) -> list[dict[str, Any]]:
    return page.get_config_file()["dependencies"]


def test_no_component_of_the_onediff_tab_is_saved_in_ui_config_json_or_listed_in_the_api(seen: Seen) -> None:
    """By default, a WebUI saves the components of a page in ui-config.json, and gradio lists their handlers in its
    API."""
    tab = tab_of(seen)
    saved = (gradio.Textbox, gradio.Dropdown, gradio.Button, gradio.Number, gradio.Checkbox)
    ours = [block for block in tab.blocks.values() if isinstance(block, saved)]
    assert ours and all(block.do_not_save_to_config for block in ours)
    assert all(handler["api_name"] is False or handler["api_visibility"] == "private" for handler in handlers(tab))


def test_a_dropdown_accepts_a_value_that_is_no_longer_among_its_choices(seen: Seen) -> None:
    """A page that was loaded before a purge may send a model that is gone ("gone" here): gradio must not raise, and the
    handler selects "All models"."""
    every = [*tab_of(seen).blocks.values(), *page_of().blocks.values()]
    lists = [one for one in every if isinstance(one, gradio.Dropdown)]
    assert len(lists) > 3 and all(one.preprocess("gone") == "gone" for one in lists)
    shown = seen.panel.view("{}", "gone", None)
    assert shown[4] == gradio.update(choices=["All models"], value="All models")


def test_no_handler_uses_the_queue_of_gradio_or_is_a_generator(seen: Seen) -> None:
    """If a page is closed while a queued generator runs, gradio 3 never ends the connection, and the WebUI cannot
    reload its UI. Both the OneDiff tab and a page with the accordion are checked."""
    page = page_of()
    for blocks in (tab_of(seen), page):
        # What fills a component when the page loads is gradio's own, and no generator either.
        asked_for = [handler for handler in handlers(blocks) if "load" not in str(handler["targets"])]
        assert asked_for and all(handler["queue"] is False for handler in asked_for)
        assert not any(handler["types"]["generator"] for handler in handlers(blocks))


def both_statuses() -> tuple[str, str]:
    return "title", "status"


def page_of() -> gradio.Blocks:
    """A page with the accordion, which is connected to the component that the WebUI changes after a generation."""
    with gradio.Blocks() as page:
        _, built = accordion.build_accordion("txt2img", both_statuses, lambda *given: Settings())
        made = gradio.Textbox(visible=False, elem_id="generation_info_txt2img")
        accordion.connect(made, "txt2img", built, both_statuses)
    return page
