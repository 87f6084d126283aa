"""Callbacks that scripts register for events of the WebUI. Their exceptions are logged and not passed on."""
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

log = logging.getLogger("onediff")
# The callbacks of each event, in the order of registration.
callback_map: dict[str, list[Callable[..., Any]]] = {}


def call_all(moment: str, *arguments: Any) -> list[Any]:
    """Call every callback that is registered for an event, in the order of registration. Returns a list of their
    results; a callback that raised an exception has none. moment: the event's name, such as "model_loaded"."""
    results = []
    for callback in list(callback_map.get(moment, ())):
        try:
            results.append(callback(*arguments))
        except Exception:
            log.exception("the callback %s of %r failed", moment, callback)
    return results


def register(moment: str, callback: Callable[..., Any]) -> None:
    """Register a callback for an event. moment: see call_all."""
    callback_map.setdefault(moment, []).append(callback)


on_app_started = partial(register, "app_started")  # callback(demo, app): the page (Blocks) and the server (FastAPI)
on_model_loaded = partial(register, "model_loaded")  # callback(sd_model)
on_ui_tabs = partial(register, "ui_tabs")  # callback() returns (Blocks, title, element id) for each tab to add
on_ui_settings = partial(register, "ui_settings")  # callback() adds its options to shared.opts
on_cfg_denoiser = partial(register, "cfg_denoiser")  # never called: a pipeline calls its UNet itself
on_before_ui = partial(register, "before_ui")  # callback(): the page is about to be built
on_script_unloaded = partial(register, "script_unloaded")  # callback() undoes what the script changed in the host
