"""Functions that scripts register for moments in the host's life. What they raise is logged and goes no further."""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import errors


@dataclass(frozen=True)
class ScriptCallback:
    """A registered function and the file of the script that registered it."""

    script: str
    callback: Callable[..., Any]


callback_map: dict[str, list[ScriptCallback]] = {}


def register(moment: str, callback: Callable[..., Any]) -> None:
    callers = (frame.filename for frame in inspect.stack(0) if frame.filename != __file__)
    callback_map[f"callbacks_{moment}"].append(ScriptCallback(next(callers, "unknown file"), callback))


def clear_callbacks() -> None:
    """Forget every registered function."""
    for callbacks in callback_map.values():
        callbacks.clear()


def call_all(moment: str, *arguments: Any) -> list[Any]:
    """Call every function registered for moment and return what those that did not fail returned."""
    results = []
    for registered in list(callback_map[f"callbacks_{moment}"]):
        try:
            results.append(registered.callback(*arguments))
        except Exception:
            errors.report(f"Error executing callback {moment} for {registered.script}", exc_info=True)
    return results


def registrar(moment: str) -> Callable[..., None]:
    """The function by which scripts register for a moment."""
    callback_map[f"callbacks_{moment}"] = []
    return lambda callback: register(moment, callback)


# callback(demo, app): the page (gradio Blocks) and the server (FastAPI) exist.
on_app_started = registrar("app_started")
# callback(sd_model): a model was loaded.
on_model_loaded = registrar("model_loaded")
# callback() returns (gradio Blocks, title, element id) for each tab to add.
on_ui_tabs = registrar("ui_tabs")
# callback() adds its options to shared.opts.
on_ui_settings = registrar("ui_settings")
# callback(params): a denoiser begins a step. This host has none: a pipeline calls its UNet itself.
on_cfg_denoiser = registrar("cfg_denoiser")
# callback(): the page is about to be built.
on_before_ui = registrar("before_ui")
# callback() undoes what the script changed in the host.
on_script_unloaded = registrar("script_unloaded")
