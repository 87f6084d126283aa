"""The WebUIs and libraries that OneDiff serves, one adapter each."""
from __future__ import annotations

from pathlib import Path

from ..accelerator import runtime
from .webui import WebUI


def this_webui() -> WebUI:
    """The adapter of the WebUI that we run in: one for the life of the process, however often scripts are loaded."""
    if runtime.webui is None:
        runtime.webui = adapter_class()()
    return runtime.webui


def adapter_class() -> type[WebUI]:
    """Judged by what lies in and beside the package called modules: every one of these WebUIs has one."""
    import modules

    package = Path(list(modules.__path__)[0])
    if Path(package.parent, "modules_forge").is_dir():
        from .forge import Forge

        return Forge
    if Path(package, "sd_hijack.py").is_file():
        from .a1111 import A1111

        return A1111
    from .demo import Standalone

    return Standalone
