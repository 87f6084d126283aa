"""How a host's call of its UNet becomes ours: one adapter for each kind of WebUI, and diffusers.

this_webui() gives the adapter of the WebUI that we run in. Import the adapters' packages only inside their host.
"""
from __future__ import annotations

import importlib
import logging

from ..core.refusal import Refusal
from ..runtime.runtime import runtime
from .contract import WebUI, offers

log = logging.getLogger("onediff")

# The kinds of host: a module that only this kind offers, and where its adapter is: a class, which raises Refusal for a
# release that lacks something, beside a function `release` that names this one. reForge carries A1111's modules besides
# its own, so it is asked for first. A host that is ours brings its adapter along.
HOSTS = {
    "backend.nn.unet": (".forge.adapter", "Forge"),
    "ldm_patched.ldm.modules.diffusionmodules.openaimodel": (".ldm_patched", "LdmPatched"),
    "modules.sd_hijack_unet": (".a1111.adapter", "A1111"),
    "modules.onediff_adapter": ("modules.onediff_adapter", "Standalone"),
}


def this_webui() -> WebUI:
    """The adapter of the WebUI that we run in: one for the life of the process, however often scripts are loaded."""
    if runtime.webui is None:
        runtime.webui = runtime.guard.attempt("looking at the WebUI", adapter_of_host)
    if runtime.webui is None:
        runtime.webui = WebUI(unmet="; ".join(runtime.guard.faults))
    return runtime.webui


def adapter_of_host() -> WebUI:
    """Judged by what the host offers, not by what its folders are called."""
    module_path, name = next((adapter for mark, adapter in HOSTS.items() if offers(mark)), ("", ""))
    if not module_path:
        webui = WebUI(unmet="OneDiff does not know this WebUI, and changes nothing in it")
    else:
        module = importlib.import_module(module_path, __name__)
        release = module.release()
        try:
            webui = getattr(module, name)(release)
        except Refusal as refusal:
            webui = WebUI(release, str(refusal))
    if webui.unmet:
        log.warning("%s.", webui.unmet)
    return webui
