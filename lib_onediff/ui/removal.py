"""Remove what OneDiff keeps in a WebUI's files, for users who uninstall it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr

from ..core.settings import HOST_KEY_PREFIX
from ..runtime.runtime import runtime
from .amounts import counted, memory
from .chore import attempted
from .events import HIDDEN, QUIET, a_button, a_place
from .markup import sentence
from .settings_tab import for_the_browser

# What A1111 and Forge keep of our script's and our tab's components.
DEFAULTS_OF_THE_PAGE = ("customscript/onediff.py/", "onediff/")
REMOVED = (
    "Removed: {}, {} and {} of disk. Now stop the WebUI and delete the extension's folder; until then OneDiff runs on "
    "its defaults."
)


def build_for_the_settings() -> None:
    """Put out of sight what javascript/onediff_settings.js reads and clicks: a WebUI builds its settings itself."""
    with gr.Column(elem_classes=HIDDEN):
        gr.HTML(for_the_browser())
        removed, button = a_place("removed"), a_button("", "remove")
        button.click(removal, inputs=[], outputs=[removed], queue=False, **QUIET)


def removal() -> str:
    """What came of removing, as markup."""
    told, failed = attempted("Removing", remove_what_is_kept)
    return sentence(told, wrong=failed)


def remove_what_is_kept() -> str:
    """Remove our settings, the page's defaults and the cache folder; until the WebUI ends, nothing is kept any more. A
    sentence for the user. Raises what the WebUI raises where its settings may not be saved."""
    from modules import shared

    opts: Any = shared.opts
    ours = [key for key in opts.data if key.startswith(HOST_KEY_PREFIX)]
    for key in ours:
        del opts.data[key]
    opts.save(shared.config_filename)
    options = [info for key, info in opts.data_labels.items() if key.startswith(HOST_KEY_PREFIX)]
    for info in options:
        # The settings tab would save their defaults with the next change of any.
        info.do_not_save = True
    options[0].onchange()
    page, defaults = Path(getattr(shared.cmd_opts, "ui_config_file", "")), 0
    if page.is_file():
        entries = json.loads(page.read_text(encoding="utf-8"))
        others = {key: value for key, value in entries.items() if not key.startswith(DEFAULTS_OF_THE_PAGE)}
        page.write_text(json.dumps(others, indent=4, ensure_ascii=False), encoding="utf-8")
        defaults = len(entries) - len(others)
    of_the_page = counted(defaults, "default of the page", "defaults of the page")
    return REMOVED.format(counted(len(ours), "setting"), of_the_page, memory(runtime.history.remove()))
