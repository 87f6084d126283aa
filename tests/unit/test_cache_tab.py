"""The OneDiff tab and the accordion's button as they are put on a page."""
from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio
from panel_builders import Seen, text_of

from lib_onediff.core.settings import OFF_IN_SETTINGS, Settings
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import accordion
from lib_onediff.ui.cache import panel as cache_panel


def tab_of(seen: Seen) -> gradio.Blocks:
    with gradio.Blocks() as tab:
        cache_panel.build_cache_tab(runtime, seen.warmup, seen.panel.exclusively)
    return tab


def handlers(page: gradio.Blocks) -> list[dict[str, Any]]:
    return page.get_config_file()["dependencies"]


def test_nothing_of_the_tab_gets_into_the_hosts_defaults_or_api(seen: Seen) -> None:
    tab = tab_of(seen)
    saved = (gradio.Textbox, gradio.Dropdown, gradio.Button, gradio.Number, gradio.Checkbox)
    ours = [block for block in tab.blocks.values() if isinstance(block, saved)]
    assert ours and all(block.do_not_save_to_config for block in ours)
    assert all(handler["api_name"] is False for handler in handlers(tab))


def test_no_handler_waits_in_gradios_queue(seen: Seen) -> None:
    """gradio 3 never ends a queued generator whose page was left, and the WebUI then cannot reload its UI."""
    page = page_of(seen.warmup, ["width", "height", "batch", "accordion", "info"])
    for blocks in (tab_of(seen), page):
        # What fills a component when the page loads is gradio's own, and no generator either.
        asked_for = [handler for handler in handlers(blocks) if handler["targets"] != [(None, "load")]]
        assert asked_for and all(handler["queue"] is False for handler in asked_for)
        assert not any(handler["types"]["generator"] for handler in handlers(blocks))


def both_statuses() -> tuple[str, str]:
    return "title", "status"


def clicked(seen: Seen, page: gradio.Blocks, *values: Any) -> tuple[str, str]:
    """What the accordion's button says and what is shown beside it, when what it began is over."""
    functions = page.fns.values() if isinstance(page.fns, dict) else page.fns
    handler = {function.fn.__name__: function.fn for function in functions if function.fn}
    said, beside, asked = handler["begin"](*values)
    if asked is not None:
        assert said == "128x64 x2" and 'role="progressbar"' in beside
        seen.look_until_idle()
        said, beside, *statuses = handler["follow"](asked)
        assert statuses == ["title", "status"]
    return said, beside


def page_of(warmup: WarmUp, order: list[str]) -> gradio.Blocks:
    """A page whose parts are created in this order."""
    parts: dict[str, Callable[[], Any]] = {
        "width": lambda: gradio.Slider(64, 4096, value=128, elem_id="txt2img_width"),
        "height": lambda: gradio.Slider(64, 4096, value=64, elem_id="txt2img_height"),
        "batch": lambda: gradio.Slider(1, 8, value=1, elem_id="txt2img_batch_size"),
        "accordion": lambda: accordion.build_accordion("txt2img", both_statuses, lambda *given: Settings()),
        "info": lambda: gradio.Textbox(visible=False, elem_id="generation_info_txt2img"),
    }
    with gradio.Blocks() as page:
        for part in order:
            made = parts[part]()
            if part != "accordion":
                accordion.connect(made, "txt2img", both_statuses, warmup)
    return page


@pytest.mark.parametrize("order", [
    ["width", "height", "batch", "accordion", "info"], ["accordion", "batch", "height", "width", "info"],
])
def test_the_accordions_button_warms_the_size_that_is_set(seen: Seen, order: list[str]) -> None:
    said, beside = clicked(seen, page_of(seen.warmup, order), 128, 64.0, 2)
    assert said == "✓ 128x64 x2 is ready" and text_of(beside).startswith("done in")
    (job,) = seen.warmup.jobs()
    assert (job.size, job.source) == (Size(128, 64, 2), "accordion")


@pytest.mark.parametrize("enabled, values, part", [
    (True, (None, 64, 1), "must be a number"), (True, (64.5, 64, 1), "whole number"), (True, (65, 64, 1), "multiple"),
    (False, (64, 64, 1), f"{html.escape(OFF_IN_SETTINGS)}, so nothing can be made ready."),
])
def test_the_accordions_button_refuses_with_a_sentence(
    seen: Seen, enabled: bool, values: tuple[Any, ...], part: str
) -> None:
    runtime.configure(Settings(enabled=enabled))
    page = page_of(seen.warmup, ["width", "height", "batch", "accordion", "info"])
    assert part in clicked(seen, page, *values)[1]
    assert seen.warmup.jobs() == []
