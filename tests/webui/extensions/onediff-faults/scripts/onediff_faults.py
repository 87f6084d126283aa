"""Makes OneDiff's hooks fail on request, inside a real WebUI: for tests/webui/test_faults.py, and for nothing else.

Link this folder into the WebUI's extensions folder beside OneDiff. GET /onediff-faults/v1 tells the hooks' names, the
one that fails now, and how many tracebacks OneDiff has logged; POST {"hook": name} chooses one, {"hook": null} none.
"""
from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from fastapi import Body
from modules import script_callbacks

MESSAGE = "onediff-faults made this fail:"
# hook: what of ours is made to raise, as module and dotted name, for each kind of host that has it.
ANY_HOST = {
    "begin of a generation": ("lib_onediff.ui.run_settings", "use_for_sampling"),
    "begin of a sampling": ("lib_onediff.hosts.sampler_schedule", "sampling_of"),
    "sampler's schedule": ("lib_onediff.hosts.sampler_schedule", "Listener._hear"),
    "UNet, before the route": ("lib_onediff.runtime.runtime", "Runtime.adopt"),
    "UNet, the route": ("lib_onediff.runtime.card_route", "CardRoute.serve"),
    "UNet, the decision": ("lib_onediff.runtime.runtime", "Runtime.run"),
    "VAE, before the route": ("lib_onediff.hosts.hooks", "check_original"),
    "VAE, the route": ("lib_onediff.runtime.vae.route", "DecoderRoute.decode"),
}
FORGE_FAMILY = {
    "end of a generation": ("lib_onediff.hosts.forge.adapter", "Forge.after_run"),
    "UNet, the call": ("lib_onediff.hosts.forge.adapter", "unet_call"),
    "UNet, once a sampling": ("lib_onediff.hosts.forge.adapter", "check_storage"),
}
A1111 = {
    "end of a generation": ("lib_onediff.hosts.a1111.adapter", "A1111.after_run"),
    "UNet, the call": ("lib_onediff.hosts.a1111.adapter", "foreign_forward"),
    "LoRA": ("lib_onediff.hosts.a1111.layers", "wanted_networks"),
}
HOSTS = {"forge": FORGE_FAMILY, "ldm_patched": FORGE_FAMILY, "a1111": A1111}


class Faults:
    """The hook that fails now, and what stood there before."""

    def __init__(self) -> None:
        self.hook: str | None = None
        self._undo: tuple[Any, str, Any] | None = None
        self.tracebacks = 0
        log = logging.getLogger("onediff")
        log.addFilter(self.count)

    def count(self, record: logging.LogRecord) -> bool:
        self.tracebacks += record.exc_info is not None
        return True

    def hooks(self) -> dict[str, tuple[str, str]]:
        from lib_onediff.runtime.runtime import runtime

        return {**ANY_HOST, **HOSTS.get(runtime.webui.name, {})}

    def choose(self, hook: str | None) -> None:
        if self._undo is not None:
            holder, name, before = self._undo
            setattr(holder, name, before)
        self.hook, self._undo = hook, None
        if hook is None:
            return
        module, path = self.hooks()[hook]
        *parents, name = path.split(".")
        holder = importlib.import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        self._undo = (holder, name, holder.__dict__[name])
        setattr(holder, name, raising(hook))

    def told(self) -> dict[str, Any]:
        return {"hooks": sorted(self.hooks()), "hook": self.hook, "tracebacks": self.tracebacks}


def raising(hook: str) -> Callable[..., Any]:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise IndexError(f"{MESSAGE} {hook}")

    return fails


def add_routes(demo: Any, app: Any) -> None:
    faults = Faults()

    @app.get("/onediff-faults/v1")
    def told() -> dict[str, Any]:
        return faults.told()

    @app.post("/onediff-faults/v1")
    def choose(hook: str | None = Body(None, embed=True)) -> dict[str, Any]:
        faults.choose(hook)
        return faults.told()


script_callbacks.on_app_started(add_routes)
