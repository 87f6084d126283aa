"""How a host's call of its UNet becomes ours: one adapter for each kind of WebUI, and diffusers.

this_webui() gives the adapter of the WebUI that we run in. Import the adapters' packages only inside their host.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from ..runtime.runtime import runtime
from .contract import Need, first_unmet, offers
from .unknown import UnknownHost
from .webui import WebUI

log = logging.getLogger("onediff")


class Candidate(NamedTuple):
    """A kind of host. mark: a module that only it offers. load: its release, its needs, and its adapter's class."""

    mark: str
    load: Callable[[], tuple[str, Iterable[Need], Callable[[], WebUI]]]


def forge() -> tuple[str, Iterable[Need], Callable[[], WebUI]]:
    from .forge.traits import FORGE

    def adapter() -> WebUI:
        from .forge.adapter import Forge

        return Forge()

    return FORGE.release(), FORGE.needs(), adapter


def ldm_patched() -> tuple[str, Iterable[Need], Callable[[], WebUI]]:
    from .ldm_patched.adapter import LDM_PATCHED, LdmPatched

    return LDM_PATCHED.release(), LDM_PATCHED.needs(), LdmPatched


def a1111() -> tuple[str, Iterable[Need], Callable[[], WebUI]]:
    from .a1111 import adapter

    return adapter.release(), adapter.NEEDS, adapter.A1111


def standalone() -> tuple[str, Iterable[Need], Callable[[], WebUI]]:
    # A host that is ours brings its adapter along.
    from modules.onediff_adapter import Standalone

    return Standalone.release, (), Standalone


# reForge carries A1111's modules besides its own, so it is asked for first.
CANDIDATES = (
    Candidate("backend.nn.unet", forge),
    Candidate("ldm_patched.ldm.modules.diffusionmodules.openaimodel", ldm_patched),
    Candidate("modules.sd_hijack_unet", a1111),
    Candidate("modules.onediff_adapter", standalone),
)


def this_webui() -> WebUI:
    """The adapter of the WebUI that we run in: one for the life of the process, however often scripts are loaded."""
    if runtime.webui is None:
        runtime.webui = runtime.guard.attempt("looking at the WebUI", adapter_of_host)
    if runtime.webui is None:
        runtime.webui = UnknownHost("this WebUI", "; ".join(runtime.guard.faults))
    return runtime.webui


def adapter_of_host() -> WebUI:
    """Judged by what the host offers, not by what its folders are called."""
    candidate = next((candidate for candidate in CANDIDATES if offers(candidate.mark)), None)
    if candidate is None:
        return told(UnknownHost("this WebUI", "OneDiff does not know this WebUI, and changes nothing in it"))
    release, needs, adapter = candidate.load()
    unmet = first_unmet(needs)
    if unmet is not None:
        return told(UnknownHost(release, f"{release} {unmet}: OneDiff does not know this release, and changes nothing"))
    return adapter()


def told(host: UnknownHost) -> UnknownHost:
    log.warning("%s.", host.reason)
    return host


def register(callbacks: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Have the host call our functions: pairs of its on_... and ours.

    A WebUI looks at the whole stack whenever one is registered, and for every frame of a script, which is no module,
    at all modules of the process: 0.05 to 0.1 s each time. The stack of a thread is short and has no script in it.
    """

    def work() -> None:
        for host_takes, ours in callbacks:
            guard.attempt("registering with the WebUI", partial(host_takes, ours))

    guard = runtime.guard
    thread = threading.Thread(target=work, name="onediff-register")
    thread.start()
    thread.join()
