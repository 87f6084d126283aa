"""Adapters, which turn a host's calls into ours: one for each kind of WebUI, and one for diffusers.

this_webui() returns the adapter of the WebUI that OneDiff runs in. Import an adapter's package only in its own host.
"""
from __future__ import annotations

import importlib
import logging

from ..core.refusal import Refusal
from ..runtime.runtime import runtime
from .contract import WebUI, offers

log = logging.getLogger("onediff")

# The kinds of WebUIs: a Python module by which it is recognised, and the module and class of its adapter. The adapter's
# module has a function `release`, which returns the WebUI's name and version. The class raises Refusal if the release
# lacks something. The first kind whose Python module can be imported counts; reForge also has A1111's module, so it
# comes before A1111. The demo contains its own adapter.
HOSTS = {
    "backend.nn.unet": (".forge.adapter", "Forge"),
    "ldm_patched.ldm.modules.diffusionmodules.openaimodel": (".ldm_patched", "LdmPatched"),
    "modules.sd_hijack_unet": (".a1111.adapter", "A1111"),
    "modules.onediff_adapter": ("modules.onediff_adapter", "Standalone"),
}


def this_webui() -> WebUI:
    """The adapter of the WebUI that OneDiff runs in, never None. It is the same object until the process ends, also
    after a reload of scripts. If our code fails while it recognises the WebUI, the adapter does nothing; its `unmet`
    (the reason for users) has all faults of this process so far, joined by "; ".
    """
    if runtime.webui is None:
        runtime.webui = runtime.guard.attempt("recognising the WebUI", adapter_of_host)
    if runtime.webui is None:
        runtime.webui = WebUI(unmet="; ".join(runtime.guard.faults))
    return runtime.webui


def adapter_of_host() -> WebUI:
    """A new adapter for the WebUI in this process. Its kind is the first one in HOSTS whose Python module can be
    imported; the name of its folder does not count.

    For a WebUI of no known kind, or of a release that lacks something, the adapter does nothing; its `unmet` is the
    reason, which is also logged.
    """
    module_path, name = next((adapter for mark, adapter in HOSTS.items() if offers(mark)), ("", ""))
    if not module_path:
        webui = WebUI(unmet="OneDiff does not support this WebUI, and changes nothing in it")
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
