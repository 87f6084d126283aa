"""Functions that scripts register for moments in the host's life. What they raise is logged and goes no further."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import errors


@dataclass(frozen=True)
class ScriptCallback:
    """A registered function and the file of the script that registered it."""

    script: str
    callback: Callable[..., Any]


callback_map: dict[str, list[ScriptCallback]] = {
    "callbacks_app_started": [],
    "callbacks_model_loaded": [],
    "callbacks_ui_tabs": [],
    "callbacks_ui_settings": [],
    "callbacks_before_ui": [],
    "callbacks_infotext_pasted": [],
    "callbacks_script_unloaded": [],
}


def register(moment: str, callback: Callable[..., Any]) -> None:
    callers = (frame.filename for frame in inspect.stack(0) if frame.filename != __file__)
    callback_map[f"callbacks_{moment}"].append(ScriptCallback(next(callers, "unknown file"), callback))


def clear_callbacks() -> None:
    """Forget every registered function."""
    for callbacks in callback_map.values():
        callbacks.clear()


def call_all(moment: str, *arguments: Any, backwards: bool = False) -> list[Any]:
    """Call every function registered for moment and return what those that did not fail returned."""
    results = []
    callbacks = list(callback_map[f"callbacks_{moment}"])
    for registered in reversed(callbacks) if backwards else callbacks:
        try:
            results.append(registered.callback(*arguments))
        except Exception:
            errors.report(f"Error executing callback {moment} for {registered.script}", exc_info=True)
    return results


def app_started_callback(demo: Any, app: Any) -> None:
    call_all("app_started", demo, app)


def model_loaded_callback(sd_model: Any) -> None:
    call_all("model_loaded", sd_model)


def ui_tabs_callback() -> list[tuple[Any, str, str]]:
    return [tab for tabs in call_all("ui_tabs") for tab in tabs or ()]


def ui_settings_callback() -> None:
    call_all("ui_settings")


def before_ui_callback() -> None:
    call_all("before_ui", backwards=True)


def infotext_pasted_callback(infotext: str, params: dict[str, Any]) -> None:
    call_all("infotext_pasted", infotext, params)


def script_unloaded_callback() -> None:
    call_all("script_unloaded", backwards=True)


def on_app_started(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback(demo, app) runs when the page (gradio Blocks) and the server (FastAPI) exist."""
    register("app_started", callback)


def on_model_loaded(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback(sd_model) runs after a model was loaded."""
    register("model_loaded", callback)


def on_ui_tabs(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback() returns (gradio Blocks, title, element id) for each tab to add."""
    register("ui_tabs", callback)


def on_ui_settings(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback() adds its options to shared.opts."""
    register("ui_settings", callback)


def on_before_ui(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback() runs before the page is built."""
    register("before_ui", callback)


def on_infotext_pasted(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback(infotext, parameters) runs when an infotext was parsed, and may change parameters."""
    register("infotext_pasted", callback)


def on_script_unloaded(callback: Callable[..., Any], *, name: str | None = None) -> None:
    """callback() undoes what the script changed in the host."""
    register("script_unloaded", callback)
