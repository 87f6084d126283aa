"""Functions that scripts register for moments in the host's life. What they raise is logged and goes no further."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import errors

callback_map: dict[str, list[Callable[..., Any]]] = {}


def clear_callbacks() -> None:
    """Drop every registered function."""
    for callbacks in callback_map.values():
        callbacks.clear()


def call_all(moment: str, *arguments: Any) -> list[Any]:
    """Call every function registered for moment and return what those that did not fail returned."""
    results = []
    for callback in list(callback_map[moment]):
        try:
            results.append(callback(*arguments))
        except Exception:
            errors.report(f"Error executing callback {moment} of {callback!r}", exc_info=True)
    return results


def register(moment: str, callback: Callable[..., Any]) -> None:
    callback_map[moment].append(callback)


def registrar(moment: str) -> Callable[[Callable[..., Any]], None]:
    """The function by which scripts register for a moment."""
    callback_map[moment] = []
    return lambda callback: register(moment, callback)


on_app_started = registrar("app_started")  # callback(demo, app): the page (Blocks) and the server (FastAPI) exist
on_model_loaded = registrar("model_loaded")  # callback(sd_model)
on_ui_tabs = registrar("ui_tabs")  # callback() returns (Blocks, title, element id) for each tab to add
on_ui_settings = registrar("ui_settings")  # callback() adds its options to shared.opts
on_cfg_denoiser = registrar("cfg_denoiser")  # never called: a pipeline calls its UNet itself
on_before_ui = registrar("before_ui")  # callback(): the page is about to be built
on_script_unloaded = registrar("script_unloaded")  # callback() undoes what the script changed in the host
